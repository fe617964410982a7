"""The cases of writing pages, a loop that is slow and plain, and what an implementation makes of a case."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from kernel_checks import GUARD, NAN, check_margins, largest_difference, surrounded


@dataclass(frozen=True)
class Case:
    """One call: the slot of each token, and the sizes of everything."""

    note: str
    slots: tuple[int, ...]
    kv_heads: int = 2
    head_dim: int = 24
    page_size: int = 4
    num_pages: int = 5

    def __str__(self):
        return self.note

    @property
    def iterations(self) -> int:
        """How many programs the kernel has."""
        return len(self.slots) * -(-self.kv_heads * self.head_dim // 1024)


CASES = [
    Case("one token", (6,)),
    Case("a chunk over the end of a page", (6, 7, 8, 9, 10)),
    Case("pages in no order", (19, 3, 0, 16, 7)),
    Case("nobody wants the middle one", (2, -1, 3)),
    Case("nobody wants any", (-1, -1)),
    Case("no token", ()),
    Case("every slot", tuple(range(19, -1, -1))),
    Case("one number", (4, 1), kv_heads=1, head_dim=1),
    Case("a power of two", (5, 0), kv_heads=4, head_dim=16),
    Case("head size 80", (3, 8), kv_heads=3, head_dim=80),
    Case("head size 96", (9, 2), kv_heads=1, head_dim=96),
    Case("more numbers than a block has lanes", (2, 0, -1), kv_heads=11, head_dim=96),
    Case("page size 1", (4, 0, 2), page_size=1),
    Case("page size 3", (14, -1, 1), page_size=3),
    Case("page size 64", (63, 64, 319), page_size=64),
]


def tensors_of(case: Case, dtype=torch.float64, index_dtype=torch.int64) -> tuple[torch.Tensor, ...]:
    """The arguments of a call. The pools hold numbers, each another, so that a lost one is missed."""
    generator = torch.Generator().manual_seed(len(case.note))
    tokens, pools = (len(case.slots),), (case.num_pages, case.page_size)
    sizes = [(*first, case.kv_heads, case.head_dim) for first in (tokens, tokens, pools, pools)]
    numbers = [torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for size in sizes]
    return *numbers, torch.tensor(case.slots, dtype=index_dtype)


def written_by_a_loop(k, v, k_pages, v_pages, slots):
    """The pools afterwards, one token after the other."""
    pools = [k_pages.clone(), v_pages.clone()]
    for token, slot in enumerate(slots.tolist()):
        for pool, x in zip(pools, (k, v), strict=True):
            if slot >= 0:
                pool[slot // pool.shape[1], slot % pool.shape[1]] = x[token]
    return pools


def errors(write, case: Case, dtype) -> tuple[float, float]:
    """How far the pools are from the loop's, keys and values. What is read lies in NaN, the pools between guards."""
    k, v, k_pages, v_pages, slots = tensors_of(case, dtype, torch.int32)
    wanted = written_by_a_loop(k, v, k_pages, v_pages, slots)
    (k, _), (v, _) = surrounded(k, NAN), surrounded(v, NAN)
    (k_pages, k_memory), (v_pages, v_memory) = surrounded(k_pages, GUARD), surrounded(v_pages, GUARD)
    assert write(k, v, k_pages, v_pages, slots) is None
    check_margins(k_memory)
    check_margins(v_memory)
    return tuple(largest_difference(x, y) for x, y in zip((k_pages, v_pages), wanted, strict=True))
