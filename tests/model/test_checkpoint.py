"""Checkpoints: what is written is read back, and every layout gives the same tensors."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from small_checkpoints import (
    DENSE,
    SPARSE,
    TIED,
    WEIGHT,
    edit_json,
    random_tensors,
    read,
    rewrite,
    same,
    split_experts,
    wanted_shapes,
)

from minserve.errors import CheckpointError
from minserve.model.checkpoint import has_mtp, read_config, write_checkpoint
from minserve.model.checkpoint_layouts import dequantize_blocks, scale_grid
from minserve.model.hybrid_lm import HybridLM

# --- what is written is read back, by minserve and by transformers


@pytest.mark.parametrize("config", [SPARSE, DENSE, TIED], ids=["sparse", "dense", "tied"])
@pytest.mark.parametrize("max_shard_bytes", [None, 3000], ids=["single", "sharded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_round_trip(tmp_path, config, max_shard_bytes, dtype):
    tensors = random_tensors(config)
    write_checkpoint(tmp_path, config, tensors, max_shard_bytes=max_shard_bytes, files={"note.txt": "hello"})
    found, report = read(tmp_path, dtype)
    assert read_config(tmp_path) == config
    assert same(found, tensors) and {tensor.dtype for tensor in found.values()} == {dtype}
    assert report.num_bytes == 2 * sum(tensor.numel() for tensor in tensors.values())
    assert report.layouts == (("flat", "tied") if config is TIED else ("flat",))
    assert (tmp_path / "note.txt").read_text() == "hello"
    assert len(list(tmp_path.glob("*.safetensors"))) > 1 or max_shard_bytes is None


def test_shards_keep_to_their_size_and_the_index_to_the_format(tmp_path):
    write_checkpoint(tmp_path, SPARSE, random_tensors(SPARSE), max_shard_bytes=3000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(wanted_shapes(SPARSE))
    sizes = {file.name: [t.nbytes for t in load_file(file).values()] for file in tmp_path.glob("*.safetensors")}
    assert set(index["weight_map"].values()) == set(sizes)
    assert all(sum(size) <= 3000 or len(size) == 1 for size in sizes.values())
    assert index["metadata"]["total_size"] == sum(map(sum, sizes.values()))


def test_writing_again_leaves_nothing_of_the_earlier_checkpoint(tmp_path):
    write_checkpoint(tmp_path, SPARSE, random_tensors(SPARSE), max_shard_bytes=3000)
    newer = random_tensors(SPARSE, seed=1)
    write_checkpoint(tmp_path, SPARSE, newer)
    assert [file.name for file in tmp_path.glob("model*")] == ["model.safetensors"]
    assert same(read(tmp_path)[0], newer)
    write_checkpoint(tmp_path, SPARSE, random_tensors(SPARSE), max_shard_bytes=3000)
    assert not (tmp_path / "model.safetensors").exists()


def test_from_checkpoint_reads_into_the_model(sparse):
    path, tensors = sparse
    model = HybridLM.from_checkpoint(path, dtype=torch.float64)
    assert same(model.state_dict(), tensors)
    assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("config", [SPARSE, DENSE, TIED], ids=["sparse", "dense", "tied"])
@pytest.mark.parametrize("max_shard_bytes", [None, 3000], ids=["single", "sharded"])
def test_transformers_loads_what_is_written(tmp_path, config, max_shard_bytes):
    from transformers import AutoModelForCausalLM

    tensors = random_tensors(config)
    write_checkpoint(tmp_path, config, tensors, max_shard_bytes=max_shard_bytes)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(model).__name__ == ("Qwen3_5MoeForCausalLM" if config.is_moe else "Qwen3_5ForCausalLM")
    assert not any(info[fault] for fault in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    trunk = {name: tensor for name, tensor in tensors.items() if not name.startswith("mtp.")}
    theirs = model.state_dict()
    assert same({name: theirs[name] for name in trunk}, trunk)
    assert model.generation_config.eos_token_id == list(config.eos_token_ids)
    rope = model.config.rope_parameters
    assert rope["partial_rotary_factor"] == 0.25 and sum(rope["mrope_section"]) * 2 == config.rotary_dim


# --- the layouts


def test_multimodal_names_and_a_vision_tower(sparse):
    path, tensors = sparse

    def to_multimodal(stored):
        renamed = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in stored.items()
                   if name.startswith("model.")}  # fmt: skip
        kept = {name: tensor for name, tensor in stored.items() if not name.startswith("model.")}
        vision = {f"model.visual.{name}": torch.ones(2) for name in ("patch_embed.proj.weight", "merger.norm.bias")}
        return {**renamed, **kept, **vision}

    rewrite(path, to_multimodal)
    text = json.loads((path / "config.json").read_text())
    outer = {"model_type": "qwen3_5_moe", "architectures": ["Qwen3_5MoeForConditionalGeneration"], "text_config": text,
             "vision_config": {"depth": 2}, "image_token_id": 3, "tie_word_embeddings": False}  # fmt: skip
    (path / "config.json").write_text(json.dumps(outer))
    found, report = read(path)
    assert read_config(path) == SPARSE and same(found, tensors)
    assert report.num_skipped_vision == 2 and report.layouts == ("flat", "multimodal")
    assert report.num_tensors == len(tensors)


def test_one_tensor_per_expert(sparse):
    path, tensors = sparse
    rewrite(path, split_experts)
    found, report = read(path)
    assert same(found, tensors) and report.layouts == ("flat", "per-expert")
    assert report.num_tensors == len(tensors) - 3 * 2 + 3 * 3 * SPARSE.num_experts  # two layers and the MTP head


def fuse_projections(stored, config=SPARSE):
    """Qwen3-Next's fused projections, built row by row: for each key head its q, k, values, gates; and its b, a."""
    repeat = config.linear_num_value_heads // config.linear_num_key_heads
    dk, dv = config.linear_key_head_dim, config.linear_value_head_dim
    for prefix in [name[: -len("qkv.weight")] for name in stored if name.endswith("in_proj_qkv.weight")]:
        qkv, z, b, a = (stored.pop(f"{prefix}{part}.weight") for part in ("qkv", "z", "b", "a"))
        q, k, v = qkv[: config.key_dim], qkv[config.key_dim : 2 * config.key_dim], qkv[2 * config.key_dim :]
        wide, narrow = [], []
        for head in range(config.linear_num_key_heads):
            values = range(head * repeat, (head + 1) * repeat)
            wide += [q[head * dk + i] for i in range(dk)] + [k[head * dk + i] for i in range(dk)]
            wide += [v[value * dv + i] for value in values for i in range(dv)]
            wide += [z[value * dv + i] for value in values for i in range(dv)]
            narrow += [b[value] for value in values] + [a[value] for value in values]
        stored[f"{prefix}qkvz.weight"], stored[f"{prefix}ba.weight"] = torch.stack(wide), torch.stack(narrow)


