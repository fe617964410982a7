"""A kernel that stores the offsets which the tail copy's kernel computes, for slots far beyond any tensor here."""

import torch
import triton
import triton.language as tl

from minserve.deltanet.tail_copy_triton import input_offset, tail_offset


@triton.jit
def store_offsets(numbers, out, column, channels, KEEP: tl.constexpr):
    number = tl.load(numbers)
    tl.store(out, input_offset(number, channels))
    tl.store(out + 1, tail_offset(number, column, KEEP, channels))


def offsets_of(number: torch.Tensor, column: int, channels: int, keep: int) -> torch.Tensor:
    """The offsets of token `number` among the inputs, and of `column` of slot `number` in the pool."""
    out = torch.zeros(2, dtype=torch.int64)
    store_offsets[(1,)](number, out, column, channels, KEEP=keep)
    return out
