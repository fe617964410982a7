"""Kernels that store the offsets which DeltaNet's kernels compute, for slots far beyond any tensor here."""

import torch
import triton
import triton.language as tl

from minserve.deltanet import conv_tail_triton as convolution
from minserve.deltanet.gated_delta_triton import state_offset, vector_offset
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


conv_input, conv_tail = convolution.input_offset, convolution.tail_offset


@triton.jit
def store_convolution_offsets(numbers, out, column, channels, KEEP: tl.constexpr):
    number = tl.load(numbers)
    tl.store(out, conv_input(number, channels))
    tl.store(out + 1, conv_tail(number, column, KEEP, channels))


def convolution_offsets_of(number: torch.Tensor, column: int, channels: int, keep: int) -> list[int]:
    """The offsets of token `number` among the convolution's inputs, and of `column` of the tail of row `number`."""
    out = torch.zeros(2, dtype=torch.int64)
    store_convolution_offsets[(1,)](number, out, column, channels, KEEP=keep)
    return out.tolist()


@triton.jit
def store_delta_offsets(numbers, out, head, heads, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr):
    number = tl.load(numbers)
    tl.store(out, vector_offset(number, head, heads, KEY_DIM))
    tl.store(out + 1, state_offset(number, head, heads, KEY_DIM, VALUE_DIM))


def delta_offsets_of(number: torch.Tensor, head: int, heads: int, key_dim: int, value_dim: int) -> list[int]:
    """Where a head of token `number` begins among the keys, and the matrix of a head of state `number`."""
    out = torch.zeros(2, dtype=torch.int64)
    store_delta_offsets[(1,)](number, out, head, heads, KEY_DIM=key_dim, VALUE_DIM=value_dim)
    return out.tolist()
