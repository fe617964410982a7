"""The multi-token-prediction head: one more layer that guesses the token after the next one.

    h'[i] = norm( layer( fc [ norm_e(embed(token i)) ; norm_h(h[i-1]) ] ) ),   logits = lm_head(h'[i])

h is the trunk's output *after* its final norm. From the second draft on, the head is fed its own output h'. Entry i
exists from position 1 on, since nothing comes before token 0. DeepSeek-V3 (arXiv 2412.19437), section 2.2.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from minserve.model.config import FULL, ModelConfig
from minserve.model.layers import DecoderLayer, RMSNorm, Routing, rotary_table
from minserve.model.memory import Memory


class MTPHead(nn.Module):
    """The draft layer of a checkpoint; its keys and values are those of layer `num_hidden_layers`."""

    def __init__(self, config: ModelConfig, impl: str):
        super().__init__()
        self.config = config
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.pre_fc_norm_embedding = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.pre_fc_norm_hidden = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList([DecoderLayer(config, config.num_hidden_layers, FULL, impl)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        embedded: Float[Tensor, "tokens hidden"],
        hidden: Float[Tensor, "tokens hidden"],
        positions: Int[Tensor, " tokens"],
        memory: Memory,
    ) -> tuple[Float[Tensor, "tokens hidden"], Routing | None]:
        """Combine each token with the hidden state of the token before it; the result predicts the token after it.

        Arguments:
            embedded: the embeddings of tokens i.
            hidden: h of tokens i - 1, after the final norm (the trunk's, or this head's own when drafting deeper).
            positions: i, at least 1.
            memory: holds the head's keys and values.
        """
        joined = torch.cat([self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)], dim=-1)
        out, routing = self.layers[0](self.fc(joined), rotary_table(positions, self.config, embedded.dtype), memory)
        return self.norm(out), routing
