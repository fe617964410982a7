"""What a layer asks of the memory that it is given.

A layer computes; what a sequence remembers between steps is kept elsewhere. The plain loop, the engine and the trainer
hand the same layers different memories, and the layers cannot tell.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor


@runtime_checkable
class Memory(Protocol):
    """Keys and values, convolution tails and recurrent states of the rows of one step, by layer."""

    def attend(
        self,
        layer: int,
        q: Float[Tensor, "tokens heads head_dim"],
        k: Float[Tensor, "tokens kv_heads head_dim"],
        v: Float[Tensor, "tokens kv_heads head_dim"],
    ) -> Float[Tensor, "tokens heads head_dim"]:
        """Remember the new keys and values, and attend causally to all of the token's own sequence."""

    def convolve(
        self, layer: int, x: Float[Tensor, "tokens channels"], weight: Float[Tensor, "channels kernel"]
    ) -> Float[Tensor, "tokens channels"]:
        """Run the short convolution over each row, continuing from its tail."""

    def recur(
        self,
        layer: int,
        q: Float[Tensor, "tokens key_heads key_dim"],
        k: Float[Tensor, "tokens key_heads key_dim"],
        v: Float[Tensor, "tokens value_heads value_dim"],
        g: Float[Tensor, "tokens value_heads"],
        beta: Float[Tensor, "tokens value_heads"],
    ) -> Float[Tensor, "tokens value_heads value_dim"]:
        """Run the gated delta rule over each row, continuing from its state."""
