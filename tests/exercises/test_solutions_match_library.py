"""What a reader writes for one sequence is what the library computes for a batch."""

import math

import numpy as np
import pytest
import torch
from catalogue import ROOT, load

from minserve.clock import VirtualClock
from minserve.deltanet.gated_delta import gated_delta_recurrent
from minserve.events import EventKind, EventLog
from minserve.metrics import summary
from minserve.model.config import FULL, LINEAR, ModelConfig
from minserve.model.counting import count_parameters, count_step, kv_bytes_per_token, state_bytes
from minserve.model.footprint import FLOAT32, conv_tail_bytes
from minserve.model.layers import GatedAttention, MixtureOfExperts, rotary_table, rotate
from minserve.model.memory import Memory
from minserve.model.model_figures import named_config
from minserve.request import SamplingParams
from minserve.sampling import choose, filter_probs
from minserve.tuning.cost_model import machine, step_time
from minserve.tuning.workload import gamma_times

CH01, CH02 = (load(ROOT / "solutions" / f"{name}.py") for name in ("ch01_serving", "ch02_model"))
NAMES = ("qwen3.5-0.8b", "qwen3.5-35b-a3b", "qwen3.8-2.4t-a95b")
TINY = ModelConfig(
    vocab_size=40, hidden_size=12, num_hidden_layers=2, layer_types=(LINEAR, FULL), num_attention_heads=6,
    num_key_value_heads=2, head_dim=8, linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=4,
    linear_value_head_dim=5, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=7,
    shared_expert_intermediate_size=9, partial_rotary_factor=1.0,
)  # fmt: skip


def test_latency_report_equals_metrics():
    rng, log = np.random.default_rng(0), EventLog(VirtualClock())
    requests = CH01.static_batches(rng.uniform(0, 9, 40).cumsum().tolist(), rng.integers(1, 9, 40).tolist(), 4, 2.0,
                                   lambda rows: 0.5 + 0.1 * rows)  # fmt: skip
    for number, request in enumerate(requests):
        log.record(EventKind.ARRIVED, number, time_s=request["arrived_s"], prompt_tokens=1)
        log.record(EventKind.ADMITTED, number, time_s=request["admitted_s"], cached_tokens=0)
        for time_s in request["token_times_s"]:
            log.record(EventKind.TOKENS, number, time_s=time_s, count=1)
        log.record(EventKind.FINISHED, number, time_s=request["token_times_s"][-1], reason="length")
    total = summary(log)
    assert CH01.latency_report(requests) == pytest.approx({
        "ttft_p50_s": total.ttft.p50, "ttft_p99_s": total.ttft.p99, "tpot_p50_s": total.tpot.p50,
        "itl_p99_s": total.itl.p99,
    })  # fmt: skip


@pytest.mark.parametrize("rate, cv", [(4.0, 1.0), (0.5, 3.0), (2.0, 0.3)])
def test_arrivals_equal_the_workload(rate, cv):
    ours = CH01.arrivals(rate, cv, 200, np.random.default_rng(5))
    np.testing.assert_array_equal(ours, gamma_times(200, rate, cv, np.random.default_rng(5)))


def sizes_of(config):
    counts = count_parameters(config)
    return CH01.Sizes(
        dense_params=counts.always_read, head_params=counts.head, expert_params=counts.per_expert,
        num_expert_layers=config.num_hidden_layers, num_experts=config.num_experts,
        experts_per_token=counts.experts_per_token,
        attention_width=config.num_full_layers * config.num_attention_heads * config.head_dim,
        kv_numbers=kv_bytes_per_token(config, 1), state_numbers=state_bytes(config, 1, 0), weight_bytes=4, kv_bytes=2,
        state_bytes=4,
    )  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rows", [[(4096, 4097)], [(0, 512)], [(9, 10)] * 32 + [(100, 356), (0, 1)]])
def test_step_cost_equals_counting(name, rows):
    config = named_config(name)
    ours, theirs = CH01.step_cost(sizes_of(config), rows), count_step(config, rows, weight_bytes=FLOAT32)
    without_tails = count_step(config, rows, weight_bytes=FLOAT32, conv_dtype_bytes=0).bytes
    assert ours["dense_bytes"] == theirs.bytes.dense_weights + theirs.bytes.head
    assert ours["expert_bytes"] == pytest.approx(theirs.bytes.expert_weights, rel=1e-9)
    assert ours["kv_bytes"] == theirs.bytes.kv_read + theirs.bytes.kv_written
    assert ours["state_bytes"] == without_tails.state_read + without_tails.state_written
    # The library leaves out norms, which are no matrices.
    assert ours["flops"] == pytest.approx(theirs.flops.total, rel=1e-3)


@pytest.mark.parametrize("rows", [1, 512, 8192])
def test_step_time_and_ridge_equal_the_cost_model(rows):
    h100 = machine("h100", overhead_s=1e-3, efficiency=1.0)
    ours = CH01.Machine(h100.bandwidth_bytes_per_s, h100.flops_per_s, h100.overhead_s)
    step = count_step(named_config("qwen3.5-35b-a3b"), [(0, rows)])
    mine = CH01.step_time(ours, step.bytes.total, step.flops.total, "bfloat16")
    assert mine == pytest.approx(step_time(step, h100).total_s)
    assert CH01.ridge(ours, "fp8", bytes_per_param=2.0) == pytest.approx(h100.ridge("fp8"))


