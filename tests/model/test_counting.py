"""Counting: equal to the tensors of the model, to counts by hand, and to the published figures."""

import random
from dataclasses import replace

import pytest
import torch

from minserve.errors import InvalidValue
from minserve.model.config import FULL, LINEAR, ModelConfig
from minserve.model.counting import (
    BFLOAT16,
    FLOAT32,
    FP8_EXPERTS,
    NVFP4_EXPERTS,
    conv_tail_bytes,
    count_parameters,
    count_step,
    expected_distinct_experts,
    kv_bytes_per_token,
    resident_bytes,
    state_bytes,
)
from minserve.model.hybrid_lm import HybridLM
from minserve.model.model_figures import config_sources, model_names, named_config

LARGE = "qwen3.8-2.4t-a95b"
TINY = ModelConfig(
    vocab_size=264, hidden_size=160, num_hidden_layers=8, layer_types=(LINEAR, LINEAR, LINEAR, FULL) * 2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=32, linear_num_key_heads=2, linear_num_value_heads=4,
    linear_key_head_dim=64, linear_value_head_dim=64, num_experts=16, num_experts_per_tok=2, moe_intermediate_size=40,
    shared_expert_intermediate_size=96, mtp_num_hidden_layers=1, max_position_embeddings=8192,
)  # fmt: skip


def random_config(seed: int) -> ModelConfig:
    """A small configuration in which no two sizes are equal by accident."""
    draw = random.Random(seed)
    heads, key_heads, moe = draw.choice((1, 2, 3)), draw.choice((1, 2, 3)), seed % 2 == 0
    layers = tuple(draw.choice((LINEAR, FULL)) for _ in range(draw.randrange(1, 6)))
    return ModelConfig(
        vocab_size=draw.randrange(20, 90), hidden_size=draw.randrange(8, 50), num_hidden_layers=len(layers),
        layer_types=layers, num_attention_heads=heads * draw.choice((1, 2, 4)), num_key_value_heads=heads,
        head_dim=draw.choice((8, 16, 24)), linear_num_key_heads=key_heads,
        linear_num_value_heads=key_heads * draw.choice((1, 2, 3)), linear_key_head_dim=draw.choice((4, 6, 10)),
        linear_value_head_dim=draw.choice((5, 7, 12)), linear_conv_kernel_dim=draw.choice((2, 4)),
        num_experts=draw.randrange(3, 9) if moe else 0, num_experts_per_tok=draw.randrange(1, 4) if moe else 0,
        moe_intermediate_size=draw.randrange(3, 20) if moe else 0,
        shared_expert_intermediate_size=draw.randrange(3, 20) if moe else 0,
        intermediate_size=0 if moe else draw.randrange(3, 40), mtp_num_hidden_layers=draw.choice((0, 1)),
        tie_word_embeddings=draw.random() < 0.5, partial_rotary_factor=0.5,
    )  # fmt: skip


