"""A small random model with a draft head as a checkpoint, and the outputs of an LLM side by side."""

from __future__ import annotations

from pathlib import Path

import torch

from minserve.llm import LLM, EngineConfig
from minserve.model.checkpoint import write_checkpoint
from minserve.model.config import ModelConfig
from minserve.model.hybrid_lm import HybridLM
from minserve.model.tokenizer_files import byte_tokenizer_files
from minserve.request import Output

SMALL = ModelConfig(
    vocab_size=264, hidden_size=24, num_hidden_layers=2, layer_types=("linear_attention", "full_attention"),
    num_attention_heads=4, num_key_value_heads=2, head_dim=8, linear_num_key_heads=1, linear_num_value_heads=2,
    linear_key_head_dim=6, linear_value_head_dim=5, intermediate_size=16, mtp_num_hidden_layers=1,
    max_position_embeddings=256, eos_token_ids=(256, 258), model_type="qwen3_5_text",
)  # fmt: skip


def write_small(folder: Path) -> Path:
    """Write the checkpoint; its gates keep most of the state."""
    torch.manual_seed(3)
    tensors = {name: 0.3 * torch.randn(p.shape) for name, p in HybridLM(SMALL).state_dict().items()}
    tensors |= {name: x - 2 for name, x in tensors.items() if name.endswith("A_log")}
    # Every token is a letter, so that text can be cut anywhere and stop strings found.
    tensors["lm_head.weight"][128:] = 0
    tensors["lm_head.weight"][:97] = 0
    write_checkpoint(folder, SMALL, tensors, files=byte_tokenizer_files())
    return folder


def small_llm(folder: Path, draft, **config) -> LLM:
    """The small model, drafted for; nothing is kept between requests, so that usage is the same each time."""
    own = {"dtype": "float64", "prefix_cache": False, "adapt_drafts": False, "draft_tokens": 4, "check": True}
    return LLM(folder, config=EngineConfig(draft=draft, **{**own, **config}))


def check_same(found: Output, wanted: Output) -> None:
    """Fail unless two outputs are the same but for times and drafts; log-probabilities within 1e-9."""
    for name in ("text", "token_ids", "finish_reason", "index", "error"):
        assert getattr(found, name) == getattr(wanted, name), name
    for name in ("prompt_tokens", "cached_tokens", "completion_tokens"):
        assert getattr(found.usage, name) == getattr(wanted.usage, name), name
    for name in ("logprobs", "prompt_logprobs"):
        pair = getattr(found, name), getattr(wanted, name)
        assert (pair[0] is None) == (pair[1] is None), name
        for mine, right in zip(*(scores or () for scores in pair), strict=True):
            assert (mine or {}).keys() == (right or {}).keys()
            assert all(abs(mine[token] - score) < 1e-9 for token, score in (right or {}).items()), name
