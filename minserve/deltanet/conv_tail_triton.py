"""The kernel of `conv_tail_ragged`: each token looks back on inputs that lie in x, or in its row's tail.

    out[t, c] = silu( sum_j weight[c, j] input[t - KEEP + j, c] )        KEEP = kernel - 1

An input before the row's first token is in the tail, any other is in x; one masked load from each finds it, whatever
the row's length. The last KEEP inputs up to a token are the tail that it leaves behind, so the program that convolves a
row's last token writes the row's new tail as well.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from minserve.errors import InvalidValue, MissingRequirement

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise MissingRequirement("triton", "a kernel, conv_tail_triton,", "pip install 'minserve[triton]'") from error

TOKENS, CHANNELS = 8, 128  # of one program at most


@triton.jit
def input_offset(token, channels):
    """Where a token's channels begin in x."""
    return token.to(tl.int64) * channels


@triton.jit
def tail_offset(row, column, KEEP: tl.constexpr, channels):
    """Where the channels of one column of a row's tail begin."""
    return (row.to(tl.int64) * KEEP + column) * channels


@triton.jit
def conv_tail_kernel(
    x, weight, tails, row_starts, token_rows, out, new_tails, num_tokens, channels,
    KEEP: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, EVERY: tl.constexpr,
):  # fmt: skip
    """One program convolves some channels of some tokens, whichever rows they belong to."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_token, is_channel = token < num_tokens, channel < channels
    row = tl.load(token_rows + token, mask=is_token, other=0)
    start, stop = tl.load(row_starts + row), tl.load(row_starts + row + 1)
    wide = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    mixed = tl.full((TOKENS, CHANNELS), 0, wide)
    for j in range(KEEP + 1):
        at = token - KEEP + j
        in_x, in_tail = is_token & (at >= start), is_token & (at < start)
        new = tl.load(
            x + input_offset(at, channels)[:, None] + channel[None, :],
            mask=in_x[:, None] & is_channel[None, :], other=0,
        )  # fmt: skip
        old = tl.load(
            tails + tail_offset(row, KEEP + at - start, KEEP, channels)[:, None] + channel[None, :],
            mask=in_tail[:, None] & is_channel[None, :], other=0,
        )  # fmt: skip
        found = tl.where(in_x[:, None], new, old.to(new.dtype))
        factor = tl.load(weight + input_offset(channel, KEEP + 1) + j, mask=is_channel, other=0)
        mixed += found.to(wide) * factor.to(wide)[None, :]
        if j > 0:  # the tail after this token has this input in column j - 1
            keeps = is_token if EVERY else is_token & (token + 1 == stop)
            whose = token.to(tl.int64) if EVERY else row.to(tl.int64)
            to = new_tails + tail_offset(whose, j - 1, KEEP, channels)[:, None] + channel[None, :]
            tl.store(to, found, mask=keeps[:, None] & is_channel[None, :])
    mixed = mixed * tl.sigmoid(mixed)
    to = out + input_offset(token, channels)[:, None] + channel[None, :]
    tl.store(to, mixed.to(out.dtype.element_ty), mask=is_token[:, None] & is_channel[None, :])


def conv_tail_ragged(
    x: Float[Tensor, "tokens channels"],
    weight: Float[Tensor, "channels kernel"],
    tails: Float[Tensor, "rows kernel_minus_1 channels"],
    row_starts: Int[Tensor, " rows_plus_1"],
    *,
    every_tail: bool = False,
    out: Float[Tensor, "tokens channels"] | None = None,
    new_tails: Float[Tensor, "new_tails kernel_minus_1 channels"] | None = None,
) -> tuple[Float[Tensor, "tokens channels"], Float[Tensor, "new_tails kernel_minus_1 channels"]]:
    """Convolve the rows of a step; arguments and results as the reference's, `minserve.deltanet.conv_tail`.

    Arguments:
        out, new_tails: where the results go, new tensors of x's dtype unless given; never `tails` itself.
    Changes: `out` and `new_tails`. Nothing waits for the GPU.
    Errors: InvalidValue for dtypes or strides that do not fit; MissingRequirement without a GPU.
    """
    (num_tokens, channels), keep = x.shape, tails.shape[1]
    out = x.new_empty(x.shape) if out is None else out
    shape = (num_tokens if every_tail else len(tails), keep, channels)
    new_tails = x.new_empty(shape) if new_tails is None else new_tails
    for name, tensor, dtype in (("tails", tails, None), ("out", out, x.dtype), ("new_tails", new_tails, x.dtype)):
        if dtype not in (None, tensor.dtype):
            raise InvalidValue(f"{name}.dtype", tensor.dtype, f"{dtype}, as x is")
        if not tensor.is_contiguous():
            raise InvalidValue(f"{name}.stride()", tensor.stride(), "that of a contiguous tensor")
        if not tensor.is_cuda and isinstance(conv_tail_kernel, triton.JITFunction):
            raise MissingRequirement("a GPU", "a compiled kernel", "set TRITON_INTERPRET=1, or use the reference")
    if not every_tail:
        new_tails.copy_(tails)  # an empty row has no token that would write its tail
    if num_tokens:
        tokens = torch.arange(num_tokens, device=x.device)
        token_rows = torch.searchsorted(row_starts[1:].contiguous(), tokens, right=True)
        block = min(CHANNELS, triton.next_power_of_2(channels))
        conv_tail_kernel[triton.cdiv(num_tokens, TOKENS), triton.cdiv(channels, block)](
            x.contiguous(), weight.contiguous(), tails, row_starts.contiguous(), token_rows, out, new_tails,
            num_tokens, channels, KEEP=keep, TOKENS=TOKENS, CHANNELS=block, EVERY=every_tail,
        )  # fmt: skip
    return out, new_tails
