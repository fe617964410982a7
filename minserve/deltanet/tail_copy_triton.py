"""The kernel of `tail_copy`: a masked copy, one program for each row and block of channels.

A block has a power of two of lanes, and channels are seldom one: the mask keeps the lanes beyond the last channel from
loading and from storing. A masked load needs a value of its own (`other`), or what is in those lanes is undefined.
Offsets are 64 bits wide: a pool passes 2^31 numbers long before it fills a GPU's memory.
"""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor

from minserve.errors import InvalidValue, MissingRequirement

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise MissingRequirement("triton", "a kernel, tail_copy_triton,", "pip install 'minserve[triton]'") from error

MAX_BLOCK = 1024


@triton.jit
def input_offset(token, channels):
    """Where a token's channels begin in x."""
    return token.to(tl.int64) * channels


@triton.jit
def tail_offset(slot, column, KEEP: tl.constexpr, channels):
    """Where the channels of one column of a slot's tail begin in the pool."""
    return (slot.to(tl.int64) * KEEP + column) * channels


@triton.jit
def tail_copy_kernel(
    x, row_starts, tails, state_read, state_write, out, channels, KEEP: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One program keeps one block of channels of one row's tail."""
    row = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = channel < channels
    start, stop = tl.load(row_starts + row), tl.load(row_starts + row + 1)
    read, write = tl.load(state_read + row), tl.load(state_write + row)
    if write >= 0:
        for column in range(KEEP):
            token = stop - KEEP + column
            kept = tl.full((BLOCK,), 0, x.dtype.element_ty)
            if token >= start:
                kept = tl.load(x + input_offset(token, channels) + channel, mask=exists, other=0)
            elif read >= 0:
                old = tails + tail_offset(read, KEEP + token - start, KEEP, channels)
                kept = tl.load(old + channel, mask=exists, other=0)
            tl.store(out + tail_offset(write, column, KEEP, channels) + channel, kept, mask=exists)


def tail_copy(
    x: Float[Tensor, "tokens channels"],
    row_starts: Int[Tensor, " rows_plus_1"],
    tails: Float[Tensor, "slots kernel_minus_1 channels"],
    state_read: Int[Tensor, " rows"],
    state_write: Int[Tensor, " rows"],
    *,
    out: Float[Tensor, "slots kernel_minus_1 channels"] | None = None,
) -> Float[Tensor, "slots kernel_minus_1 channels"]:
    """Give every row of a step its new tail; arguments and result as the reference's, `minserve.deltanet.tail_copy`.

    Arguments:
        out: the pool to write to, a copy of `tails` unless given. It may be `tails` itself where no row writes a slot
            that a row reads, which is the engine's rule: programs run in any order.
    Changes: the written slots of `out`.
    Errors: InvalidValue for tensors that are not contiguous or differ in dtype; MissingRequirement without a GPU.
    """
    out = tails.clone() if out is None else out
    numbers, indices = {"x": x, "tails": tails, "out": out}, (row_starts, state_read, state_write)
    for name, tensor in numbers.items():
        if tensor.dtype != x.dtype:
            raise InvalidValue(f"{name}.dtype", tensor.dtype, f"{x.dtype}, as x is")
    if not all(tensor.is_contiguous() for tensor in (*numbers.values(), *indices)):
        raise InvalidValue("strides", "of a view", "those of contiguous tensors: the kernel computes addresses itself")
    if not x.is_cuda and isinstance(tail_copy_kernel, triton.JITFunction):
        raise MissingRequirement("a GPU", "a compiled kernel", "set TRITON_INTERPRET=1, or use the reference")
    num_rows, (_, keep, channels) = len(state_write), tails.shape
    block = min(MAX_BLOCK, triton.next_power_of_2(channels))
    if num_rows:
        grid = (num_rows, triton.cdiv(channels, block))
        tail_copy_kernel[grid](x, row_starts, tails, state_read, state_write, out, channels, KEEP=keep, BLOCK=block)
    return out