def num_elements(config: ModelConfig) -> int:
    """Numbers in the model's parameters; the meta device allocates none of them."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in HybridLM(config).parameters())


@pytest.mark.parametrize("seed", range(12))
def test_counted_parameters_are_those_of_the_model(seed):
    config = random_config(seed)
    assert count_parameters(config).total_with_mtp == num_elements(config)


@pytest.mark.parametrize("name", ["qwen3.5-0.8b", "qwen3.5-35b-a3b"])
def test_published_shapes_build_the_model_that_was_counted(name):
    assert count_parameters(named_config(name)).total_with_mtp == num_elements(named_config(name))


def test_tiny_parameters_by_hand():
    counts = count_parameters(TINY)
    qkv, z, a_and_b, out = 160 * 512, 160 * 256, 2 * 160 * 4, 256 * 160
    deltanet = qkv + z + a_and_b + 512 * 4 + 4 + 4 + 64 + out
    attention = 160 * 256 + 2 * 160 * 64 + 128 * 160 + 32 + 32
    router, experts, shared = 160 * 16, 16 * 3 * 160 * 40, 3 * 160 * 96 + 160
    assert counts.deltanet == 6 * deltanet
    assert counts.full_attention == 2 * attention
    assert counts.routed_experts == 8 * experts
    assert (counts.shared_experts, counts.routers, counts.dense_mlp) == (8 * shared, 8 * router, 0)
    assert (counts.embedding, counts.lm_head, counts.norms) == (264 * 160, 264 * 160, 17 * 160)
    assert counts.mtp == 2 * 160 * 160 + 5 * 160 + attention + router + experts + shared
    assert counts.active == counts.total - 264 * 160 - 8 * 14 * 3 * 160 * 40
    assert count_parameters(replace(TINY, tie_word_embeddings=True)).active == counts.active


def test_tiny_memory_by_hand():
    assert kv_bytes_per_token(TINY, dtype_bytes=4) == 2 * 2 * 2 * 32 * 4
    assert kv_bytes_per_token(TINY, dtype_bytes=4, with_mtp=True) == 3 * 2 * 2 * 32 * 4
    assert conv_tail_bytes(TINY) == 6 * 3 * 512 * 2
    assert state_bytes(TINY) == 6 * 4 * 64 * 64 * 4 + 6 * 3 * 512 * 2
    assert resident_bytes(TINY, FLOAT32) == 4 * count_parameters(TINY).total_with_mtp
    assert resident_bytes(TINY, with_mtp=False) == 2 * count_parameters(TINY).total


def test_a_model_of_attention_alone_has_no_state():
    config = replace(TINY, layer_types=(FULL,) * 8, linear_num_value_heads=0, linear_num_key_heads=0)
    assert (state_bytes(config), count_parameters(config).deltanet) == (0, 0)
    assert kv_bytes_per_token(config) == 4 * kv_bytes_per_token(TINY)
    assert count_step(config, [(5, 6)]).flops.deltanet == 0


def test_tiny_step_by_hand():
    """A decode row after 9 cached tokens, beside a prefill chunk of 4 that opens its request."""
    step = count_step(TINY, [(9, 10), (0, 4)], distinct_experts=7.5)
    kv, state = 2 * 2 * 2 * 32 * 2, 6 * (4 * 64 * 64 * 4 + 3 * 512 * 2)
    assert (step.num_rows, step.num_tokens, step.num_logits) == (2, 5, 2)
    assert step.bytes.expert_weights == 8 * 7.5 * 3 * 160 * 40 * 2
    assert step.bytes.dense_weights + step.bytes.head == 2 * (
        count_parameters(TINY).active - count_parameters(TINY).active_experts
    )
    assert (step.bytes.kv_read, step.bytes.kv_written) == (9 * kv, 5 * kv)
    assert (step.bytes.state_read, step.bytes.state_written) == (state, 2 * state)
    assert step.bytes.total == step.bytes.weights + 14 * kv + 3 * state
    attended = 10 + (1 + 2 + 3 + 4)
    assert step.flops.attention == 2 * 4 * (2 + 2) * 32 * attended
    assert step.flops.deltanet == 6 * 4 * 7 * 64 * 64 * 5
    assert step.flops.experts == 2 * 2 * 8 * 3 * 160 * 40 * 5
    assert step.flops.head == 2 * 264 * 160 * 2
    per_token = 6 * (160 * (512 + 256 + 8 + 256) + 512 * 4) + 2 * 160 * (256 + 128 + 128) + 8 * 160 * (16 + 3 * 96 + 1)
    assert step.flops.dense == 2 * per_token * 5


def test_chunks_cost_the_arithmetic_of_the_whole_and_more_bytes():
    whole = count_step(TINY, [(0, 60)])
    parts = [count_step(TINY, [(start, start + 20)], num_logits=int(start == 40)) for start in (0, 20, 40)]
    assert sum(part.flops.total for part in parts) == whole.flops.total
    assert sum(part.bytes.dense_weights for part in parts) == 3 * whole.bytes.dense_weights
    assert sum(part.bytes.kv_written for part in parts) == whole.bytes.kv_written
    assert [part.bytes.head for part in parts] == [0, 0, whole.bytes.head]


def test_distinct_experts_are_bounded_and_match_drawn_ones():
    assert expected_distinct_experts(TINY, 1) == pytest.approx(2)
    assert expected_distinct_experts(TINY, 10_000) == pytest.approx(16)
    assert expected_distinct_experts(named_config("qwen3.5-0.8b"), 5) == 0
    draw = random.Random(0)
    drawn = [len({e for _ in range(6) for e in draw.sample(range(16), 2)}) for _ in range(4000)]
    assert sum(drawn) / len(drawn) == pytest.approx(expected_distinct_experts(TINY, 6), abs=0.1)


def test_bad_rows_are_named():
    for row in ((3, 3), (5, 4), (-1, 2)):
        with pytest.raises(InvalidValue, match="rows"):
            count_step(TINY, [row])


def test_large_parameters_to_the_last_one():
    assert count_parameters(named_config(LARGE)).total_with_mtp == 2_446_182_725_504


# name: total, with MTP, active (in billions); KV bytes per token; state in MiB with float32 and bfloat16 states;
# tokens of KV that one state equals; KV at 262,144 tokens in GB. As published tables and their derivations print them.
PUBLISHED = {
    LARGE: ("2419.80", "2446.18", "93.3", 94_208, "560", "284", 6_234, "24.7"),
    "qwen3.5-397b-a17b": ("396.3", "402.9", "16.3", 30_720, "183", "93", 6_252, "8.05"),
    "qwen3.5-122b-a10b": ("122.1", "124.6", "9.0", 24_576, "147", "75", 6_252, "6.44"),
    "qwen3.5-35b-a3b": ("34.7", "35.5", "2.95", 20_480, "61", "31", 3_144, "5.37"),
    "qwen3-next-80b-a3b": ("79.7", "81.3", "3.6", 24_576, "74", "38", 3_144, "6.44"),
    "qwen3.5-0.8b": ("0.75", "0.77", "0.75", 12_288, "18.6", "9.6", 1_590, "3.22"),
}


def shown(value: float, like: str) -> str:
    """`value` with as many decimals as `like` has."""
    return f"{value:.{len(like.partition('.')[2])}f}"


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_figures_to_the_printed_digits(name):
    config, (total, with_mtp, active, kv, wide, narrow, tokens, long_kv) = named_config(name), PUBLISHED[name]
    counts = count_parameters(config)
    assert shown(counts.total / 1e9, total) == total
    assert shown(counts.total_with_mtp / 1e9, with_mtp) == with_mtp
    assert shown(counts.active / 1e9, active) == active
    assert kv_bytes_per_token(config) == kv
    assert shown(state_bytes(config) / 2**20, wide) == wide
    assert shown(state_bytes(config, state_dtype_bytes=2) / 2**20, narrow) == narrow
    assert round(state_bytes(config) / kv) == tokens
    assert shown(kv * 262_144 / 1e9, long_kv) == long_kv


def test_where_the_active_weights_of_the_large_model_are():
    counts = count_parameters(named_config(LARGE))
    parts = {
        "routed": (counts.active_experts, "46.3"), "deltanet": (counts.deltanet, "30.2"),
        "attention": (counts.full_attention, "9.65"), "shared": (counts.shared_experts, "4.63"),
        "head": (counts.head, "2.03"), "routers": (counts.routers, "0.39"),
    }  # fmt: skip
    assert {name: shown(value / 1e9, like) for name, (value, like) in parts.items()} == {
        name: like for name, (_, like) in parts.items()
    }
    assert shown((counts.active + counts.embedding) / 1e9, "95.3") == "95.3"


def test_checkpoints_on_disk():
    """Published index sizes: two formats are explained by routed experts alone being narrow."""
    large = named_config(LARGE)
    assert resident_bytes(large, NVFP4_EXPERTS) == 1_447_265_951_488
    assert resident_bytes(large, BFLOAT16) == pytest.approx(4_892_388_705_238, rel=5e-6)
    assert resident_bytes(large, FP8_EXPERTS) == pytest.approx(2_496_154_358_768, rel=36e-6)
    assert resident_bytes(large, replace(FP8_EXPERTS, dense=1 + 2 / 128**2)) < 2_496_154_358_768 - 45e9


def test_batch_one_traffic_of_the_large_model():
    fp8 = count_step(named_config(LARGE), [(0, 1)], weight_bytes=FP8_EXPERTS).bytes
    nvfp4 = count_step(named_config(LARGE), [(0, 1)], weight_bytes=NVFP4_EXPERTS).bytes
    verify = count_step(named_config(LARGE), [(0, 4)], weight_bytes=FP8_EXPERTS)
    assert round(fp8.weights / 1e9) == 140
    assert round(nvfp4.weights / 1e9) == 120
    assert round((fp8.dense_weights + fp8.head) / 1e9) == 94
    assert (round(verify.distinct_experts), round(verify.bytes.weights / 1e9)) == (39, 274)


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(InvalidValue, match=r"qwen3\.5-0\.8b.*qwen3\.8-2\.4t"):
        named_config("gpt-2")


def test_every_published_shape_loads_and_names_its_source():
    for name in model_names():
        assert named_config(name).num_full_layers * 3 == named_config(name).num_linear_layers
        assert all(source.startswith(("read on", "https://")) for source in config_sources(name))
