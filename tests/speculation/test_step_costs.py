"""Prices: medians of what was seen, straight lines between sizes, and where a measurement is missing."""

from __future__ import annotations

import itertools
import math
import random
from statistics import median

import pytest
from faulty_drafts import ConstantScorer
from scripted_drafts import GoesOn, by_step, verified
from small_engine import CONFIG, Scripted, ask, make_engine, outputs, run_all, scripted_tokens

from minserve.depth_choice import PLAIN_EVERY
from minserve.events import EventKind
from minserve.request import Request, SamplingParams
from minserve.step_costs import ENOUGH, LATEST, LEAST_S, STALE_AFTER, CostTable, MeasuredCosts, like_size

pytestmark = pytest.mark.usefixtures("shapes_unchecked")


def seen(steps_s: dict[int, float]) -> MeasuredCosts:
    """Prices after ENOUGH steps of each of these sizes."""
    costs = MeasuredCosts()
    for size, seconds in steps_s.items():
        for _ in range(ENOUGH):
            costs.observe_step(size, seconds)
    return costs


def test_nothing_is_known_at_first():
    costs = MeasuredCosts()
    assert costs.step_s(1, 1) == costs.step_s(9, 90) == 1.0 and costs.draft_s(4) == 0.0
    assert all(costs.is_unknown(size) for size in (1, 5, 1000))


@pytest.mark.parametrize("size, price", [
    (1, 1.0), (2, 1.0), (3, 1.5), (4, 2.0), (5, 2.0), (8, 2.0), (10, 3.5), (12, 5.0), (16, 8.0), (17, 8.0), (99, 8.0),
])  # fmt: skip
def test_between_two_sizes_lies_a_straight_line(size, price):
    costs = seen({4: 2.0, 2: 1.0, 16: 8.0, 8: 2.0})
    for num_rows in (1, 3):
        assert costs.step_s(num_rows, size) == pytest.approx(price, rel=1e-12)


def test_sizes_that_are_nearly_the_same_are_one():
    """Of these at least one is measured ENOUGH times; up to a handful of tokens each is a size of its own."""
    assert [like_size(num) for num in range(1, 8)] == [*range(1, 8)]
    for num in range(1, 5000):
        assert abs(like_size(num) - num) <= num / 20 + 0.5 and like_size(like_size(num)) == like_size(num)
        assert like_size(num) <= like_size(num + 1)
    costs = MeasuredCosts()
    for size, seconds in zip((31, 32, 33), (1.0, 3.0, 2.0), strict=True):
        costs.observe_step(size, seconds)
    assert not costs.is_unknown(32) and costs.step_s(8, 32) == 2.0


def test_a_size_seen_too_seldom_decides_nothing():
    costs = seen({1: 1.0, 9: 3.0})
    for _ in range(ENOUGH - 1):
        costs.observe_step(5, 100.0)
    assert costs.step_s(1, 5) == 2.0 and costs.is_unknown(5)
    costs.observe_step(5, 100.0)
    assert costs.step_s(1, 5) == 100.0 and not costs.is_unknown(5)


def test_a_price_is_the_median_of_the_latest():
    draw, costs, times = random.Random(0), MeasuredCosts(), []
    for _ in range(40):
        times.append(draw.choice([0.01, 0.012, 0.011, 3.0]))  # now and then the machine does something else
        costs.observe_step(4, times[-1])
        if len(times) >= ENOUGH:
            assert costs.step_s(1, 4) == median(times[-LATEST:])


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 8, 20, 100])
def test_a_size_is_known_by_one_within_a_quarter(size):
    for other in range(1, 140):
        is_near = 0.8 * size <= like_size(other) <= 1.25 * size
        assert seen({other: 1.0}).is_unknown(size) != is_near, other


def test_what_was_long_ago_is_to_be_measured_again():
    """Its price is no price any more, until it has been seen often enough again; nor do the old times count then."""
    costs = seen({1: 1.0, 4: 2.0})
    for _ in range(STALE_AFTER - ENOUGH):
        costs.observe_step(4, 2.0)
    assert not costs.is_unknown(1) and costs.step_s(1, 1) == 1.0
    for _ in range(ENOUGH):
        costs.observe_step(4, 2.0)
        assert costs.is_unknown(1) and not costs.is_unknown(4) and costs.step_s(1, 1) == 2.0
    for number in range(1, ENOUGH + 1):
        costs.observe_step(1, 1.5)
        assert costs.is_unknown(1) == (number < ENOUGH) and costs.step_s(1, 1) == (2.0 if number < ENOUGH else 1.5)


def test_a_clock_that_stands_still_has_prices():
    costs = seen({1: 0.0, 4: 0.0})
    assert costs.step_s(1, 1) == costs.step_s(1, 2) == costs.step_s(1, 4) == LEAST_S


def test_the_price_of_a_draft_is_that_of_the_nearest_number_of_rows():
    costs = MeasuredCosts()
    for num_rows, seconds in ((1, 0.1), (8, 0.3), (32, 0.7)):
        for _ in range(ENOUGH):
            assert costs.draft_s(num_rows) != seconds
            costs.observe_drafts(num_rows, seconds)
    for num_rows in range(1, 100):
        nearest = min((1, 8, 32), key=lambda known: max(known / num_rows, num_rows / known))
        assert costs.draft_s(num_rows) == {1: 0.1, 8: 0.3, 32: 0.7}[nearest]
    for _ in range(LATEST):
        costs.observe_drafts(8, 0.5)
    assert costs.draft_s(8) == 0.5