def test_fused_projections_are_taken_apart_by_key_head(sparse):
    path, tensors = sparse
    rewrite(path, fuse_projections)
    edit_json(path / "config.json", model_type="qwen3_next")
    found, report = read(path)
    assert same(found, tensors) and report.layouts == ("flat", "fused-projections")


def quantize_blocks(weight, block, scale_dtype):
    """A plain loop over blocks: the float8 weight, its scales, and what the two stand for."""
    grid = scale_grid(tuple(weight.shape), block)
    stored, scales, meaning = torch.empty_like(weight).to(torch.float8_e4m3fn), torch.empty(grid), weight.double()
    for i in range(grid[0]):
        for j in range(grid[1]):
            place = (slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1]))
            scale = (weight[place].abs().max() / 448).to(scale_dtype).float()
            scales[i, j] = scale
            stored[place] = (weight[place] / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
            meaning[place] = stored[place].double() * scale.double()
    return stored, scales.to(scale_dtype), meaning


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(320, 130), (1, 1), (127, 129), (128, 256)], ids=str)
def test_block_scales_with_a_ragged_edge(shape, scale_dtype):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    stored, scales, meaning = quantize_blocks(weight, (128, 128), scale_dtype)
    assert scales.shape == (-(-shape[0] // 128), -(-shape[1] // 128))
    assert torch.equal(dequantize_blocks(stored, scales, (128, 128), torch.float64), meaning)
    # Half a step of 3 mantissa bits, or of the smallest number that float8 has; and bfloat16 rounds the scale.
    error = (dequantize_blocks(stored, scales, (128, 128), torch.float32) - weight).abs()
    assert (error <= weight.abs() / 16 + weight.abs().max() / 448 * 2**-9).all()


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["per-expert", "fused-projections"])
def test_fp8_checkpoint(sparse, layout, scale_dtype):
    path, tensors = sparse
    expected = {}

    def quantize(stored):
        {"per-expert": split_experts, "fused-projections": fuse_projections}[layout](stored)
        chosen = [name for name in stored if ".experts." in name or "in_proj_qkvz" in name or "k_proj" in name]
        for name in [name for name in chosen if stored[name].ndim == 2]:
            parts = quantize_blocks(stored[name].float(), (4, 16), scale_dtype)
            stored[name], stored[f"{name}_scale_inv"], expected[name] = parts

    rewrite(path, quantize)
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [4, 16]}
    edit_json(path / "config.json", quantization_config=quantization)
    found, report = read(path, torch.float64)
    assert set(report.layouts) == {"flat", "fp8", layout}
    assert torch.equal(found[WEIGHT], expected[WEIGHT])
    if layout == "per-expert":
        up = found["model.layers.1.mlp.experts.gate_up_proj"][2, SPARSE.moe_intermediate_size :]
        assert torch.equal(up, expected["model.layers.1.mlp.experts.2.up_proj.weight"])
    name = "model.layers.0.linear_attn.in_proj_z.weight"
    assert torch.equal(found[name], tensors[name].double()) == (layout == "per-expert")
    assert (found[name] - tensors[name]).abs().max() < 0.2


