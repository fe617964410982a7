"""The MTP head's drafts out of pages are those of the head run over the whole text, however the text got there."""

from __future__ import annotations

import pytest
import torch
from small_engine import alone, run_all
from watched_drafts import (
    Wrapped,
    check_all_drafted,
    check_drafts,
    request,
    serve,
    watched_engine,
)

from minserve import depth_choice
from minserve.depth_choice import SURE_STEPS
from minserve.events import EventKind
from minserve.step_costs import CostTable

pytestmark = pytest.mark.usefixtures("shapes_unchecked")
DRAWN = {"temperature": 2.0}


def prompt(num_tokens: int, salt: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * salt + num_tokens)
    return torch.randint(0, 256, (num_tokens,), generator=generator).tolist()


def events(engine, one, kind):
    return [event.data for event in engine.log.of(one.id) if event.kind is kind]


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


# --- not drafting


class Prices:
    """Costs that can be turned: drafts are free, or they cost more than a step."""

    def __init__(self):
        self.draft_s = 0.0

    def table(self) -> CostTable:
        return CostTable(lambda num_rows, num_tokens: 1.0, lambda num_rows: self.draft_s)


REST_STEPS = 24


@pytest.fixture
def prices(monkeypatch):
    monkeypatch.setattr(depth_choice, "NO_REST", (0, REST_STEPS // 2))  # twice as long when it rests
    return Prices()


def serve_until_it_drafts(engine, seen) -> None:
    """Serve others until the rest is over, and forget their drafts."""
    for number in range(9):
        if not seen:
            serve(engine, request(f"{len(engine.log)} {number}", prompt(3, number), 20))
    assert seen
    seen.clear()


def test_where_drafts_do_not_pay_the_head_is_not_run(dense, prices):
    model = Wrapped(dense)
    prices.draft_s = 2.0
    engine, seen = watched_engine(model, adapt_drafts=True, step_costs=prices.table())
    serve(engine, *(request(f"r{n}", prompt(n), 12) for n in (5, 9)))
    assert engine.drafting.depth == 0 and not seen
    assert 0 < model.num_head_calls <= 1 + SURE_STEPS, "it looks on for a few steps, and makes no draft"
    model.num_head_calls = 0
    serve(engine, request("off", prompt(9), 12), request("off, too", prompt(7), 12))
    assert not seen and model.num_head_calls == 0
    prices.draft_s = 0.0
    serve_until_it_drafts(engine, seen)
    one = request("later", prompt(12), 20)
    serve(engine, one)
    check_all_drafted(engine, seen, one)
    check_drafts(dense, seen)


def test_a_request_once_not_followed_is_not_drafted_for_any_more(dense, prices):
    engine, seen = watched_engine(dense, adapt_drafts=True, step_costs=prices.table(), prefix_cache=False)
    old, new = request("old", prompt(9), 60), request("new", prompt(6), 8)
    engine.add(old)
    while len(old.output_ids) < 10:
        engine.step()
    before = len(seen)
    assert before
    prices.draft_s = 2.0
    for _ in range(SURE_STEPS + REST_STEPS):
        engine.step()
    prices.draft_s = 0.0
    engine.add(new)
    run_all(engine)
    assert {one.request for one in seen[before:]} == {new}
    check_drafts(dense, seen)
    assert old.output_ids == alone(dense, old)[0]


def test_a_request_that_the_head_looked_on_at_is_drafted_for_again(dense, prices):
    engine, seen = watched_engine(dense, adapt_drafts=True, step_costs=prices.table(), prefix_cache=False)
    one = request("one", prompt(9), 60, **DRAWN)
    engine.add(one)
    for num_before, num_steps_off in ((2, 1), (5, SURE_STEPS - 1)):
        while len(seen) < num_before and engine.has_work:
            engine.step()
        prices.draft_s, before = 2.0, len(seen)
        for _ in range(num_steps_off):
            engine.step()
        assert len(seen) == before
        prices.draft_s = 0.0
        engine.step()
        assert len(seen) == before + 1
    run_all(engine)
    check_drafts(dense, seen)


def test_drafting_resumes_only_where_the_whole_prefix_has_entries(dense, prices):
    """The first 16 tokens are read with drafts on, the next 16 while the head rests. Others start behind either."""
    engine, seen = watched_engine(dense, adapt_drafts=True, step_costs=prices.table())
    start, middle = prompt(17), prompt(17) + prompt(16, 1)
    serve(engine, request("start", start, 1))
    prices.draft_s = 2.0
    serve(engine, request("until the head rests", prompt(3), SURE_STEPS + 2))
    serve(engine, request("middle", middle, 1))
    assert not seen
    prices.draft_s = 0.0
    serve_until_it_drafts(engine, seen)
    for name, tokens, least_cached, is_drafted in (
        ("shallow", start[:16] + prompt(9, 2), 16, True),
        ("deep", middle[:32] + prompt(9, 3), 24, False),
        ("deep again", middle[:32] + prompt(9, 3) + [7], 32, False),
        ("shallow again", start[:16] + prompt(9, 2) + [7], 24, True),
    ):
        one = request(name, tokens)
        seen.clear()
        serve(engine, one)
        (admitted,) = events(engine, one, EventKind.ADMITTED)
        assert admitted["cached_tokens"] >= least_cached
        assert bool(seen) == is_drafted, name
        if is_drafted:
            check_all_drafted(engine, seen, one)
            check_drafts(dense, seen)


def test_who_changes_over_to_pages_without_entries_is_not_drafted_for(dense, prices):
    """Who wants his prompt scored reads it anew, and then holds the tree's pages of the same tokens, not his own."""
    engine, seen = watched_engine(dense, adapt_drafts=True, step_costs=prices.table())
    prices.draft_s = 2.0
    serve(engine, request("until the head rests", prompt(3), SURE_STEPS + 2))
    serve(engine, request("first", prompt(21), 1))
    prices.draft_s = 0.0
    serve_until_it_drafts(engine, seen)
    serve(engine, request("same", prompt(21), prompt_logprobs=0))
    assert not seen
    other = request("other", prompt(22), prompt_logprobs=0)
    serve(engine, other)
    check_all_drafted(engine, seen, other)
    check_drafts(dense, seen)


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
