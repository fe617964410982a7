"""When the MTP head is not run, and for whom it may draft afterwards: only where all entries are there."""

from __future__ import annotations

import pytest
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

from minserve import depth_choice
from minserve.depth_choice import SURE_STEPS
from minserve.events import EventKind
from minserve.step_costs import CostTable

pytestmark = pytest.mark.usefixtures("shapes_unchecked")


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
    assert not seen and model.num_head_calls == 1, "the two prompts, read together"
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
    """The first 16 tokens are read with drafts on, 16 are made while the head rests. Others start behind either."""
    engine, seen = watched_engine(dense, adapt_drafts=True, step_costs=prices.table())
    start, writer = prompt(17), request("middle", prompt(17), 17)
    serve(engine, request("start", start, 1))
    prices.draft_s = 2.0
    serve(engine, request("until the head rests", prompt(3), SURE_STEPS + 2))
    serve(engine, writer)
    middle = writer.tokens[:33]
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
    first = request("first", prompt(5), 17)
    serve(engine, first)
    prices.draft_s = 0.0
    serve_until_it_drafts(engine, seen)
    serve(engine, request("same", first.tokens[:21], prompt_logprobs=0))
    assert not seen
    other = request("other", prompt(22), prompt_logprobs=0)
    serve(engine, other)
    check_all_drafted(engine, seen, other)
    check_drafts(dense, seen)


def test_a_prompt_that_is_read_while_the_head_rests_is_good_for_those_who_share_it(dense, prices):
    engine, seen = watched_engine(dense, adapt_drafts=True, step_costs=prices.table())
    prices.draft_s = 2.0
    serve(engine, request("until the head rests", prompt(3), SURE_STEPS + 2))
    serve(engine, request("meanwhile", prompt(21), 2))
    prices.draft_s = 0.0
    serve_until_it_drafts(engine, seen)
    later = request("later", prompt(21) + prompt(4, 1))
    serve(engine, later)
    assert events(engine, later, EventKind.ADMITTED)[0]["cached_tokens"] >= 16
    check_all_drafted(engine, seen, later)
    check_drafts(dense, seen)
