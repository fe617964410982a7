"""A kernel that stores the slots and offsets which paging's kernels compute, for pages far beyond any pool here."""

import torch
import triton
import triton.language as tl

from minserve.paging.paged_attention_triton import slot_of, vector_offset


@triton.jit
def store_offsets(places, pages, out, page_size, head, heads, SIZE: tl.constexpr):
    slot = slot_of(tl.load(places), tl.load(pages), page_size)
    tl.store(out, slot)
    tl.store(out + 1, vector_offset(slot, head, heads, SIZE))


def offsets_of(place: int, page: torch.Tensor, page_size: int, head: int, heads: int, size: int) -> list[int]:
    """The slot of a token, and where the numbers of one of its heads begin in the pool."""
    out = torch.zeros(2, dtype=torch.int64)
    store_offsets[(1,)](torch.tensor([place], dtype=torch.int32), page, out, page_size, head, heads, SIZE=size)
    return out.tolist()
