"""A small random model with the byte vocabulary, in float64: quick, and with nothing learned."""

import pytest
import torch

from minserve.llm import LLM, EngineConfig
from minserve.model.checkpoint import write_checkpoint
from minserve.model.config import ModelConfig
from minserve.model.hybrid_lm import HybridLM
from minserve.model.tokenizer_files import byte_tokenizer_files

SMALL = ModelConfig(
    vocab_size=264, hidden_size=24, num_hidden_layers=2, layer_types=("linear_attention", "full_attention"),
    num_attention_heads=4, num_key_value_heads=2, head_dim=8, linear_num_key_heads=1, linear_num_value_heads=2,
    linear_key_head_dim=6, linear_value_head_dim=5, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8,
    shared_expert_intermediate_size=8, max_position_embeddings=256, eos_token_ids=(256, 258),
)  # fmt: skip


@pytest.fixture(scope="session")
def small_folder(tmp_path_factory):
    """A checkpoint folder of the small model."""
    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("small")
    tensors = {name: 0.3 * torch.randn(p.shape) for name, p in HybridLM(SMALL).state_dict().items()}
    write_checkpoint(folder, SMALL, tensors, files=byte_tokenizer_files())
    return folder


@pytest.fixture
def llm(small_folder):
    """The small model, ready to be asked."""
    return LLM(small_folder, config=EngineConfig(dtype="float64", batch_tokens=5))
