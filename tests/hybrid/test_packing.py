"""Packing a step: who reads pages together, and where rows are run in parts so that states inside them can be kept."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from gated_models import build
from poisoned_engine import poisoned_engine

from minserve.engine_config import EngineConfig
from minserve.hybrid.packing import find_shared_pages
from minserve.request import Request, SamplingParams


def saved(tables, starts, rows, num_pages, page_size):
    """Pages that are not read again if these rows read so many together; -1 where they cannot."""
    behind = all(starts[row] >= num_pages * page_size for row in rows)
    same = all((tables[row][:num_pages] == tables[rows[0]][:num_pages]).all() for row in rows)
    return (len(rows) - 1) * num_pages if behind and same else -1


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("seed", range(30))
def test_rows_that_read_together_share_these_pages_and_nobody_is_left_out(seed, page_size):
    rng = np.random.default_rng(seed)
    num_rows, num_pages = int(rng.integers(1, 7)), 6
    base = rng.permutation(40)[:num_pages]
    common = rng.integers(0, num_pages + 1, num_rows)[:, None]
    own = 100 + np.arange(num_rows * num_pages).reshape(num_rows, num_pages)
    tables = np.where(np.arange(num_pages) < common, base, own)
    starts = rng.integers(0, num_pages * page_size, num_rows)
    rows, shared = find_shared_pages(tables, starts, page_size)
    if not shared:
        assert not len(rows)
        return
    assert saved(tables, starts, rows.tolist(), shared, page_size) > 0 or len(rows) == 1
    for row in {*range(num_rows)} - {*rows.tolist()}:  # whoever could join has joined
        assert saved(tables, starts, [*rows.tolist(), row], shared, page_size) < 0


def test_one_group_is_the_one_that_saves_most():
    tables = np.array([[1, 2, 3, 9], [1, 2, 3, 8], [1, 2, 7, 6], [5, 5, 5, 5], [1, 0, 0, 0]])
    rows, shared = find_shared_pages(tables, np.array([12, 12, 12, 12, 3]), page_size=4)
    assert (rows.tolist(), shared) == ([0, 1, 2], 2)  # 2 x 2 pages, against 1 x 3; row 4 has none behind it


@pytest.fixture(scope="module")
def engine():
    config = EngineConfig(
        dtype="float64", page_size=4, num_pages=200, snapshot_every=8, share_reads_from=1, num_states=64
    )
    return poisoned_engine(build("mixture"), config)


def watched(engine, monkeypatch, name):
    """The calls of one of the functions behind the layers. Changes: the engine, until the test ends."""
    calls, run = [], getattr(engine.memory.implementation, name)

    def watch(*given):
        calls.append(given)
        return run(*given)

    monkeypatch.setattr(engine.memory, "implementation", engine.memory.implementation._replace(**{name: watch}))
    return calls


def ask(name, prompt, max_tokens=6):
    return Request(name, prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=0))


def test_an_unlike_row_does_not_keep_the_others_from_reading_once(engine, monkeypatch):
    calls = watched(engine, monkeypatch, "shared_prefix_attention")
    common = [7 * i % 250 for i in range(24)]
    for name, prompt in (("a", [*common, 1]), ("b", [*common, 2]), ("c", [*common, 3]), ("unlike", [5] * 9)):
        engine.add(ask(name, prompt))
    while engine.has_work:
        engine.step()
        engine.check()
    sharing = {len(given[5]) for given in calls}
    assert 3 in sharing and 4 not in sharing and all(given[6] * 4 <= 24 for given in calls)


@pytest.mark.parametrize("length", range(1, 41))
def test_states_inside_a_slice_are_kept_and_are_what_a_cut_would_have_left(engine, length, monkeypatch):
    """One slice passes the points; what is kept there equals the state of a prompt that ends there."""
    prompt = [(11 * i + length) % 250 for i in range(length)]
    engine.weights_changed()
    calls = watched(engine, monkeypatch, "gated_delta_ragged")
    engine.add(ask("whole", prompt, max_tokens=1))
    engine.step()
    path = engine.cache.tree.match(prompt).path
    kept = {node.stop: engine.cache.snapshots.use(node) for node in path if node in engine.cache.snapshots}
    points = sorted({*range(8, length + 1, 8), (length - 1) // 4 * 4, length} - {0})
    assert sorted(kept) == points
    in_parts = [len(given[0]) for given in calls[: len(points)]]  # of the first layer
    assert in_parts == [stop - start for start, stop in pairwise([0, *points])]
    assert len(calls) == len(points) * len(engine.memory.states)
    pools = [*engine.memory.states.values(), *engine.memory.tails.values()]
    inside = {count: [pool[slot].clone() for pool in pools] for count, slot in kept.items()}
    for count, wanted in inside.items():
        engine.weights_changed()
        engine.add(ask(f"up to {count}", prompt[:count], max_tokens=1))
        engine.step()
        node = engine.cache.tree.match(prompt[:count]).path[-1]
        at = engine.cache.snapshots.use(node)
        for pool, state in zip(pools, wanted, strict=True):
            assert torch.allclose(pool[at], state, rtol=0, atol=1e-12)


@pytest.mark.parametrize("num_requests", [8, 32])
def test_looking_for_what_is_common_costs_a_look_per_pair_and_no_walk(num_requests, monkeypatch):
    """Requests behind one warm prefix: whole comparisons, of which each reads the prefix, are few."""
    import minserve.hybrid.prefixes as prefixes

    config = EngineConfig(dtype="float64", page_size=4, num_pages=4000, num_states=200, batch_tokens=512)
    engine = poisoned_engine(build("dense"), config)
    common = [7 * i % 250 for i in range(64)]
    engine.add(ask("first", [*common, 1], max_tokens=1))
    while engine.has_work:
        engine.step()
    calls = []
    num_common = prefixes.num_common
    monkeypatch.setattr(prefixes, "num_common", lambda *given: calls.append(1) or num_common(*given))
    for number in range(num_requests):
        engine.add(ask(number, [*common, 2 + number, *([number] * 9)], max_tokens=1))
    while engine.has_work:
        engine.step()
    assert len(calls) <= 2 * num_requests


def test_rows_that_are_run_in_parts_beside_one_another_keep_their_outputs(engine):
    """Two rows with points and one without: parts interleave, and every answer is the one that its prompt has alone."""
    prompts = [[(13 * i + 5 * row) % 250 for i in range(length)] for row, length in enumerate((21, 3, 38))]
    answers = []
    for together in (False, True):
        engine.weights_changed()
        requests = [ask((together, row), prompt, max_tokens=4) for row, prompt in enumerate(prompts)]
        for request in requests:
            engine.add(request)
            while engine.has_work and not together:
                engine.step()
        while engine.has_work:
            engine.step()
        answers.append([request.output_ids for request in requests])
    assert answers[0] == answers[1]