def test_a_tied_file_may_repeat_the_embedding_but_not_differ(tmp_path):
    tensors = random_tensors(TIED)
    write_checkpoint(tmp_path, TIED, {**tensors, "lm_head.weight": torch.zeros(40, 24)})
    assert same(read(tmp_path)[0], tensors)  # the writer leaves it out
    rewrite(tmp_path, lambda stored: {**stored, "lm_head.weight": stored["model.embed_tokens.weight"].clone()})
    assert same(read(tmp_path)[0], tensors)
    rewrite(tmp_path, lambda stored: {**stored, "lm_head.weight": stored["lm_head.weight"] + 1})
    with pytest.raises(CheckpointError, match="lm_head.weight differs"):
        read(tmp_path)


# --- what the directory says about the model


def test_generation_config_names_the_end_tokens(sparse):
    path, _ = sparse
    edit_json(path / "generation_config.json", eos_token_id=[1, 2, 3])
    assert read_config(path).eos_token_ids == (1, 2, 3)
    edit_json(path / "generation_config.json", eos_token_id=5)
    assert read_config(path).eos_token_ids == (5,)
    (path / "generation_config.json").unlink()
    assert read_config(path).eos_token_ids == SPARSE.eos_token_ids


@pytest.mark.parametrize("said", [None, 0, 1])
def test_the_mtp_head_is_there_when_its_tensors_are(sparse, said):
    path, _ = sparse
    edit_json(path / "config.json", mtp_num_hidden_layers=said)
    assert has_mtp(path) and read_config(path).mtp_num_hidden_layers == 1
    rewrite(path, lambda stored: {n: t for n, t in stored.items() if not n.startswith("mtp.")})
    assert not has_mtp(path) and read_config(path).mtp_num_hidden_layers == 0
    assert not any(name.startswith("mtp.") for name in read(path)[0])


def test_half_an_mtp_head_is_missing_tensors(sparse):
    path, _ = sparse
    rewrite(path, lambda stored: {n: t for n, t in stored.items() if n != "mtp.fc.weight"})
    with pytest.raises(CheckpointError, match=r"mtp\.fc\.weight is missing"):
        read(path)
