"""Keeping the convolution's tails: from a step's packed inputs into the slots where requests keep their state.

    new tail of row r  =  the last K of [ tails[state_read[r]] , x[row_starts[r] : row_starts[r + 1]] ]

K is kernel - 1, the inputs that the convolution looks back on.
A long row leaves its last K inputs, a row of fewer than K keeps a part of its old tail, and an empty row keeps all of
it. Rows are ragged and slots lie anywhere, so this is a copy in which each program has to know where to stop.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor


def tail_copy(
    x: Float[Tensor, "tokens channels"],
    row_starts: Int[Tensor, " rows_plus_1"],
    tails: Float[Tensor, "slots kernel_minus_1 channels"],
    state_read: Int[Tensor, " rows"],
    state_write: Int[Tensor, " rows"],
) -> Float[Tensor, "slots kernel_minus_1 channels"]:
    """Give every row of a step the convolution tail that its next step starts from.

    Arguments:
        x: the convolution's inputs, packed, before the SiLU.
        row_starts: where each row begins in x, and the end; a row may be empty.
        tails: the pool, one tail per slot, oldest input first, in x's dtype.
        state_read: the slot that a row continues from; -1 for a row that begins a sequence: zeros came before it.
        state_write: the slot that gets the new tail, no slot twice; -1 when nobody wants it.
    Returns the pool after the step. `tails` is not changed, and slots that no row writes keep what they held.

    >>> x, tails = torch.tensor([[1.0], [2.0], [3.0], [4.0]]), torch.full((3, 3, 1), 9.0)
    >>> new = tail_copy(x, torch.tensor([0, 3, 4]), tails, torch.tensor([-1, 0]), torch.tensor([1, 2]))
    >>> new.flatten(1).tolist()
    [[9.0, 9.0, 9.0], [1.0, 2.0, 3.0], [9.0, 9.0, 4.0]]
    """
    num_slots, keep, channels = tails.shape
    # One memory with one address per input: a row of zeros, then all old tails, then this step's inputs.
    memory = torch.cat([tails.new_zeros(1, channels), tails.flatten(0, 1), x])
    token = row_starts[1:, None] - keep + torch.arange(keep, device=x.device)
    place = token - row_starts[:-1, None]  # in its own row; below 0 it lies in the old tail
    read = state_read[:, None]
    in_tail = torch.where(read >= 0, 1 + read * keep + keep + place, 0)
    address = torch.where(place >= 0, 1 + num_slots * keep + token, in_tail)
    wanted = state_write >= 0
    return tails.index_copy(0, state_write[wanted].long(), memory[address[wanted]])