class SolvedMemory(Memory):
    """A memory whose attention is the exercise's: it rotates by itself, and gets unrotated queries and keys."""

    def __init__(self):
        self.caches = [torch.zeros(0, TINY.num_key_value_heads, TINY.head_dim, dtype=torch.float64)] * 2

    def attend(self, layer, q, k, v):
        out, *self.caches = CH02.attend_cached(q, k, v, *self.caches)
        return out


class PlainMemory(Memory):
    """Attention by the public function over a whole sequence."""

    def attend(self, layer, q, k, v):
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1)


@torch.no_grad()
@pytest.mark.parametrize("chunk", [1, 2, 5, 9])
def test_attention_and_its_gate_equal_the_layer(chunk):
    torch.manual_seed(0)
    layer, x = GatedAttention(TINY, index=0).double(), torch.randn(9, TINY.hidden_size, dtype=torch.float64)
    want = layer(x, rotary_table(torch.arange(9), TINY, x.dtype), PlainMemory())
    unrotated, memory, rows = rotary_table(torch.zeros(9, dtype=torch.long), TINY, x.dtype), SolvedMemory(), []
    for piece, *rotation in zip(x.split(chunk), *(table.split(chunk) for table in unrotated), strict=True):
        rows.append(layer(piece, tuple(rotation), memory))
    torch.testing.assert_close(torch.cat(rows), want, rtol=1e-9, atol=1e-12)

    projected = layer.q_proj(x)
    query, gate = CH02.split_query_gate(projected, TINY.num_attention_heads)
    k = layer.k_norm(layer.k_proj(x).view(9, TINY.num_key_value_heads, -1))
    v = layer.v_proj(x).view(9, TINY.num_key_value_heads, -1)
    out = SolvedMemory().attend(0, layer.q_norm(query), k, v)
    torch.testing.assert_close(CH02.gate_output(out, gate, layer.o_proj.weight), want, rtol=1e-9, atol=1e-12)


def test_the_given_rope_is_the_layers():
    x, positions = torch.randn(7, 3, 8, dtype=torch.float64), torch.arange(5, 12)
    want = rotate(x, rotary_table(positions, TINY, x.dtype))
    torch.testing.assert_close(CH02.rotate(x, positions), want, rtol=1e-12, atol=1e-12)


def test_delta_step_equals_the_recurrent_form():
    torch.manual_seed(0)
    tokens, heads, key_dim, value_dim = 6, 3, 4, 5
    q, k = torch.randn(2, 1, tokens, heads, key_dim, dtype=torch.float64)
    k = k / k.norm(dim=-1, keepdim=True)
    v, state = torch.randn(1, tokens, heads, value_dim).double(), torch.randn(1, heads, key_dim, value_dim).double()
    g, beta = -torch.rand(1, tokens, heads).double(), torch.rand(1, tokens, heads).double()
    want, want_state = gated_delta_recurrent(q, k, v, g, beta, state)
    for head in range(heads):
        mine = state[0, head]
        for t in range(tokens):
            out, mine = CH02.delta_step(mine, *(x[0, t, head] for x in (q, k, v, g, beta)))
            torch.testing.assert_close(out, want[0, t, head])
        torch.testing.assert_close(mine, want_state[0, head])


@torch.no_grad()
def test_route_equals_the_layer():
    torch.manual_seed(0)
    moe, x = MixtureOfExperts(TINY, "torch").double(), torch.randn(8, TINY.hidden_size, dtype=torch.float64)
    moe.experts.gate_up_proj.normal_()
    moe.experts.down_proj.zero_()  # what is left is the shared expert's part
    out, routing = moe(x)
    for t in range(8):
        logits, shared_logit = routing.logits[t], moe.shared_expert_gate(x)[t, 0]
        ids, weights, shared = CH02.route(logits, shared_logit, TINY.num_experts_per_tok)
        assert ids.tolist() == routing.expert_ids[t].tolist()
        torch.testing.assert_close(weights, routing.weights[t])
        torch.testing.assert_close(shared * moe.shared_expert(x)[t], out[t])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_mtp_layers", [0, 1])
def test_bytes_to_remember_equal_the_footprint(name, num_mtp_layers):
    config = named_config(name)
    shape = CH02.Shape(
        config.num_full_layers, config.num_linear_layers, num_mtp_layers * config.mtp_num_hidden_layers,
        config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.linear_num_key_heads,
        config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim,
        config.linear_conv_kernel_dim,
    )  # fmt: skip
    found = CH02.bytes_to_remember(shape, 1000)
    assert found["kv_bytes"] == 1000 * kv_bytes_per_token(config, with_mtp=bool(num_mtp_layers))
    assert found["conv_bytes"] == conv_tail_bytes(config)
    assert found["state_bytes"] + found["conv_bytes"] == state_bytes(config)


def test_sample_equals_the_one_filter():  # fault I6: tiny temperatures too
    rng = np.random.default_rng(0)
    for _ in range(400):
        logits = torch.from_numpy(rng.normal(0, 2, rng.integers(1, 12)).round(1))  # rounded, so that some are equal
        logits[torch.from_numpy(rng.random(len(logits)) < 0.2)] = -math.inf
        logits[0] = 0.3
        temperature = float(rng.choice([0.0, 1e-12, 1e-4, 0.3, 1.0, 2.0]))
        knobs = {"top_k": int(rng.integers(0, 6)), "top_p": float(rng.choice([0.05, 0.5, 0.9, 1.0])),
                 "min_p": float(rng.choice([0.0, 0.1, 0.5, 1.0]))}  # fmt: skip
        u = float(rng.random())
        want = choose(filter_probs(logits, SamplingParams(temperature=temperature, **knobs)), u)
        assert CH02.sample(logits, temperature, **knobs, uniform=u) == int(want), (logits, temperature, knobs, u)
