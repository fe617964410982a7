"""The MTP head's drafts out of pages are those of the head run over the whole text, however the text got there."""

from __future__ import annotations

import pytest
import torch
from small_engine import alone, run_all
from watched_drafts import (
    DRAWN,
    Wrapped,
    check_all_drafted,
    check_drafts,
    events,
    prompt,
    request,
    serve,
    watched_engine,
)

from minserve.events import EventKind

pytestmark = pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize("batch_tokens, page_size, params", [
    (64, 4, DRAWN), (64, 4, {}), (7, 3, DRAWN), (5, 16, DRAWN), (4, 1, DRAWN),
])  # fmt: skip
def test_prompts_of_every_length_whole_and_in_chunks(dense, batch_tokens, page_size, params):
    """Alone, so that every decode step has its three drafts; entries begin and end at every place in a page."""
    engine, seen = watched_engine(dense, batch_tokens=batch_tokens, page_size=page_size, prefix_cache=False)
    for num_tokens in (1, 2, 3, 4, 5, 8, 9, 17):
        one = request(str(num_tokens), prompt(num_tokens), 9, **params)
        serve(engine, one)
        check_all_drafted(engine, seen, one)
        check_drafts(dense, seen)
        seen.clear()
    accepted = {event.data["accepted"] for event in engine.log if event.kind is EventKind.DRAFTS}
    assert accepted >= {0, 1, 2}


def test_several_rows_of_a_step(dense):
    engine, seen = watched_engine(dense, batch_tokens=64)
    all_of_them = [request(f"r{n}", prompt(n), 9, **(DRAWN if n % 2 else {})) for n in (3, 6, 9, 14, 20)]
    serve(engine, *all_of_them)
    for one in all_of_them:
        check_all_drafted(engine, seen, one)
    check_drafts(dense, seen, at_least=20)


@pytest.mark.parametrize("budget", [6, 8, 11])
def test_rows_with_unequal_counts(dense, budget):
    """Drafts take what is left of the budget: some rows have three, some fewer, some none."""
    engine, seen = watched_engine(dense, batch_tokens=budget)
    serve(engine, *(request(f"r{n}", prompt(n), 12, **DRAWN) for n in (3, 5, 6, 9)))
    check_drafts(dense, seen, at_least=10)
    assert {len(one.ids) for one in seen} == {1, 2, 3}


@pytest.mark.parametrize("params", [{}, DRAWN], ids=["greedy", "drawn"])
def test_after_a_hit(dense, params):  # fault E17
    """The first draft after a hit needs the model's output behind the cached tokens, which is kept with the state."""
    engine, seen = watched_engine(dense)
    first = request("first", prompt(21), 7, **params)
    serve(engine, first)
    for num_cached, tokens in (
        (20, prompt(21)), (16, prompt(21)[:17] + prompt(5)), (27, first.tokens[:27] + prompt(3)), (8, prompt(21)[:9])
    ):  # fmt: skip
        seen.clear()
        one = request(f"hit {num_cached}", tokens, **params)
        serve(engine, one)
        (admitted,) = events(engine, one, EventKind.ADMITTED)
        assert admitted["cached_tokens"] == num_cached
        check_all_drafted(engine, seen, one)
        check_drafts(dense, seen)


def test_of_forks(dense):
    """Riders go on from one prompt: full pages are shared, the last one is copied, the newest token is their own."""
    for num_tokens in (7, 8):
        engine, seen = watched_engine(dense, batch_tokens=64)
        family = [request(f"f{i}", prompt(num_tokens), seed=3, n=4, temperature=1.5) for i in range(4)]
        for index, one in enumerate(family):
            one.seed += index
        engine.add(family[0], family[1:])
        run_all(engine)
        assert len({tuple(one.output_ids[:2]) for one in family}) > 1
        for one in family:
            check_all_drafted(engine, seen, one)
        check_drafts(dense, seen, at_least=8)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_after_preemption(dense, prefix_cache):
    engine, seen = watched_engine(dense, num_pages=14, prefix_cache=prefix_cache)
    everybody = [request(f"p{n}", prompt(n), 20, **DRAWN) for n in (9, 11, 14)]
    serve(engine, *everybody)
    put_back = [one for one in everybody if events(engine, one, EventKind.PREEMPTED)]
    assert put_back
    check_drafts(dense, seen, at_least=10)
    for one in put_back:
        kinds = [event.kind for event in engine.log.of(one.id)]
        after = kinds[len(kinds) - kinds[::-1].index(EventKind.PREEMPTED) :]
        assert EventKind.DRAFTS in after, "it is drafted for again"


