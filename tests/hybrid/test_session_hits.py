"""Chats whose states are kept in a few slots: how many turns find theirs, and what another order of dropping finds."""

import random

import pytest
from small_engine import ask, check_story, make_engine, run_all

from minserve.events import EventKind

ORDERS = {
    "in turns": [0, 1, 2, 3] * 5, "one after another": sorted([0, 1, 2, 3] * 5),
    "in pairs": [0, 0, 1, 1, 2, 2, 3, 3] * 2 + [0, 1, 2, 3],
    **{seed: random.Random(seed).sample([0, 1, 2, 3] * 5, 20) for seed in range(3)},
}  # fmt: skip


def prompts_of(order):
    """The prompts of chats: each has the turns before in it, with what the model said, which are zeros."""
    said, prompts = {}, []
    for session in order:
        said.setdefault(session, []).extend([session + 10] * (4 + 4 * (session not in said)))
        prompts.append(list(said[session]))
        said[session] += [0, 0]
    return prompts


def hits(prompts, num_slots, every, refresh_ancestors=False):
    """How many turns reuse something, and how many tokens."""
    engine = make_engine(snapshot_every=every, num_states=num_slots, max_running=1, num_pages=64, batch_tokens=64)
    snapshots, use = engine.cache.snapshots, engine.cache.snapshots.use

    def use_with_ancestors(place):
        path = [place]
        while path[-1].parent is not None:
            path.append(path[-1].parent)
        for above in path[:0:-1]:
            if above in snapshots:
                snapshots._slot_of.move_to_end(above)
        return use(place)

    if refresh_ancestors:
        snapshots.use = use_with_ancestors
    requests, progress = [ask(i, prompt, 2) for i, prompt in enumerate(prompts)], []
    for request in requests:
        engine.add(request)
        run_all(engine, progress)
        assert len(engine.cache.states.held) <= num_slots
    check_story(engine, requests, progress)
    cached = [event.data["cached_tokens"] for event in engine.log if event.kind is EventKind.ADMITTED]
    return sum(map(bool, cached)), sum(cached)


@pytest.mark.parametrize("num_slots, every", [(6, 4), (6, 8), (5, 64), (6, 64), (7, 64)])
def test_chats_find_as_much_as_if_every_state_on_the_way_were_refreshed(num_slots, every):  # fault A15
    found = {name: hits(prompts_of(order), num_slots, every) for name, order in ORDERS.items()}
    other = {name: hits(prompts_of(order), num_slots, every, True) for name, order in ORDERS.items()}
    assert all(found[name] >= other[name] and found[name][1] >= other[name][1] for name in ORDERS)
    assert found["one after another"][0] == 16  # all turns but the first ones
    if (num_slots, every) == (6, 64):
        assert sum(hit for hit, _ in found.values()) > sum(hit for hit, _ in other.values())


def test_more_slots_never_find_less_in_turns():
    counts = [hits(prompts_of(ORDERS["in turns"]), num_slots, 64)[0] for num_slots in range(2, 12)]
    assert counts == sorted(counts) and counts[-1] == 16
