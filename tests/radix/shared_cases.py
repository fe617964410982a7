"""The cases of attention behind a shared prefix: those of paged attention, of which the first pages are the same."""

from __future__ import annotations

from dataclasses import dataclass

import paged_cases
import torch
from kernel_checks import GUARD, NAN, check_margins, largest_difference, surrounded
from paged_cases import KEYS, attended_by_a_loop

LANES = 64  # the queries of a tile, for the head sizes here; wide ones have fewer, and more tiles


@dataclass(frozen=True)
class Case(paged_cases.Case):
    """One call: what paged attention gets, and how many pages, from the first on, all rows with queries share."""

    shared: int = 1

    def __str__(self):
        return self.note

    @property
    def num_shared(self) -> int:
        """How many tokens are shared."""
        return self.shared * self.page_size

    @property
    def iterations(self) -> int:
        """How many blocks of keys, or parts, all programs look at."""
        tails = tuple(max(0, context - self.num_shared) for context in self.contexts)
        paged = paged_cases.Case(
            "", self.queries, tails, self.heads, self.kv_heads, self.head_dim, self.page_size, spare_pages=1
        )
        parts = -(-self.num_shared // self.part_tokens)
        tiles = -(-sum(self.queries) * (self.heads // self.kv_heads) // LANES)
        prefix = tiles * self.kv_heads * parts * -(-min(self.num_shared, self.part_tokens) // KEYS)
        return paged.iterations + prefix + (parts + 1) * sum(self.queries)


CASES = [
    Case("decode rows behind one page", (1,) * 5, (5, 6, 7, 8, 9)),
    Case("nothing is shared", (1, 6, 3), (5, 9, 3), shared=0),
    Case("a row alone", (1,), (11,), shared=2),
    Case("the first token behind the prefix", (1, 1), (9, 9), shared=2, spare_pages=0),
    Case("tails without a token of before", (5, 1, 2), (13, 9, 10), shared=2),
    Case("decode rows, a chunk and drafts in one batch", (1, 6, 1, 3), (17, 16, 9, 12), shared=2),
    Case("empty rows, which share nothing", (0, 2, 0, 1, 0), (0, 11, 3, 9, 30), shared=2),
    Case("an empty row and one with the whole table", (0, 3), (8, 16), shared=3, spare_pages=0),
    Case("no row", (), (), shared=0),
    Case("no token", (0, 0), (0, 9)),
    Case("a page table much wider than the context", (1, 1), (5, 7), spare_pages=40),
    Case("page size 1", (1, 3, 1), (8, 11, 6), page_size=1, shared=5),
    Case("page size 3", (1, 4, 1), (20, 13, 10), page_size=3, shared=3),
    Case("page size 16", (1, 5), (33, 21), page_size=16),
    Case("page size 64", (1, 2), (70, 67), page_size=64),
    Case("a prefix of several blocks", (1, 2, 1), (45, 43, 41), shared=10),
    Case("a prefix that ends inside a block", (1, 2), (25, 23), page_size=3, shared=7),
    Case("every head its own keys", (1, 5), (9, 18), heads=3, kv_heads=3, shared=2),
    Case("one key head for all", (2, 1), (6, 17), heads=5, kv_heads=1),
    Case("a tile that ends inside a group of three", (11, 1, 13), (19, 6, 17), heads=6, kv_heads=2),
    Case("a group that is no power of two, over tiles", (3, 1), (7, 9), heads=40, kv_heads=2),
    Case("two tiles and several blocks", (33, 1), (53, 24), kv_heads=2, shared=5),
    Case("head size 1", (1, 3), (9, 7), head_dim=1),
    Case("head size 16", (1, 3), (9, 7), heads=3, kv_heads=1, head_dim=16),
    Case("head size 80", (1, 5), (18, 13), heads=6, kv_heads=3, head_dim=80, shared=2),
    Case("head size 96", (1, 5), (18, 13), heads=3, kv_heads=1, head_dim=96, shared=2),
    Case("a prefix split at pages", (1, 1), (41, 38), part_tokens=16, shared=9),
    Case("a prefix split inside pages", (1, 2), (33, 30), part_tokens=7, shared=6),
    Case("parts of one token", (1, 2), (6, 7), part_tokens=1),
    Case("split, groups of three and odd pages", (1, 5), (26, 23), 6, 2, 80, page_size=3, part_tokens=10, shared=6),
]


def tensors_of(case: Case, dtype=torch.float64, index_dtype=torch.int64) -> tuple[torch.Tensor, ...]:
    """The six tensors of a call. What no query looks at holds NaN: free pages, and what follows a context."""
    q, *pools, page_tables, row_starts, context_lens = paged_cases.tensors_of(case, dtype, index_dtype)
    asking = [row for row, queries in enumerate(case.queries) if queries]
    for row in asking[1:]:
        for pool in pools:
            pool[page_tables[row, : case.shared]] = NAN  # what it had before it shared
        page_tables[row, : case.shared] = page_tables[asking[0], : case.shared]
    return q, *pools, page_tables, row_starts, context_lens


def results_in_poison(kernel, case: Case, dtype, **options):
    """What the kernel makes of a case whose inputs lie in NaN and whose results lie between guards."""
    *numbers, page_tables, row_starts, context_lens = tensors_of(case, dtype, torch.int32)
    q, k_pages, v_pages = (surrounded(x, NAN)[0] for x in numbers)
    wide = torch.promote_types(dtype, torch.float32)
    out, out_memory = surrounded(torch.full_like(q, NAN), GUARD)
    lse, lse_memory = surrounded(torch.full(q.shape[:2], NAN, dtype=wide), GUARD)
    options = {"num_shared_pages": case.shared, "part_tokens": case.part_tokens, "block_keys": KEYS} | options
    found = kernel(q, k_pages, v_pages, page_tables, row_starts, context_lens, out=out, lse=lse, **options)
    assert found[0] is out and found[1] is lse
    check_margins(out_memory)
    check_margins(lse_memory)
    return found


def errors(kernel, case: Case, dtype) -> tuple[float, float]:
    """How far the kernel, given its paged attention, is from the loop: the attention, and its log-sum-exp."""
    wanted = attended_by_a_loop(*tensors_of(case, dtype))
    found = results_in_poison(kernel, case, dtype)
    return tuple(largest_difference(x, y) for x, y in zip(found, wanted, strict=True))
