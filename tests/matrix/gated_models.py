"""The small models that the rows of faults are told with, random but for their gates, which are chosen on purpose.

With decay 1 and beta 1 the delta rule forgets nothing and a token applied twice changes nothing, so that half of the
faults of a recurrent state cannot be seen. Here every head keeps 0.8 to 0.99 of its state at each token, and replaces
0.2 to 0.8 of what it finds under a key.

Drafts must be right now and then. So the last token has the greatest say in what comes next, in the model and in its
draft head alike; the head guesses right every other time, and everything before that token still changes all logits.
"""

from __future__ import annotations

import math
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor

from minserve.model.config import FULL, LINEAR, ModelConfig
from minserve.model.hybrid_lm import HybridLM
from minserve.model.joined_projections import join_projections

DECAY, BETA = (0.8, 0.99), (0.2, 0.8)
LAST_TOKEN = 4.0  # its size among what the layers add to it, about 1 each
MIXTURE = ModelConfig(
    vocab_size=258, hidden_size=64, num_hidden_layers=4, layer_types=(LINEAR, LINEAR, LINEAR, FULL),
    num_attention_heads=4, num_key_value_heads=2, head_dim=24, linear_num_key_heads=2, linear_num_value_heads=4,
    linear_key_head_dim=16, linear_value_head_dim=16, linear_conv_kernel_dim=4, num_experts=8, num_experts_per_tok=2,
    moe_intermediate_size=20, shared_expert_intermediate_size=20, mtp_num_hidden_layers=1,
    max_position_embeddings=256, eos_token_ids=(256,),
)  # fmt: skip
DENSE = replace(
    MIXTURE, num_experts=0, num_experts_per_tok=0, moe_intermediate_size=0, shared_expert_intermediate_size=0,
    intermediate_size=40, model_type="qwen3_5_text",
)  # fmt: skip
ATTENTION = replace(DENSE, num_hidden_layers=2, layer_types=(FULL, FULL))
MODELS = MappingProxyType({"mixture": MIXTURE, "dense": DENSE, "attention": ATTENTION})


def build(name: str, dtype: torch.dtype = torch.float64) -> HybridLM:
    """One of `MODELS`, its weights the same numbers every time."""
    model = HybridLM(MODELS[name]).to(dtype).requires_grad_(False).eval()
    generator = torch.Generator().manual_seed(11)
    for path, parameter in model.named_parameters():
        parameter.copy_(_weights(path, parameter.shape, generator))
    join_projections(model)
    return model


def _weights(path: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
    """The values of one parameter, so that hidden states keep a size of about one and every part has a say."""
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    # The rates of forgetting differ by head, and each head loses about 6 % of its state per token.
    rates = torch.linspace(0.5, 2.0, shape[0], dtype=torch.float64)
    match path.rpartition(".")[2]:
        case "A_log":
            return rates.log()
        case "dt_bias":
            return (0.06 / rates).expm1().log()  # softplus of it is 0.06 / rates
    if "in_proj_a" in path or "in_proj_b" in path:
        return values * 0.3 / math.sqrt(shape[-1])
    if len(shape) == 1:
        return 0.1 * values + ("linear_attn.norm" in path)
    if "embed_tokens" in path:
        return LAST_TOKEN * values
    if path == "mtp.fc.weight":  # of the token and of the hidden state before it: the token, and some of everything
        token, hidden = torch.eye(shape[0], dtype=torch.float64).repeat(1, 2).chunk(2, dim=1)
        return torch.cat([LAST_TOKEN * token, 0.5 * hidden], dim=1) + 0.3 * values / math.sqrt(shape[-1])
    scale = {"lm_head.weight": 2.0, "conv1d.weight": 1.0}.get(path.removeprefix("model."), 1.0)
    return values * scale / math.sqrt(shape[-1])
