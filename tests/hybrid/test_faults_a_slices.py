"""Faults of slices that begin where another one ended, told again of whole engines, behind hits and without."""

import pytest
import torch
from served import num_wrong, one_by_one, serve_right, tokens
from worlds import A, engine_of, serve_as_known, shared

from minserve.deltanet.gated_delta import gated_delta_chunked, gated_delta_recurrent
from minserve.parts import Parts


def rule_with_chunks_of(size):
    """The delta rule for one row, in chunks of so many tokens."""

    def run(q, k, v, g, beta, state):
        out, new = gated_delta_chunked(*(x[None] for x in (q, k, v, g, beta)), state[None], chunk=size)
        return out[0], new[0]

    return run


def pads_that_forget(size):  # fault A10
    """The same, but the state is read at the padded end of the last chunk, where it has been decayed further."""

    def run(q, k, v, g, beta, state):
        out, new = gated_delta_recurrent(*(x[None] for x in (q, k, v, g, beta)), state[None])
        return out[0], new[0] * (g[-1] * (-len(g) % size)).exp()[:, None, None]

    return run


def slices_from_zeros(q, k, v, g, beta, state):  # fault A11
    """Every slice of more than one token begins from a state of zeros."""
    state = state if len(v) == 1 else torch.zeros_like(state)
    out, new = gated_delta_recurrent(*(x[None] for x in (q, k, v, g, beta)), state[None])
    return out[0], new[0]


@pytest.mark.parametrize("chunk, size", [(8, (4, 8, 64)), (3, (4, 64, 7)), (5, (3, 4, 9))], ids=str)
def test_every_rest_of_a_chunk_carries_its_state(chunk, size, worlds):  # fault A10
    part = Parts(gated_delta=rule_with_chunks_of(chunk))
    prompts = [tokens(num, seed=num) for num in range(1, 3 * chunk + 1, 1 if chunk < 8 else 2)]
    assert any(serve_as_known(worlds["hybrid"], size, [*prompts, *prompts[::-3]], parts=part))


@pytest.mark.parametrize("every", [64, 8])
def test_a_gate_read_from_the_padded_end_is_seen(every, worlds):  # fault A10
    model, plain = worlds["hybrid"]
    for num in (8, 9, 12, 15, 16, 19):
        prompts = one_by_one([tokens(num, seed=num)])
        engine = engine_of(model, (8, every, 64), Parts(gated_delta=pads_that_forget(8)))
        assert num_wrong(engine, plain, prompts) == (num % 8 > 0)  # the step after the prompt reads what it left
        engine = engine_of(model, (8, every, 64), Parts(gated_delta=pads_that_forget(1)))
        serve_right(engine, plain, prompts)


@pytest.mark.parametrize("batch_tokens", [1, 2, 3, 8])
def test_slices_behind_a_hit_carry_tail_and_state(batch_tokens, worlds):  # fault A11
    for every, num in ((8, 16), (3, 18), (64, 20)):
        prompts = [A[:20], (*A[:num], *tokens(6, 2)), A]
        assert serve_as_known(worlds["hybrid"], (4, every, batch_tokens), prompts, 1)[2] > 0


@pytest.mark.parametrize("batch_tokens", [2, 7, 8, 64])
def test_slices_from_zero_states_are_seen(batch_tokens, worlds):  # fault A11
    model, plain = worlds["hybrid"]
    engine = engine_of(model, (4, 8, batch_tokens), Parts(gated_delta=slices_from_zeros))
    assert num_wrong(engine, plain, one_by_one([A[:20], shared(17)])) == 2
