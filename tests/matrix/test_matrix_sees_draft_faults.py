"""The matrix can fail where drafts are: what the step before has guessed wrongly must be gone, everywhere."""

from __future__ import annotations

import pytest
import torch
from broken import check_seen, swap

import minserve.choosing
from minserve.deltanet.state_pool import EMPTY
from minserve.hybrid.ticket import Ticket


def before_settling(monkeypatch, change):
    """Have `change(ticket, request, slots, kept)` look at what a verify run has written, by drafts kept so far."""
    settle = Ticket.settle

    def changed(ticket, request):
        slots = ticket.state_write[request.id]
        change(ticket, request, slots, request.num_computed - ticket._stop[request.id])
        return settle(ticket, request)

    monkeypatch.setattr(Ticket, "settle", changed)


def pools_of(engine):
    """All that is kept by slot."""
    return [*engine.memory.states.values(), *engine.memory.tails.values()]


def states_miss_the_last_draft_that_was_kept(engine, monkeypatch):  # fault E4
    def change(ticket, request, slots, kept):
        if kept:
            slots[kept - 1], slots[kept] = slots[kept], slots[kept - 1]

    before_settling(monkeypatch, change)


def plain_steps_read_the_first_state_of_a_verify_run(engine, monkeypatch):  # fault E4
    first, pools, read = {}, pools_of(engine), Ticket.state_read

    def note(ticket, request, slots, kept):
        first[request.id] = [pool[slots[0]].clone() for pool in pools]

    def read_first(ticket, request):
        slot = read(ticket, request)
        if slot != EMPTY and request.id in first and len(ticket.state_write[request.id]) == 1:
            for pool, state in zip(pools, first[request.id], strict=True):
                pool[slot] = state
        return slot

    before_settling(monkeypatch, note)
    monkeypatch.setattr(Ticket, "state_read", read_first)


def tails_are_not_rewound(engine, monkeypatch):
    def change(ticket, request, slots, kept):
        for pool in engine.memory.tails.values():
            pool[slots[kept]] = pool[slots[-1]]

    before_settling(monkeypatch, change)


def states_for_others_have_seen_all_drafts(engine, monkeypatch):  # faults A4, A6
    def change(ticket, request, slots, kept):
        is_last = request.num_committed == request.max_computed + 1
        for at in range(kept + is_last):  # those that the request itself does not go on from
            for pool in pools_of(engine):
                pool[slots[at]] = pool[slots[-1]]

    before_settling(monkeypatch, change)


def keys_of_rejected_drafts_stay(engine, monkeypatch):
    write = engine.memory.implementation.write_pages

    def write_once(k, v, k_pages, v_pages, slots):
        fresh = k_pages.flatten(0, 1)[slots].isnan().flatten(1).any(1)  # what nobody has written is NaN here
        write(k[fresh], v[fresh], k_pages, v_pages, slots[fresh])

    swap(engine, write_pages=write_once)


def rejected_drafts_are_published(engine, monkeypatch):  # fault A6
    cache, release = engine.cache, engine.cache.release

    def one_too_many(request, keep=False):
        """Where the newest token is to come, there is what the step has computed for a draft."""
        if keep and request.id in cache.tables and request.num_committed <= cache.tables[request.id].capacity:
            request.num_computed = request.num_committed
        release(request, keep)

    cache.release, cache.states.expect = one_too_many, lambda slot, num_tokens: None


def after_following(engine, change):
    """Have `change(slices, chosen)` look at the head's pages after each step. Changes: the engine."""
    follow = engine.drafting.follow

    def changed(slices, chosen, hidden):
        follow(slices, chosen, hidden)
        change(slices, chosen)

    engine.drafting.follow = changed


def the_head_misses_the_token_behind_the_drafts(engine, monkeypatch):  # fault E12
    memory, tables = engine.memory, engine.cache.tables

    def forget(slices, chosen):
        for piece in slices:
            newest = piece.stop + len(chosen.tokens.get(piece.request.id, ())) - 1
            if piece.request.id in chosen.tokens and newest < tables[piece.request.id].capacity:
                (slot,) = tables[piece.request.id].slots(newest, newest + 1)
                memory.k_pages[memory.head_layer].flatten(0, 1)[slot] = 0

    after_following(engine, forget)


def the_head_gets_what_was_there_before_the_norm(engine, monkeypatch):  # fault E18
    follow, weight = engine.drafting.follow, engine._runner._model.model.norm.weight
    engine.drafting.follow = lambda slices, chosen, hidden: follow(slices, chosen, hidden / (1 + weight))


def the_head_gets_another_tokens_output(engine, monkeypatch):  # fault E17
    follow = engine.drafting.follow
    engine.drafting.follow = lambda slices, chosen, hidden: follow(slices, chosen, hidden.roll(1, 0))


def logprobs_are_all_of_the_first_position(engine, monkeypatch):  # fault E9
    logprobs = minserve.choosing._Verified.logprobs
    monkeypatch.setattr(
        minserve.choosing._Verified, "logprobs", lambda row, position, token_id: logprobs(row, 0, token_id)
    )


def what_is_accepted_depends_on_the_neighbours(engine, monkeypatch):  # fault I3
    draws = iter(torch.rand(10_000, generator=torch.Generator().manual_seed(0)).tolist())
    monkeypatch.setattr(minserve.choosing, "uniform", lambda seed, position, stream: next(draws))


ERRATIC = {"draft": "erratic", "draft_tokens": 4, "company": "joining"}
HEAD = {"draft": "mtp", "draft_tokens": 2, "company": "joining"}
AGAIN = {"company": "alone", "prompts": "continued", "snapshot_every": 4}
FAULTS = (
    (states_miss_the_last_draft_that_was_kept, {**ERRATIC, "model": "dense"}),
    (states_miss_the_last_draft_that_was_kept, {**HEAD, "model": "mixture"}),
    (plain_steps_read_the_first_state_of_a_verify_run, {**ERRATIC, "model": "dense"}),
    (tails_are_not_rewound, {**ERRATIC, "model": "dense"}),
    (states_for_others_have_seen_all_drafts, {**ERRATIC, "model": "dense", **AGAIN}),
    (states_for_others_have_seen_all_drafts, {**HEAD, "model": "dense", **AGAIN}),
    (keys_of_rejected_drafts_stay, {**ERRATIC, "model": "attention", "prefix_cache": False}),
    (keys_of_rejected_drafts_stay, {**HEAD, "model": "dense", "prefix_cache": False}),
    (rejected_drafts_are_published, {**ERRATIC, "model": "attention", **AGAIN}),
    (the_head_misses_the_token_behind_the_drafts, {**HEAD, "model": "dense"}),
    (the_head_gets_what_was_there_before_the_norm, {**HEAD, "model": "dense"}),
    (the_head_gets_another_tokens_output, {**HEAD, "model": "attention", "outputs": 3}),
    (logprobs_are_all_of_the_first_position, {**ERRATIC, "model": "dense"}),
    (what_is_accepted_depends_on_the_neighbours, {**ERRATIC, "model": "attention", "outputs": 3}),
)


@pytest.mark.parametrize("fault, levels", FAULTS, ids=lambda value: getattr(value, "__name__", None))
def test_the_fault_is_seen(fault, levels, alone, monkeypatch):
    check_seen(fault, levels, alone, monkeypatch)
