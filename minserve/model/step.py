"""One forward pass's work: a ragged batch of packed tokens.

Prefill and decode share it. Row r owns the tokens row_starts[r] to row_starts[r + 1]; a decode row has one, a prefill
row has many, and nothing is padded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor


@dataclass(frozen=True)
class Step:
    """What the model runs next.

    Fields: `tokens` the packed token ids; `positions` the place of each in its own sequence, from 0; `row_starts` where
    each row begins in the packing, and the end; `chosen` the packed indices whose next token is wanted: logits are
    computed there and nowhere else.
    """

    tokens: Int[Tensor, " tokens"]
    positions: Int[Tensor, " tokens"]
    row_starts: Int[Tensor, " rows_plus_1"]
    chosen: Int[Tensor, " chosen"]

    @staticmethod
    def one_row(
        token_ids: list[int], start: int, every_logit: bool = False, device: str | torch.device = "cpu"
    ) -> Step:
        """A step of a single sequence, whose first `start` tokens were run before; logits for its last token.

        >>> Step.one_row([7, 8, 9], start=4).positions.tolist()
        [4, 5, 6]
        """
        num = len(token_ids)
        positions = torch.arange(start, start + num, device=device)
        chosen = torch.arange(0 if every_logit else num - 1, num, device=device)
        return Step(torch.tensor(token_ids, device=device), positions, torch.tensor([0, num], device=device), chosen)
