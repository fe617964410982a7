"""A kernel that stores the slots and offsets which the kernels compute for shared pages far beyond any pool here."""

import torch
import triton
import triton.language as tl

from minserve.radix.shared_prefix_attention_triton import prefix_slot, vector_offset


@triton.jit
def store_offsets(places, pages, out, page_size, head, heads, SIZE: tl.constexpr):
    slot = prefix_slot(tl.load(places), tl.load(pages), page_size)
    tl.store(out, slot)
    tl.store(out + 1, vector_offset(slot, head, heads, SIZE))
    tl.store(out + 2, vector_offset(tl.load(places), head, heads, SIZE))


def offsets_of(place: int, page: torch.Tensor, page_size: int, head: int, heads: int, size: int) -> list[int]:
    """The slot of a token, where its head's numbers begin in the pool, and where those of so distant a query do."""
    out = torch.zeros(3, dtype=torch.int64)
    store_offsets[(1,)](torch.tensor([place], dtype=torch.int32), page, out, page_size, head, heads, SIZE=size)
    return out.tolist()
