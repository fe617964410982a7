"""The drafts of one request in one step, as they are made, verified, and forgotten."""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxtyping import Float
from torch import Tensor

from minserve.request import Request


@dataclass
class DraftRow:
    """Guesses at a request's next tokens.

    Fields:
        request: whose.
        num_wanted: how many are to be made.
        ids: those made so far.
        q: what each was drawn from; empty where drafts are not drawn: looked up, or the likeliest of a greedy row.
        hidden: what a draft head made of the last of them.
    """

    request: Request
    num_wanted: int
    ids: list[int] = field(default_factory=list)
    q: list[Float[Tensor, " vocab"]] = field(default_factory=list)
    hidden: Float[Tensor, " hidden"] | None = None

    @property
    def position(self) -> int:
        """Where in the request the next draft would stand."""
        return self.request.num_committed + len(self.ids)
