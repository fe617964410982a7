"""The cases of ragged attention, a loop that is slow and plain, and what an implementation makes of a case."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from kernel_checks import GUARD, NAN, check_margins, largest_difference, surrounded

BLOCKS = {"block_queries": 16, "block_keys": 16}  # small ones, so that short rows have several


@dataclass(frozen=True)
class Case:
    """One call: the length of each row, and the sizes of everything."""

    note: str
    lengths: tuple[int, ...]
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 24

    def __str__(self):
        return self.note

    @property
    def iterations(self) -> int:
        """How many blocks of keys all programs of the kernel look at, an idle program counting one."""
        tiles = [(length, first) for length in self.lengths for first in range(0, length, 16)]
        idle = sum(self.lengths) // 16 + len(self.lengths) - len(tiles)
        return self.heads * (idle + sum(-(-min(length, first + 16) // 16) for length, first in tiles))


CASES = [
    Case("one token", (1,)),
    Case("one row", (7,)),
    Case("rows of unequal length", (3, 1, 6)),
    Case("empty rows everywhere", (0, 4, 0, 0, 3, 0)),
    Case("no row", ()),
    Case("nothing but empty rows", (0, 0)),
    Case("a tile exactly full", (16,)),
    Case("one token more than a tile", (17,)),
    Case("one token less than a tile", (15, 1)),
    Case("several tiles, several blocks of keys", (37,)),
    Case("a long row between short ones", (2, 33, 1)),
    Case("many rows of one token", (1,) * 19, heads=2, kv_heads=1),
    Case("every head its own keys", (5, 18), heads=3, kv_heads=3),
    Case("one key head for all", (5, 9), heads=5, kv_heads=1),
    Case("groups of three", (9, 4), heads=6, kv_heads=2),
    Case("one head", (6, 2), heads=1, kv_heads=1),
    Case("head size 1", (5, 3), head_dim=1),
    Case("head size 16", (5, 17), head_dim=16),
    Case("head size 40", (5, 17), head_dim=40),
    Case("head size 80", (5, 17), heads=6, kv_heads=3, head_dim=80),
    Case("head size 96", (18, 2), heads=3, kv_heads=1, head_dim=96),
]


def tensors_of(case: Case, dtype=torch.float64, index_dtype=torch.int64) -> tuple[torch.Tensor, ...]:
    """The arguments of a call."""
    generator = torch.Generator().manual_seed(len(case.note) + sum(case.lengths))
    heads = (case.heads, case.kv_heads, case.kv_heads)
    sizes = [(sum(case.lengths), num_heads, case.head_dim) for num_heads in heads]
    numbers = [torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for size in sizes]
    return *numbers, torch.tensor([0, *case.lengths]).cumsum(0).to(index_dtype)


def attended_by_a_loop(q, k, v, row_starts):
    """One query and head after the other, in float64."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    lse = torch.zeros(q.shape[:2], dtype=torch.float64)
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    for start, stop in zip(row_starts[:-1].tolist(), row_starts[1:].tolist(), strict=True):
        for token in range(start, stop):
            for head in range(q.shape[1]):
                keys, values = k[start : token + 1, head // group], v[start : token + 1, head // group]
                scores = keys @ q[token, head] / q.shape[-1] ** 0.5
                out[token, head], lse[token, head] = scores.softmax(0) @ values, scores.logsumexp(0)
    return out, lse


def results_in_poison(kernel, case: Case, dtype, **options):
    """What the kernel makes of a case whose inputs lie in NaN and whose results lie between guards."""
    q, k, v, row_starts = tensors_of(case, dtype, torch.int32)
    q, k, v = (surrounded(x, NAN)[0] for x in (q, k, v))
    wide = torch.promote_types(dtype, torch.float32)
    out, out_memory = surrounded(torch.full_like(q, NAN), GUARD)
    lse, lse_memory = surrounded(torch.full(q.shape[:2], NAN, dtype=wide), GUARD)
    found = kernel(q, k, v, row_starts, out=out, lse=lse, **(BLOCKS | options))
    assert found[0] is out and found[1] is lse
    check_margins(out_memory)
    check_margins(lse_memory)
    return found


def errors(kernel, case: Case, dtype) -> tuple[float, float]:
    """How far the kernel is from the loop: the attention, and its log-sum-exp."""
    wanted = attended_by_a_loop(*tensors_of(case, dtype))
    found = results_in_poison(kernel, case, dtype)
    return tuple(largest_difference(x, y) for x, y in zip(found, wanted, strict=True))
