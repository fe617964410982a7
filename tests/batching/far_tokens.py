"""A kernel that stores the offsets which ragged attention's kernel computes, for tokens far beyond any tensor here."""

import torch
import triton
import triton.language as tl

from minserve.batching.ragged_attention_triton import vector_offset


@triton.jit
def store_offset(tokens, out, head, heads, SIZE: tl.constexpr):
    tl.store(out, vector_offset(tl.load(tokens), head, heads, SIZE))


def offset_of(token: torch.Tensor, head: int, heads: int, size: int) -> int:
    """Where the numbers of one head of a token begin."""
    out = torch.zeros(1, dtype=torch.int64)
    store_offset[(1,)](token, out, head, heads, SIZE=size)
    return out.item()
