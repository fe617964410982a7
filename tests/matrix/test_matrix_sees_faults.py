"""The matrix can fail: an engine that is broken as real ones have been gives another answer on some route."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from broken import check_seen, swap

import minserve.sampling


def slices_start_from_zero_states(engine, monkeypatch):  # fault A11
    rule = engine.memory.implementation.gated_delta_ragged

    def forgetful(q, k, v, g, beta, state, row_starts):
        is_chunk = (row_starts.diff() > 1)[:, None, None, None]
        return rule(q, k, v, g, beta, state.masked_fill(is_chunk, 0), row_starts)

    swap(engine, gated_delta_ragged=forgetful)


def slices_start_from_zero_tails(engine, monkeypatch):  # fault A11
    convolve = engine.memory.implementation.conv_tail_ragged

    def forgetful(x, weight, tails, row_starts, **every):
        return convolve(x, weight, torch.zeros_like(tails), row_starts, **every)

    swap(engine, conv_tail_ragged=forgetful)


def last_tokens_are_applied_twice(engine, monkeypatch):  # fault A3
    rule = engine.memory.implementation.gated_delta_ragged

    def twice(q, k, v, g, beta, state, row_starts):
        out, state = rule(q, k, v, g, beta, state, row_starts)
        last = row_starts[1:] - 1
        return out, rule(*(x[last] for x in (q, k, v, g, beta)), state, torch.arange(len(last) + 1))[1]

    swap(engine, gated_delta_ragged=twice)


def rows_read_their_neighbours_pages(engine, monkeypatch):  # fault B4
    attend = engine.memory.implementation.paged_attention

    def neighbours(q, k_pages, v_pages, page_tables, row_starts, context_lens):
        is_held = page_tables.roll(1, 0) >= 0
        return attend(q, k_pages, v_pages, page_tables.roll(1, 0).where(is_held, page_tables), row_starts, context_lens)

    swap(engine, paged_attention=neighbours)


def tokens_are_written_in_the_wrong_order(engine, monkeypatch):
    write = engine.memory.implementation.write_pages
    swap(engine, write_pages=lambda k, v, k_pages, v_pages, slots: write(k, v, k_pages, v_pages, slots.flip(0)))


def pages_are_not_copied(engine, monkeypatch):  # fault B4
    engine.cache._copy_page = lambda source, target: None


def forks_share_no_state(engine, monkeypatch):
    cache, fork = engine.cache, engine.cache.fork

    def with_another_slot(request, child):
        if not fork(request, child):
            return False
        cache.states.release(cache.slot_of[child.id])
        cache.slot_of[child.id] = slot = cache.states.take()
        cache.states.stamp(slot, request.num_computed)
        return True

    cache.fork = with_another_slot


def trusting(engine, match):
    """Let a function choose what is reused, and believe whatever state that gives. Changes: the engine."""
    engine.cache.prefixes._match = match
    engine.cache.states.expect = lambda slot, num_tokens: None


def page_hits_are_taken_for_states(engine, monkeypatch):  # fault A1
    trusting(engine, lambda page_hit, snapshots, num_tokens: page_hit)


def a_state_may_have_seen_the_last_token(engine, monkeypatch):  # fault A3
    trusting(engine, lambda page_hit, snapshots, num_tokens: max((n for n in snapshots if n <= page_hit), default=0))


def a_state_may_have_seen_anothers_tokens(engine, monkeypatch):  # fault A6
    trusting(engine, lambda page_hit, snapshots, num_tokens: max(snapshots, default=0))


def new_requests_find_the_last_ones_state(engine, monkeypatch):  # fault K4
    at = engine.memory.at

    def not_empty(row_starts, places):
        return at(row_starts, replace(places, state_read=places.state_read.clamp(min=0)))

    engine.memory.at = not_empty


def states_are_float32(engine, monkeypatch):
    engine.memory.states = {layer: pool.to(torch.float32) for layer, pool in engine.memory.states.items()}


def draws_depend_on_the_neighbours(engine, monkeypatch):  # fault I3
    draws = iter(torch.rand(10_000, generator=torch.Generator().manual_seed(0)).tolist())
    monkeypatch.setattr(minserve.sampling, "uniform", lambda seed, position, stream: next(draws))


HITS = {"prompts": "alike"}
# What is broken, and the levels of a route that goes there, where they are not the plain ones.
FAULTS = (
    (slices_start_from_zero_states, {"batch_tokens": 7}),
    (slices_start_from_zero_tails, {"model": "dense"}),
    (last_tokens_are_applied_twice, {"batch_tokens": 64}),
    (rows_read_their_neighbours_pages, {"model": "dense", "company": "joining"}),
    (tokens_are_written_in_the_wrong_order, {"model": "attention"}),
    (pages_are_not_copied, {"model": "attention", "outputs": 3}),
    (pages_are_not_copied, {"model": "attention", **HITS}),
    (forks_share_no_state, {"model": "dense", "outputs": 3}),
    (page_hits_are_taken_for_states, HITS),
    (a_state_may_have_seen_the_last_token, {"model": "dense", "prompts": "twice"}),
    (a_state_may_have_seen_anothers_tokens, {"model": "dense", **HITS}),
    (new_requests_find_the_last_ones_state, {"model": "dense", "prefix_cache": False}),
    (states_are_float32, {"model": "dense"}),
    (draws_depend_on_the_neighbours, {"model": "attention", "company": "joining", "outputs": 3}),
)


@pytest.mark.parametrize("fault, levels", FAULTS, ids=lambda value: getattr(value, "__name__", None))
def test_the_fault_is_seen(fault, levels, alone, monkeypatch):
    check_seen(fault, levels, alone, monkeypatch)