def test_a_step_that_failed_leaves_no_entry_that_is_not_there(dense):
    """Of a page that the failed step took, the entry is gone with it. The next step has no room for drafts."""
    model = Wrapped(dense)
    engine, seen = watched_engine(model, batch_tokens=8, prefix_cache=False)
    one = request("one", prompt(6), 30, **DRAWN)
    engine.add(one)
    engine.step()
    while one.num_computed % engine.config.page_size:
        engine.step()

    def fail(output):
        raise RuntimeError("the machine hiccups")

    model.change = fail
    with pytest.raises(RuntimeError, match="hiccups"):
        engine.step()
    model.change = lambda output: output
    serve(engine, request("other", prompt(30), 2))
    assert len(one.output_ids) == 30
    check_drafts(dense, seen, at_least=10)


@pytest.mark.parametrize("params", [{}, DRAWN], ids=["greedy", "drawn"])
def test_a_head_that_overflows_costs_speed_alone(dense, params):
    """Its drafts are anything; then it recovers, though not for what it has seen of that time."""

    class Overflowing(Wrapped):
        def draft_hidden(self, step, hidden, memory):
            out, routing = super().draft_hidden(step, hidden, memory)
            return (torch.full_like(out, torch.nan) if 5 < self.num_head_calls < 20 else out), routing

    engine, seen = watched_engine(Overflowing(dense), prefix_cache=False)
    ours = [request(f"r{n}", prompt(n), 20, **params) for n in (5, 9)]
    serve(engine, *ours)
    assert [len(one.output_ids) for one in ours] == [20, 20] and len(seen) > 10
    if not params:
        assert [one.output_ids for one in ours] == [alone(dense, one)[0] for one in ours]


def test_no_entry_beyond_the_last_token(dense):
    """The first one is that of token 1, and a draft's own place is before the limit."""
    positions = []

    class Noting(Wrapped):
        def draft_hidden(self, step, hidden, memory):
            positions.append(step.positions.tolist())
            return super().draft_hidden(step, hidden, memory)

    engine, seen = watched_engine(Noting(dense), max_context=24)
    one = request("one", prompt(9), 15)
    serve(engine, one)
    check_all_drafted(engine, seen, one)
    assert max(map(max, positions)) < 24 and min(map(min, positions)) == 1


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_entries_of_a_step_that_fails_behind_the_head_do_not_count(dense, prefix_cache, monkeypatch):
    """The head has followed, then something raises, and the step is tried again: what it made must not be relied on."""
    engine, seen = watched_engine(dense, prefix_cache=prefix_cache)
    one, failures = request("one", prompt(9), 24), []
    learn = engine.drafting.learn

    def fail_now_and_then(*args):
        failures.append(len(failures) % 3 == 1)
        if failures[-1]:
            raise RuntimeError("behind the head")
        learn(*args)

    monkeypatch.setattr(engine.drafting, "learn", fail_now_and_then)
    engine.add(one)
    while engine.has_work:
        before = one.num_computed
        try:
            engine.step()
        except RuntimeError:
            table = engine.cache.tables[one.id]
            assert engine.cache.entries.num(table) <= before == one.num_computed
        engine.check()
    assert sum(failures) >= 3 and one.output_ids == alone(dense, one)[0]
    check_drafts(dense, seen)
