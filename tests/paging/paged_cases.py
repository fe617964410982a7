"""The cases of paged attention, a loop that is slow and plain, and what an implementation makes of a case."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from kernel_checks import GUARD, NAN, check_margins, largest_difference, surrounded

KEYS = 16  # a small block of keys, so that short contexts have several


@dataclass(frozen=True)
class Case:
    """One call: of each row its queries and its context, and the sizes of everything."""

    note: str
    queries: tuple[int, ...]
    contexts: tuple[int, ...]
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 24
    page_size: int = 4
    part_tokens: int = 512
    spare_pages: int = 1  # entries of the page table beyond the longest context

    def __str__(self):
        return self.note

    @property
    def max_pages(self) -> int:
        return max((-(-context // self.page_size) for context in self.contexts), default=0) + self.spare_pages

    @property
    def iterations(self) -> int:
        """How many blocks of keys, or parts, all programs of the kernels look at, an idle program counting one."""
        at_once = max(16, self.heads // self.kv_heads) // (self.heads // self.kv_heads)
        parts = -(-self.max_pages * self.page_size // self.part_tokens)
        tiles = sum(self.queries) // at_once + len(self.queries)
        blocks = 0
        for queries, context in zip(self.queries, self.contexts, strict=True):
            for first in range(0, queries, at_once):
                seen = context - queries + min(first + at_once, queries)
                length = seen if queries > at_once else self.part_tokens
                blocks += sum(-(-min(length, seen - begin) // KEYS) - 1 for begin in range(0, seen, length))
        return self.kv_heads * (tiles * parts + blocks) + (parts > 1) * parts * sum(self.queries)


CASES = [
    Case("the first token", (1,), (1,)),
    Case("decode at every place in a page", (1,) * 5, (3, 4, 5, 8, 9)),
    Case("a prompt from its start", (6,), (6,)),
    Case("a chunk after a prefix", (5,), (9,)),
    Case("a chunk that starts at a page", (5,), (13,)),
    Case("decode rows, a chunk and drafts in one batch", (1, 6, 1, 3), (17, 9, 5, 8)),
    Case("empty rows, with and without a context", (0, 2, 0, 1, 0), (0, 5, 7, 3, 0)),
    Case("no row", (), ()),
    Case("no token", (0, 0), (0, 9)),
    Case("no page", (0,), (0,), spare_pages=0),
    Case("a page table with no entry to spare", (1, 2), (8, 7), spare_pages=0),
    Case("a page table much wider than the context", (1,), (5,), spare_pages=40),
    Case("page size 1", (1, 3), (7, 5), page_size=1),
    Case("page size 3", (1, 4), (20, 10), page_size=3),
    Case("page size 16", (1, 5), (33, 16), page_size=16),
    Case("page size 64", (1, 2), (70, 64), page_size=64),
    Case("every head its own keys", (1, 5), (9, 18), heads=3, kv_heads=3),
    Case("one key head for all", (2, 1), (6, 17), heads=5, kv_heads=1),
    Case("groups of three, several tiles", (11, 1), (14, 6), heads=6, kv_heads=2),
    Case("a group larger than the smallest tile", (3,), (7,), heads=40, kv_heads=2),
    Case("a chunk of several tiles and blocks", (19,), (40,)),
    Case("head size 1", (1, 3), (9, 5), head_dim=1),
    Case("head size 80", (1, 5), (18, 9), heads=6, kv_heads=3, head_dim=80),
    Case("head size 96", (1, 5), (18, 9), heads=3, kv_heads=1, head_dim=96),
    Case("a context split at pages", (1, 1), (41, 7), part_tokens=16),
    Case("a context split inside pages", (1,), (33,), part_tokens=7),
    Case("parts that the first queries do not see", (6,), (13,), heads=2, part_tokens=3),
    Case("parts of one token", (1, 2), (6, 4), part_tokens=1, spare_pages=0),
    Case("a chunk stays whole where decode is split", (1, 0, 10), (40, 0, 21), part_tokens=16),
    Case("split, groups of three and odd pages", (1, 5), (26, 19), 6, 2, 80, page_size=3, part_tokens=10),
]


def tensors_of(case: Case, dtype=torch.float64, index_dtype=torch.int64) -> tuple[torch.Tensor, ...]:
    """The arguments of a call. Pages lie in no order; what is not some row's context holds NaN, page tails included."""
    generator = torch.Generator().manual_seed(len(case.note) + sum(case.contexts))

    def randn(*size):
        return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)

    row_pages = [-(-context // case.page_size) for context in case.contexts]
    order = torch.randperm(sum(row_pages) + 3, generator=generator)
    pools = [torch.full((len(order), case.page_size, case.kv_heads, case.head_dim), NAN, dtype=dtype) for _ in "kv"]
    page_tables = torch.full((len(row_pages), case.max_pages), -1)
    page_tables[::2] = order[-1]  # an entry beyond the context is -1, or some page with NaN in it
    for row, (context, own) in enumerate(zip(case.contexts, order.split([*row_pages, 3])[:-1], strict=True)):
        page_tables[row, : len(own)] = own
        slots = (own[:, None] * case.page_size + torch.arange(case.page_size)).flatten()[:context]
        for pool in pools:
            pool.flatten(0, 1)[slots] = randn(context, *pool.shape[2:])
    indices = (page_tables, torch.tensor([0, *case.queries]).cumsum(0), torch.tensor(case.contexts, dtype=torch.long))
    return randn(sum(case.queries), case.heads, case.head_dim), *pools, *(x.to(index_dtype) for x in indices)


def attended_by_a_loop(q, k_pages, v_pages, page_tables, row_starts, context_lens):
    """One query and head after the other, in float64, each token looked up by itself."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    lse = torch.zeros(q.shape[:2], dtype=torch.float64)
    group, page_size = q.shape[1] // k_pages.shape[2], k_pages.shape[1]
    for row, context in enumerate(context_lens.tolist()):
        start, stop = row_starts[row : row + 2].tolist()
        places = [(page_tables[row, t // page_size].item(), t % page_size) for t in range(context)]
        k, v = (torch.stack([x[at] for at in places]).double() if places else None for x in (k_pages, v_pages))
        for token in range(start, stop):
            seen = context - stop + token + 1
            for head in range(q.shape[1]):
                keys, values = k[:seen, head // group], v[:seen, head // group]
                scores = keys @ q[token, head].double() / q.shape[-1] ** 0.5
                out[token, head], lse[token, head] = scores.softmax(0) @ values, scores.logsumexp(0)
    return out, lse


def results_in_poison(kernel, case: Case, dtype, **options):
    """What the kernel makes of a case whose inputs lie in NaN and whose results lie between guards."""
    *numbers, page_tables, row_starts, context_lens = tensors_of(case, dtype, torch.int32)
    q, k_pages, v_pages = (surrounded(x, NAN)[0] for x in numbers)
    wide = torch.promote_types(dtype, torch.float32)
    out, out_memory = surrounded(torch.full_like(q, NAN), GUARD)
    lse, lse_memory = surrounded(torch.full(q.shape[:2], NAN, dtype=wide), GUARD)
    options = {"part_tokens": case.part_tokens, "block_keys": KEYS} | options
    found = kernel(q, k_pages, v_pages, page_tables, row_starts, context_lens, out=out, lse=lse, **options)
    assert found[0] is out and found[1] is lse
    check_margins(out_memory)
    check_margins(lse_memory)
    return found


def errors(kernel, case: Case, dtype) -> tuple[float, float]:
    """How far the kernel is from the loop: the attention, and its log-sum-exp."""
    wanted = attended_by_a_loop(*tensors_of(case, dtype))
    found = results_in_poison(kernel, case, dtype)
    return tuple(largest_difference(x, y) for x, y in zip(found, wanted, strict=True))
