"""The memory of a padded batch: rows of unequal length at one width, where a pad leaves nothing behind.

tokens       a b c d e        attention     a pad stands right of every real token, where the causal mask hides it,
             f g . . .                      and decoding writes over it
                              convolution   the tail is cut at each row's own last token
                              delta rule    g = 0 and beta = 0 at a pad, so the state stays as it is
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from minserve.deltanet.conv_tail import conv_tail
from minserve.deltanet.gated_delta import gated_delta_chunked, gated_delta_recurrent
from minserve.model.config import FULL, LINEAR, ModelConfig


class StaticMemory:
    """The memory of a static batch: one slab, tail and state per row, all as long as the longest row may get.

    Arguments:
        config: the model's.
        num_rows: requests in the batch.
        max_tokens: how long a row may get, pads included.
        dtype, device: the model's. States are float32, or float64 with a float64 model.
    """

    def __init__(
        self, config: ModelConfig, num_rows: int, max_tokens: int, dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ):  # fmt: skip
        slab = (num_rows, max_tokens, config.num_key_value_heads, config.head_dim)
        state = (num_rows, config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim)
        tail = (num_rows, config.linear_conv_kernel_dim - 1, config.conv_channels)
        full, linear = ([i for i, kind in enumerate(config.layer_types) if kind == wanted] for wanted in (FULL, LINEAR))
        wide = torch.promote_types(dtype, torch.float32)
        self.keys = {i: torch.zeros(slab, dtype=dtype, device=device) for i in full}
        self.values = {i: torch.zeros(slab, dtype=dtype, device=device) for i in full}
        self.tails = {i: torch.zeros(tail, dtype=dtype, device=device) for i in linear}
        self.states = {i: torch.zeros(state, dtype=wide, device=device) for i in linear}
        self.row = torch.arange(num_rows, device=device)[:, None]
        self.place(self.row * 0, self.row[:, 0] * 0 + 1)

    def place(self, positions: Int[Tensor, "rows width"], num_real: Int[Tensor, " rows"]) -> None:
        """Say where the next step's tokens stand in their rows, and how many of each row are no pads.

        Changes: what the layers' calls of this step mean.
        """
        self.positions, self.num_real = positions, num_real
        self.is_real = torch.arange(positions.shape[1], device=positions.device) < num_real[:, None]

    def attend(
        self,
        layer: int,
        q: Float[Tensor, "tokens heads head_dim"],
        k: Float[Tensor, "tokens kv_heads head_dim"],
        v: Float[Tensor, "tokens kv_heads head_dim"],
    ) -> Float[Tensor, "tokens heads head_dim"]:
        """Write the new keys and values in place, and attend to all positions up to one's own. Changes: the slabs."""
        stop = int(self.positions.max()) + 1
        self.keys[layer][self.row, self.positions] = self._rows(k)
        self.values[layer][self.row, self.positions] = self._rows(v)
        seen = torch.arange(stop, device=q.device) <= self.positions[..., None]
        heads = (x.transpose(1, 2) for x in (self._rows(q), self.keys[layer][:, :stop], self.values[layer][:, :stop]))
        out = F.scaled_dot_product_attention(*heads, attn_mask=seen[:, None], enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)

    def convolve(
        self, layer: int, x: Float[Tensor, "tokens channels"], weight: Float[Tensor, "channels kernel"]
    ) -> Float[Tensor, "tokens channels"]:
        """Convolve each row on from its tail, and cut the new tail at the row's own end. Changes: the tails."""
        x, tail = self._rows(x), self.tails[layer]
        out, _ = conv_tail(x, weight, tail)
        last = self.num_real[:, None] + torch.arange(tail.shape[1], device=x.device)
        self.tails[layer] = torch.cat([tail, x], dim=1)[self.row, last]
        return out.flatten(0, 1)

    def recur(
        self,
        layer: int,
        q: Float[Tensor, "tokens key_heads key_dim"],
        k: Float[Tensor, "tokens key_heads key_dim"],
        v: Float[Tensor, "tokens value_heads value_dim"],
        g: Float[Tensor, "tokens value_heads"],
        beta: Float[Tensor, "tokens value_heads"],
    ) -> Float[Tensor, "tokens value_heads value_dim"]:
        """Go on from each row's state, which pads leave alone. Changes: the states."""
        q, k, v, g, beta = (self._rows(x) for x in (q, k, v, g, beta))
        g, beta = (torch.where(self.is_real[..., None], x, 0.0) for x in (g, beta))
        rule = gated_delta_recurrent if v.shape[1] == 1 else gated_delta_chunked
        out, self.states[layer] = rule(q, k, v, g, beta, self.states[layer])
        return out.flatten(0, 1)

    def _rows(self, x: Tensor) -> Tensor:
        """Packed tokens as [rows width ...]."""
        return x.unflatten(0, tuple(self.positions.shape))
