"""Small checkpoints for the tests beside this: their tensors, and ways to change what is on disk."""

from __future__ import annotations

import json
from dataclasses import replace

import torch
from safetensors.torch import load_file, save_file

from minserve.model.checkpoint import read_config, read_tensors
from minserve.model.config import ModelConfig
from minserve.model.hybrid_lm import HybridLM

SPARSE = ModelConfig(
    vocab_size=40, hidden_size=24, num_hidden_layers=2, layer_types=("linear_attention", "full_attention"),
    num_attention_heads=4, num_key_value_heads=2, head_dim=8, linear_num_key_heads=2, linear_num_value_heads=6,
    linear_key_head_dim=4, linear_value_head_dim=5, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=7,
    shared_expert_intermediate_size=9, mtp_num_hidden_layers=1, max_position_embeddings=512, eos_token_ids=(7, 9),
)  # fmt: skip
DENSE = replace(SPARSE, num_experts=0, num_experts_per_tok=0, moe_intermediate_size=0,
                shared_expert_intermediate_size=0, intermediate_size=11, model_type="qwen3_5_text")  # fmt: skip
TIED = replace(DENSE, tie_word_embeddings=True)
WEIGHT = "model.layers.1.self_attn.k_proj.weight"


def wanted_shapes(config):
    """Canonical names and shapes, as the model itself states them."""
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in HybridLM(config).state_dict().items()}


def random_tensors(config, seed=0):
    """Values that bfloat16 holds exactly, so that every comparison below is exact."""
    generator = torch.Generator().manual_seed(seed)
    shapes = wanted_shapes(config).items()
    return {name: torch.randn(shape, generator=generator).bfloat16().float() for name, shape in shapes}


def read(path, dtype=torch.float32):
    config = read_config(path)
    return read_tensors(path, config, wanted_shapes(config), dtype)


def same(found, wanted):
    return found.keys() == wanted.keys() and all(torch.equal(found[n].double(), wanted[n].double()) for n in wanted)


def rewrite(path, change):
    """Apply `change` to the stored tensors of a single-file checkpoint."""
    stored = load_file(path / "model.safetensors")
    changed = change(stored)
    stored = stored if changed is None else changed
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, path / "model.safetensors")


def edit_json(file, **changes):
    """Set fields of a JSON file; None removes one."""
    content = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))


def split_experts(stored):
    """The stacked expert tensors, one per expert and matrix, as published FP8 checkpoints have them."""
    for name in [name for name in stored if ".experts." in name]:
        stacked, prefix = stored.pop(name), name.rpartition(".")[0]
        for expert, matrix in enumerate(stacked):
            if name.endswith("down_proj"):
                stored[f"{prefix}.{expert}.down_proj.weight"] = matrix
            else:
                half = len(matrix) // 2
                stored[f"{prefix}.{expert}.gate_proj.weight"] = matrix[:half]
                stored[f"{prefix}.{expert}.up_proj.weight"] = matrix[half:]