def test_a_table_is_asked():
    table = CostTable(step_s=lambda num_rows, num_tokens: 100 * num_rows + num_tokens, draft_s=math.sqrt)
    assert table.step_s(2, 7) == 207 and table.draft_s(9) == 3


# --- as an engine measures them


def cost(rows) -> float:
    """A step of the model on the virtual clock."""
    return 1.0 + 0.05 * sum(stop - start for start, stop in rows)


def test_an_engine_learns_what_its_steps_cost():
    """Steps of decoding rows alone; of each new number of rows a few are plain ones, for their price."""
    engine = make_engine(Scripted(), draft=GoesOn(), draft_tokens=3, cost=cost, batch_tokens=64)
    plan, measured = engine.drafting.plan, []

    def plan_and_note(running):
        plan(running)
        measured.append((len(running), engine.drafting._is_measuring))

    engine.drafting.plan = plan_and_note
    for number in range(6):
        requests = [ask(("a", number), 4, 56), ask(("b", number), 5, 50)][: 2 - number % 2]
        for one in requests:
            engine.add(one)
        run_all(engine)
        assert outputs(requests) == {one.id: scripted_tokens(one) for one in requests}
    costs = engine.drafting.costs
    for num_tokens in (1, 2, 4, 8):
        assert costs.step_s(1, num_tokens) == pytest.approx(1.0 + 0.05 * num_tokens, rel=1e-12)
    plain = [step for step, (_, is_measuring) in enumerate(measured) if is_measuring]
    assert all([measured[step][0] for step in plain].count(num_rows) >= ENOUGH for num_rows in (1, 2))
    assert all((b - a) % PLAIN_EVERY == 0 for a, b in itertools.pairwise(plain))
    assert max(sum(num for num, _ in rows) for rows in by_step(engine)) == 6


def test_prompts_that_are_read_beside_others_do_not_count():
    engine = make_engine(Scripted(), draft=GoesOn(), cost=cost, batch_tokens=64)
    engine.add(ask("a", 4, 40))
    for _ in range(2):
        engine.step()
    engine.add(ask("long", 50, 2, index=0))
    run_all(engine)
    sizes = {e.data["num_tokens"] for e in engine.log if e.kind is EventKind.STEP and e.data["num_rows"] == 2}
    assert max(sizes) > 40 and engine.drafting.costs.is_unknown(max(sizes))
    assert engine.drafting.costs.step_s(1, 99) < 2.0


def test_beside_a_request_of_fixed_depth_nobody_waits_for_plain_steps():
    """Its rows have drafts in every step, so that none would ever be plain."""
    engine = make_engine(Scripted(), draft=GoesOn(), draft_tokens=3, cost=cost, batch_tokens=64)
    free = Request("free", [1, 2, 3], SamplingParams(max_tokens=41, ignore_eos=True), seed=3)
    engine.add(ask("seeded", 4, 41, temperature=1.0))
    engine.add(free)
    run_all(engine)
    assert verified(engine, "seeded") == verified(engine, "free") == [(3, 3)] * 10
    assert free.output_ids == scripted_tokens(free)


class Dear:
    """A drafter that takes time: a second for each call, on the engine's clock."""

    def __init__(self):
        self.clock, self.inner = None, ConstantScorer([1 / 26] * 26)

    def logits(self, contexts):
        self.clock.advance(1.0)
        return self.inner.logits(contexts)


def test_an_engine_learns_what_its_drafts_cost():
    """A second for each depth; and gives them up where they do not pay."""
    drafter = Dear()
    engine = make_engine(Scripted(), draft=drafter, draft_tokens=2, cost=cost, batch_tokens=64, model_config=CONFIG)
    drafter.clock = engine.log.clock
    one = ask("a", 4, 50)
    engine.add(one)
    run_all(engine)
    assert engine.drafting.costs.draft_s(1) == pytest.approx(1.0, rel=1e-12)
    assert engine.drafting.depth == 0 and one.output_ids == scripted_tokens(one)
    steps = [event.data["duration_s"] for event in engine.log if event.kind is EventKind.STEP]
    assert steps[-1] == pytest.approx(1.05, rel=1e-12), "a plain step costs no draft"


def test_a_drafters_first_look_at_a_text_is_none_of_its_prices():
    """A small model reads the whole prompt before its first draft: 10 s here, where another draft takes 0.1 s."""

    class SlowAtFirst:
        def logits(self, contexts):
            engine.log.clock.advance(10.0 if any(len(context) == 5 for context in contexts) else 0.1)
            return ConstantScorer([1.0] + [0.0] * 25).logits(contexts)

    engine = make_engine(Scripted(), draft=SlowAtFirst(), adapt_drafts=False, cost=cost, prefix_cache=False)
    for number, max_tokens in enumerate([4] * 5 + [3]):
        engine.add(ask(number, 4, max_tokens))
        run_all(engine)
    assert sum(event.kind is EventKind.DRAFTS for event in engine.log) == 11
    assert engine.drafting.costs.draft_s(1) == pytest.approx(0.1, rel=1e-9)
