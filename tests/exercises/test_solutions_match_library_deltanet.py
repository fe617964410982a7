"""What a reader writes for one sequence, in chapter 6, is what the library computes for a batch."""

import math

import numpy as np
import pytest
import torch
from catalogue import ROOT, load

from minserve.deltanet import conv_tail as library
from minserve.deltanet.gated_delta import gated_delta_ragged, gated_delta_recurrent
from minserve.deltanet.state_pool import StateError, StatePool
from minserve.llm import LLM
from minserve.model.footprint import kv_bytes_per_token, state_bytes
from minserve.model.model_figures import named_config
from minserve.model.naive import NaiveMemory
from minserve.model.step import Step

CH06 = load(ROOT / "solutions" / "ch06_deltanet.py")


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rule_inputs(tokens, heads, key_dim, value_dim):
    """q, k, v, g and beta of one sequence, a key head for each value head."""
    q, k = random(2, tokens, heads, key_dim, seed=1)
    g, beta = -random(tokens, heads, seed=2).abs(), random(tokens, heads, seed=3).sigmoid()
    return q, k / k.norm(dim=-1, keepdim=True), random(tokens, heads, value_dim, seed=4), g, beta


def check_same(found, wanted):
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 4, 9])
def test_conv_tail_equals_the_librarys_at_every_stop(tokens):  # fault A11
    x, weight, tail = random(tokens, 5, seed=1), random(5, 4, seed=2), random(3, 5, seed=3)
    out, tails = CH06.conv_tail(x, weight, tail, list(range(tokens + 1)))
    torch.testing.assert_close(out, library.conv_tail(x[None], weight, tail[None])[0][0], rtol=1e-12, atol=1e-12)
    for stop, kept in enumerate(tails):
        assert torch.equal(kept, library.conv_tail(x[None, :stop], weight, tail[None])[1][0])


def test_a_state_is_read_where_the_librarys_pool_lets_it_be_read():
    theirs, mine = StatePool(4), CH06.StatePool(4, (1, 2, 2), (3, 2))
    slots = theirs.take(), mine.take()
    for stamp in (0, 3, 8):
        theirs.stamp(slots[0], stamp)
        mine.write(slots[1], torch.ones(1, 2, 2), torch.ones(3, 2), stamp)
        for position in range(10):
            refusals = []
            for read, kind in ((theirs.expect, StateError), (mine.read, ValueError)):
                try:
                    read(slots[len(refusals)], position)
                    refusals.append(False)
                except kind:
                    refusals.append(True)
            assert refusals == [position != stamp] * 2
    theirs.release(slots[0]), mine.release(slots[1])
    assert theirs.num_free == mine.num_free == 4


@pytest.mark.parametrize("name", ["qwen3.5-0.8b", "qwen3.5-35b-a3b", "qwen3.5-397b-a17b", "qwen3.8-2.4t-a95b"])
@pytest.mark.parametrize("kv_bytes, matrix_bytes", [(2, 4), (1, 4), (2, 2)])
def test_crossing_point_equals_the_footprint(name, kv_bytes, matrix_bytes):
    config = named_config(name)
    shape = CH06.Hybrid(
        config.num_hidden_layers, 4, config.num_key_value_heads, config.head_dim, config.linear_num_key_heads,
        config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim,
        config.linear_conv_kernel_dim,
    )  # fmt: skip
    state, token = state_bytes(config, matrix_bytes), kv_bytes_per_token(config, kv_bytes)
    num_tokens, gb = CH06.crossing_point(shape, kv_bytes, matrix_bytes)
    assert gb == state / 1e9 and (num_tokens - 1) * token < state <= num_tokens * token


class Watching(NaiveMemory):
    """A memory that also notes g."""

    def recur(self, layer, q, k, v, g, beta):
        self.gates = getattr(self, "gates", {}) | {layer: g}
        return super().recur(layer, q, k, v, g, beta)


@torch.inference_mode()
def test_half_life_is_that_of_the_shipped_models_own_gates():
    llm = LLM()
    ids = llm.tokenizer.encode("def area(self):\n    return self.width * self.height\n")
    memory = Watching(llm.model.config, len(ids))
    layer = llm.model.model.layers[0]
    ids = ids[: len(ids) - 1 + len(ids) % 2]
    llm.model(Step.one_row(ids, 0), memory)
    inputs = layer.input_layernorm(llm.model.model.embed_tokens(torch.tensor(ids)))
    box = layer.linear_attn
    found = CH06.half_life(box.A_log, box.dt_bias, inputs @ box.in_proj_a.weight.T)
    wanted = [math.log(2) / -np.median(memory.gates[0][:, h].numpy()) for h in range(len(found))]
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=found.dtype), rtol=1e-4, atol=0)


@pytest.mark.parametrize("chunk", [1, 4, 32])
@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 8, 33])
def test_delta_chunk_equals_the_rule_token_by_token(tokens, chunk):  # fault A10
    inputs, state = rule_inputs(tokens, 3, 4, 5), random(3, 4, 5, seed=5)
    out, new_state = gated_delta_recurrent(*(x[None] for x in inputs), state[None])
    check_same(CH06.delta_chunk(*inputs, state, chunk), (out[0], new_state[0]))


def test_delta_chunk_row_by_row_equals_a_batch():
    (q, k, *rest), states = rule_inputs(16, 4, 4, 5), random(3, 4, 4, 5, seed=5)
    starts = [0, 1, 6, 16]
    out, new_states = gated_delta_ragged(q[:, ::2], k[:, ::2], *rest, states, torch.tensor(starts), chunk=4)
    q, k = (x[:, ::2].repeat_interleave(2, dim=1) for x in (q, k))  # two value heads read the same key head
    for row in range(3):
        mine = (x[starts[row] : starts[row + 1]] for x in (q, k, *rest))
        found = CH06.delta_chunk(*mine, states[row])
        check_same(found, (out[starts[row] : starts[row + 1]], new_states[row]))
