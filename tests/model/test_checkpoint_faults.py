"""Checkpoints that cannot be read: every fault is an error that names the file, the tensor or the field."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from small_checkpoints import SPARSE, WEIGHT, edit_json, random_tensors, read, rewrite, split_experts

from minserve.errors import CheckpointError, InvalidValue
from minserve.model.checkpoint import has_mtp, read_config, write_checkpoint
from minserve.model.hybrid_lm import HybridLM


def drop(name):
    return lambda stored: {n: t for n, t in stored.items() if n != name}


def put(name, tensor):
    return lambda stored: {**stored, name: tensor}


FAULTS = {
    "missing": (drop(WEIGHT), rf"{WEIGHT} is missing"),
    "several missing": (lambda s: {n: s[n] for n in s if "layers.0" not in n}, r"is missing \(and \d+ others\)"),
    "extra": (put("model.layers.7.input_layernorm.weight", torch.ones(24)), r"layers\.7\..* has no place"),
    "bias": (put("model.layers.1.self_attn.k_proj.bias", torch.ones(16)), r"k_proj\.bias has no place"),
    "misshapen": (put(WEIGHT, torch.ones(16, 23)), rf"{WEIGHT} has shape \(16, 23\); wanted is \(16, 24\)"),
    "transposed": (lambda s: {**s, WEIGHT: s[WEIGHT].T}, rf"{WEIGHT} has shape \(24, 16\)"),
    "twice": (put("model.language_model.norm.weight", torch.ones(24)), r"model\.norm\.weight is stored twice"),
    "whole numbers": (put(WEIGHT, torch.ones(16, 24, dtype=torch.int8)), rf"{WEIGHT} is stored as torch.int8"),
    "no scale": (lambda s: {**s, WEIGHT: s[WEIGHT].to(torch.float8_e4m3fn)}, rf"{WEIGHT}_scale_inv is missing"),
    "scale without float8": (put(f"{WEIGHT}_scale_inv", torch.ones(1, 1)), rf"{WEIGHT}_scale_inv belongs to"),
    "scale grid": (
        lambda s: {**s, WEIGHT: s[WEIGHT].to(torch.float8_e4m3fn), f"{WEIGHT}_scale_inv": torch.ones(1, 2)},
        rf"{WEIGHT}_scale_inv has shape \(1, 2\); wanted is \(1, 1\)",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_tensor_is_named(sparse, fault):
    path, _ = sparse
    change, message = FAULTS[fault]
    rewrite(path, change)
    with pytest.raises(CheckpointError, match=message):
        read(path)


EXPERT = "model.layers.0.mlp.experts.1.up_proj.weight"
EXPERT_FAULTS = {
    "one missing": (drop(EXPERT), rf"{EXPERT} is missing"),
    "one misshapen": (put(EXPERT, torch.ones(1, 24)), rf"{EXPERT} has shape \(1, 24\); wanted is \(7, 24\)"),
    "one too many": (put(EXPERT.replace(".1.", ".3."), torch.ones(7, 24)), r"experts\.3\.up_proj\.weight has no place"),
}


@pytest.mark.parametrize("fault", EXPERT_FAULTS)
def test_a_faulty_expert_is_named(sparse, fault):
    path, _ = sparse
    change, message = EXPERT_FAULTS[fault]
    rewrite(path, split_experts)
    rewrite(path, change)
    with pytest.raises(CheckpointError, match=message):
        read(path)


@pytest.mark.parametrize("cut", [0, 4, 8, 100, 0.5, -1], ids=str)
def test_a_truncated_file_is_named(sparse, cut):
    path, _ = sparse
    file = path / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * cut) if isinstance(cut, float) else cut])
    for call in (read_config, read, HybridLM.from_checkpoint):
        with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated or no safetensors file"):
            call(path)


def test_a_corrupt_file_is_named(sparse):
    path, _ = sparse
    (path / "model.safetensors").write_bytes(b"\xff" * 4000)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated or no safetensors file"):
        read(path)


def test_faults_of_an_index(tmp_path):
    write_checkpoint(tmp_path / "good", SPARSE, random_tensors(SPARSE), max_shard_bytes=3000)

    def broken(name, change):
        path = tmp_path / name
        shutil.copytree(tmp_path / "good", path)
        change(path, path / "model.safetensors.index.json")
        with pytest.raises(CheckpointError) as error:
            read(path)
        return str(error.value)

    def place(name, file):
        def change(path, index):
            weight_map = json.loads(index.read_text())["weight_map"]
            edit_json(index, weight_map={**weight_map, name: file})

        return change

    first = min(file.name for file in (tmp_path / "good").glob("*.safetensors"))
    assert f"{first} is absent" in broken("absent", lambda path, index: (path / first).unlink())
    assert f"{first} is truncated" in broken("cut", lambda path, index: (path / first).write_bytes(b"\x08"))
    assert f"{first} lacks ghost.weight" in broken("ghost", place("ghost.weight", first))
    assert "outside the directory" in broken("outside", place("x.weight", "../good/" + first))
    assert "weight_map" in broken("no map", lambda path, index: index.write_text("{}"))
    assert "not valid JSON" in broken("no JSON", lambda path, index: index.write_text("{"))
    message = broken("nothing", lambda path, index: index.unlink())
    assert "neither model.safetensors nor" in message


def test_a_directory_that_is_no_checkpoint(tmp_path):
    for call in (read_config, has_mtp, HybridLM.from_checkpoint):
        with pytest.raises(CheckpointError, match="is not a directory"):
            call(tmp_path / "nowhere")
        with pytest.raises(CheckpointError, match=r"no checkpoint: it has no config\.json"):
            call(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="holds no JSON object"):
        read_config(tmp_path)


def test_a_config_alone_can_be_read(sparse):
    path, _ = sparse
    (path / "model.safetensors").unlink()
    assert read_config(path) == SPARSE
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        read(path)


REQUIRED = ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
            "rms_norm_eps", "max_position_embeddings", "linear_num_key_heads", "linear_value_head_dim",
            "num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size",
            "model_type"]  # fmt: skip


@pytest.mark.parametrize("name", REQUIRED)
def test_a_missing_config_field_is_named(sparse, name):
    path, _ = sparse
    edit_json(path / "config.json", **{name: None})
    with pytest.raises(CheckpointError, match=name):
        read_config(path)


WRONG = [("vocab_size", "40"), ("vocab_size", 0), ("hidden_size", 24.5), ("num_hidden_layers", 3), ("head_dim", True),
         ("num_attention_heads", 3), ("linear_num_value_heads", 5), ("num_experts_per_tok", 4),
         ("rms_norm_eps", "tiny"), ("rms_norm_eps", float("nan")), ("layer_types", 4), ("tie_word_embeddings", "yes"),
         ("layer_types", ["linear_attention", "sliding_attention"]), ("eos_token_id", "end"),
         ("linear_conv_kernel_dim", 0)]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), WRONG, ids=str)
def test_a_config_field_that_cannot_be_is_named(sparse, name, value):
    path, _ = sparse
    edit_json(path / "config.json", **{name: value})
    (path / "generation_config.json").unlink()
    with pytest.raises(InvalidValue) as error:
        read_config(path)
    assert error.value.field in (name, name + "s", "layer_types")


UNSUPPORTED = [("hidden_act", "gelu"), ("attention_bias", True), ("mlp_only_layers", [0]), ("model_type", "llama"),
               ("mtp_use_dedicated_embeddings", True), ("num_latent_experts", 2)]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), UNSUPPORTED, ids=str)
def test_what_would_silently_change_the_numbers_is_refused(sparse, name, value):
    path, _ = sparse
    edit_json(path / "config.json", **{name: value})
    with pytest.raises(CheckpointError, match=name):
        read(path)


def test_other_rotations_and_quantizations_are_refused(sparse):
    path, _ = sparse
    edit_json(path / "config.json", quantization_config={"quant_method": "awq"})
    with pytest.raises(CheckpointError, match="quant_method is 'awq'"):
        read(path)
    edit_json(path / "config.json", quantization_config={"quant_method": "fp8", "weight_block_size": [128]})
    with pytest.raises(CheckpointError, match="weight_block_size"):
        read(path)
    edit_json(path / "config.json", rope_parameters={"rope_type": "yarn", "factor": 4.0})
    with pytest.raises(CheckpointError, match="rope_type is 'yarn'"):
        read(path)
    edit_json(path / "config.json", rope_parameters=[1.0])
    with pytest.raises(CheckpointError, match="rope_parameters"):
        read(path)


def test_full_attention_interval_and_rope_at_the_top(sparse):
    path, _ = sparse
    edit_json(path / "config.json", layer_types=None, full_attention_interval=2, rope_parameters=None, rope_theta=5e5,
              partial_rotary_factor=0.5, num_hidden_layers=4)  # fmt: skip
    (path / "model.safetensors").unlink()
    config = read_config(path)
    assert config.layer_types == ("linear_attention", "full_attention") * 2
    assert (config.rope_theta, config.rotary_dim) == (5e5, 4)
