"""The short causal convolution before the delta rule, and the tail of inputs that it must remember.

    out[t, c] = silu( sum_j weight[c, j] x[t - (kernel - 1) + j, c] )

Token t needs the kernel - 1 inputs before it. They are taken *before* the SiLU, and they are part of a request's
state as much as the matrix is: a chunk that starts without its tail computes something else.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F


def conv_tail(
    x: Float[Tensor, "batch tokens channels"],
    weight: Float[Tensor, "channels kernel"],
    tail: Float[Tensor, "batch kernel_minus_1 channels"],
) -> tuple[Float[Tensor, "batch tokens channels"], Float[Tensor, "batch kernel_minus_1 channels"]]:
    """Convolve a chunk that continues a sequence, and return what the next chunk needs of it.

    Arguments:
        x: the chunk's inputs, any number of tokens.
        weight: one filter per channel, oldest input first.
        tail: the last kernel - 1 inputs before the chunk, oldest first; zeros at a sequence's start.
    Returns the outputs and the new tail. Nothing is changed in place.

    >>> x, weight = torch.arange(5.0).view(1, 5, 1), torch.tensor([[0.0, 0.0, 0.0, 1.0]])
    >>> out, tail = conv_tail(x, weight, torch.zeros(1, 3, 1))
    >>> tail.flatten().tolist()
    [2.0, 3.0, 4.0]
    """
    joined = torch.cat([tail.to(x.dtype), x], dim=1)
    if not x.shape[1]:
        return x, joined
    windows = joined.unfold(1, weight.shape[1], 1)  # [batch tokens channels kernel], a view
    return F.silu((windows * weight).sum(-1)), joined[:, x.shape[1] :]


def conv_tail_ragged(
    x: Float[Tensor, "tokens channels"],
    weight: Float[Tensor, "channels kernel"],
    tails: Float[Tensor, "rows kernel_minus_1 channels"],
    row_starts: Int[Tensor, " rows_plus_1"],
    *,
    every_tail: bool = False,
) -> tuple[Float[Tensor, "tokens channels"], Float[Tensor, "new_tails kernel_minus_1 channels"]]:
    """Convolve the rows of a step, each continuing from its own tail; no row sees its neighbour's inputs.

    Arguments:
        x: the rows' inputs, packed.
        weight, tails: as in `conv_tail`, one tail per row.
        row_starts: where each row begins in x, and the end; a row may be empty, and then keeps its tail.
        every_tail: give the tail after every token instead of every row, packed as x is: see `gated_delta_ragged`.
    Returns the outputs, packed, and the new tails. Nothing is changed in place.
    """
    (num_rows, keep, _), num_tokens = tails.shape, len(x)
    length = num_tokens // num_rows if num_rows else 0
    if length and row_starts.tolist() == list(range(0, num_tokens + 1, length)):  # all rows are equally long: no laying
        rows = x.unflatten(0, (num_rows, length))
        out, new = conv_tail(rows, weight, tails)
        if every_tail:
            new = torch.cat([tails.to(x.dtype), rows], dim=1).unfold(1, keep, 1)[:, 1:].transpose(2, 3).flatten(0, 1)
        return out.flatten(0, 1), new
    # Lay each row's tail before its inputs, slide the filter over everything, and leave out what straddles two rows.
    rows, keeps = torch.arange(num_rows, device=x.device), torch.arange(keep, device=x.device)
    at = torch.arange(num_tokens, device=x.device) + keep * (rows + 1).repeat_interleave(row_starts.diff())
    tails_at = (row_starts[:-1] + keep * rows)[:, None] + keeps
    joined = x.new_empty(num_tokens + num_rows * keep, x.shape[1]).index_copy(0, at, x)
    joined = joined.index_copy(0, tails_at.flatten(), tails.to(x.dtype).flatten(0, 1))
    mixed = joined[keep:] * weight[:, keep]
    for j in range(keep):
        mixed = torch.addcmul(mixed, joined[j : len(joined) - keep + j], weight[:, j])
    begin = at + 1 - keep if every_tail else row_starts[1:] + keep * rows
    return F.silu(mixed[at - keep]), joined[begin[:, None] + keeps]
