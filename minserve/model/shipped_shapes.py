"""The shapes of the models that ship, in the family's own terms."""

from __future__ import annotations

from minserve.errors import InvalidValue
from minserve.model.config import FULL, LINEAR, ModelConfig


def tiny_config() -> ModelConfig:
    """The hybrid model that ships: three Gated DeltaNet layers, one gated attention, twice."""
    return ModelConfig(
        vocab_size=264, hidden_size=160, num_hidden_layers=8, layer_types=(LINEAR, LINEAR, LINEAR, FULL) * 2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, linear_num_key_heads=1, linear_num_value_heads=2,
        linear_key_head_dim=64, linear_value_head_dim=64, num_experts=16, num_experts_per_tok=2,
        moe_intermediate_size=40, shared_expert_intermediate_size=128, mtp_num_hidden_layers=1, rope_theta=10_000.0,
        max_position_embeddings=8192, eos_token_ids=(256, 258),
    )  # fmt: skip


def tiny_attention_config() -> ModelConfig:
    """The small all-attention model: pages alone are its memory."""
    return ModelConfig(
        vocab_size=264, hidden_size=128, num_hidden_layers=4, layer_types=(FULL,) * 4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=48,
        shared_expert_intermediate_size=96, rope_theta=10_000.0, max_position_embeddings=8192, eos_token_ids=(256, 258),
    )  # fmt: skip


def tiny_draft_config() -> ModelConfig:
    """The smallest one, two dense layers: it drafts for the hybrid model, whose vocabulary it has."""
    return ModelConfig(
        vocab_size=264, hidden_size=128, num_hidden_layers=2, layer_types=(LINEAR, FULL), num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=32,
        linear_value_head_dim=64, intermediate_size=320, rope_theta=10_000.0, max_position_embeddings=8192,
        eos_token_ids=(256, 258), model_type="qwen3_5_text",
    )  # fmt: skip


def shape(name: str) -> ModelConfig:
    """The configuration of a model that ships, by its folder's name."""
    shapes = {"tiny": tiny_config, "tiny_attention": tiny_attention_config, "tiny_draft": tiny_draft_config}
    if name not in shapes:
        raise InvalidValue("shape", name, "one of " + ", ".join(shapes))
    return shapes[name]()
