"""How many drafts a step has: chosen from acceptance and prices, or fixed; never more than can be of use."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
from faulty_drafts import ConstantScorer
from scripted_drafts import GoesOn, by_step, verified
from small_engine import (
    CONFIG,
    Scripted,
    ask,
    check_idle,
    check_story,
    make_engine,
    outputs,
    run_all,
    scripted_tokens,
    small_model,
)

from minserve.depth_choice import FIRST_REST_STEPS, SURE_STEPS
from minserve.engine_config import EngineConfig
from minserve.errors import InvalidValue
from minserve.events import EventKind
from minserve.request import Request, SamplingParams
from minserve.speculation.depth import Acceptance
from minserve.step_costs import CostTable

pytestmark = pytest.mark.usefixtures("shapes_unchecked")


def costs(per_token=0.1, per_draft=0.05) -> CostTable:
    return CostTable(lambda num_rows, num_tokens: 1.0 + per_token * num_tokens, lambda num_rows: per_draft)


def depths_of(engine, *requests) -> list[int]:
    """The depth of each step, until all are done."""
    for one in requests:
        engine.add(one)
    depths = []
    while engine.has_work:
        engine.step()
        depths.append(engine.drafting.depth)
    return depths


class Choice:
    """The depth of each step worked out again, from how many drafts each decoding row could have and what it kept."""

    def __init__(self, most, table):
        self.most, self.table, self.acceptance = most, table, Acceptance(most)
        self.step, self.num_idle, self.rests = 0, 0, {}  # by number of rows: (until when, how long)

    def depth(self, possible) -> int:
        self.step += 1
        until, length = self.rests.get(len(possible), (0, 32))
        if not any(possible) or self.step < until:
            return 0
        rates, speeds = self.acceptance.rates(), []
        for depth in range(self.most + 1):
            counts = [min(depth, count) for count in possible]
            tokens = sum(1 + sum(prod(rates[: i + 1]) for i in range(count)) for count in counts)
            draft_s = self.table.draft_s(sum(count > 0 for count in possible))
            speeds.append(tokens / (self.table.step_s(len(counts), len(counts) + sum(counts)) + depth * draft_s))
        best = next(depth for depth, speed in enumerate(speeds) if speed > max(speeds) * (1 - 1e-12))
        self.num_idle = 0 if best else self.num_idle + 1
        if self.num_idle == 8:
            self.rests[len(possible)], self.num_idle = (self.step + 2 * length, 2 * length), 0
        elif best and self.step > until + length:
            self.rests.pop(len(possible), None)
        return best


@pytest.mark.parametrize("num_right", [0, 1, 2, 100])
@pytest.mark.parametrize("per_token, per_draft", [(0.02, 0.0), (0.1, 0.05), (0.02, 0.5), (0.6, 0.1)])
def test_the_depth_follows_from_outcomes_and_prices(num_right, per_token, per_draft):
    """The same each time, and as it is worked out again from the log."""
    table, found = costs(per_token, per_draft), []
    for _ in range(2):
        choice, at, found_now = Choice(4, table), 0, []
        engine = make_engine(Scripted(), draft=GoesOn(num_right), draft_tokens=4, step_costs=table, batch_tokens=64)
        requests = [ask("a", 3, 50), ask("b", 5, 25), ask("c", 9, 12)]
        for one in requests:
            engine.add(one)
        while engine.has_work:
            decoding = [one for one, phase in engine.batcher.running.values() if phase.value == "decode"]
            left = [len(one.prompt_ids) + one.params.max_tokens - one.num_committed for one in decoding]
            engine.step()
            found_now.append(engine.drafting.depth)
            assert found_now[-1] == choice.depth([min(4, num - 1) for num in left])
            choice.acceptance.observe(by_step(engine)[at])
            at += 1
        assert outputs(requests) == {one.id: scripted_tokens(one) for one in requests}
        assert engine.drafting.acceptance.rates() == choice.acceptance.rates()
        found.append(found_now)
    assert found[0] == found[1]


def test_a_good_drafter_goes_deep_and_a_useless_one_is_switched_off():  # fault E17
    deepest = {}
    for num_right in (0, 100):
        engine = make_engine(Scripted(), draft=GoesOn(num_right), draft_tokens=4, step_costs=costs())
        deepest[num_right] = max(depths_of(engine, ask("a", 3, 40))[-6:])
    assert deepest == {0: 0, 100: 4}


def test_a_drafter_that_was_switched_off_is_tried_again():
    """For a step, each time after twice as long; and it is taken back when it has become good."""
    drafter = GoesOn(num_right=0)
    engine = make_engine(Scripted(), draft=drafter, draft_tokens=1, step_costs=costs(), num_pages=200,
                         max_context=700, model_config=replace(CONFIG, max_position_embeddings=700))  # fmt: skip
    one = ask("a", 3, 690)
    engine.add(one)
    tries, asked = [], []
    while len(one.output_ids) < 300:
        num = len(drafter.asked)
        engine.step()
        if engine.drafting.depth:
            tries.append(len(one.output_ids))
        if len(drafter.asked) > num:
            asked.append(len(one.output_ids))
    rests = [b - a - 1 for a, b in zip(asked, asked[1:], strict=False) if b - a > 1]
    assert rests == [FIRST_REST_STEPS - 1, 2 * FIRST_REST_STEPS - 1], "nobody is even asked meanwhile"
    first, second = [step for step in tries if step > 40]
    assert second - first == SURE_STEPS + 2 * FIRST_REST_STEPS
    drafter.num_right = 100
    while engine.has_work:
        engine.step()
    assert one.output_ids == scripted_tokens(one)
    assert sum(accepted for _, accepted in verified(engine)) > 30


def test_the_depth_on_request():
    """Always draft_tokens, whatever it costs and however useless it is."""
    drafter = GoesOn(num_right=0)
    engine = make_engine(Scripted(), draft=drafter, draft_tokens=3, adapt_drafts=False, step_costs=costs(5.0, 5.0))
    one = ask("a", 3, 30)
    depths = depths_of(engine, one)
    assert {*depths} == {3}
    left = [30 - len(tokens) + 3 for tokens, _ in drafter.asked]
    assert [most for _, most in drafter.asked] == [min(3, num - 1) for num in left]
    assert one.output_ids == scripted_tokens(one) and len(verified(engine)) == 28


def test_a_request_with_a_seed_that_samples_always_has_all_drafts():
    """Its neighbours have as many as pay: none. Which numbers it draws does not depend on them."""
    drafted = {}
    for name in ("alone", "beside others"):
        engine = make_engine(Scripted(), draft=GoesOn(0), draft_tokens=2, step_costs=costs(2.0, 2.0), batch_tokens=32)
        mine = ask("mine", 4, 20, temperature=1.0)
        others = [] if name == "alone" else [ask("greedy", 6, 20)]
        for i in range(0 if name == "alone" else 3):
            params = SamplingParams(max_tokens=20, temperature=float(i % 2), ignore_eos=True)
            others.append(Request(f"o{i}", ask("", 3 + i).prompt_ids, params, seed=i))
        depths = depths_of(engine, mine, *others)
        assert {*depths} == {0}
        assert all(not verified(engine, one.id) for one in others)
        drafted[name] = verified(engine, "mine")
    assert drafted["alone"] == drafted["beside others"] and {num for num, _ in drafted["alone"]} == {1, 2}


@pytest.mark.parametrize("max_tokens", range(1, 8))
@pytest.mark.parametrize("num_right", [0, 2, 100])
def test_no_draft_beyond_the_last_token(max_tokens, num_right):
    drafter = GoesOn(num_right)
    engine = make_engine(Scripted(), draft=drafter, draft_tokens=5, adapt_drafts=False, batch_tokens=32)
    one = ask("a", 3, max_tokens)
    engine.add(one)
    progress = run_all(engine)
    check_story(engine, [one], progress)
    assert one.output_ids == scripted_tokens(one) and one.finish_reason == "length"
    for tokens, most in drafter.asked:
        assert 1 <= most == min(5, max_tokens - (len(tokens) - 3) - 1)
    assert all(len(step.token_ids) <= 6 for step in progress)


@pytest.mark.parametrize("draft_tokens", [1, 2, 3, 9])
def test_no_page_beyond_the_limit_of_length(draft_tokens):  # fault B7
    engine = make_engine(
        Scripted(), draft=GoesOn(0), draft_tokens=draft_tokens, adapt_drafts=False, max_context=10, batch_tokens=32
    )
    one, most = ask("a", 8, 2), 0
    grow = engine.cache.grow

    def grow_and_see(table, stop):
        nonlocal most
        is_grown = grow(table, stop)
        most = max(most, len(table.pages))
        return is_grown

    engine.cache.grow = grow_and_see
    engine.add(one)
    run_all(engine)
    check_idle(engine)
    assert one.output_ids == scripted_tokens(one) and one.finish_reason == "length" and most <= 3


def test_drafts_take_what_is_left_of_the_budget():
    """Requests that are let in go first, and every row's own token does."""
    engine = make_engine(Scripted(), draft=GoesOn(), draft_tokens=3, adapt_drafts=False, batch_tokens=6)
    requests = [ask(f"r{i}", 4, 12) for i in range(3)] + [ask("late", 20, 3)]
    for one in requests:
        engine.add(one)
    run_all(engine)
    assert outputs(requests) == {one.id: scripted_tokens(one) for one in requests}
    sizes = [event.data["num_tokens"] for event in engine.log if event.kind is EventKind.STEP]
    assert max(sizes) == 6 and {num for num, _ in verified(engine)} == {1, 2}


# --- without a model, and on clocks


@pytest.mark.parametrize("adapt", [True, False])
def test_without_a_model(adapt):
    """Every token is 0: who looks that up is always right."""
    engine = make_engine(None, draft="ngram", adapt_drafts=adapt, step_costs=costs(), batch_tokens=32)
    requests = [ask("a", 6, 20), ask("b", 9, 15)]
    for one in requests:
        engine.add(one)
    progress = run_all(engine)
    check_story(engine, requests, progress)
    check_idle(engine)
    assert outputs(requests) == {"a": [0] * 20, "b": [0] * 15}
    assert len(verified(engine)) > 10
    assert all(drafted == accepted for drafted, accepted in verified(engine))


def test_without_a_model_wrong_drafts_are_lost():
    engine = make_engine(None, draft=GoesOn(), adapt_drafts=False, draft_tokens=2)
    one = ask("a", [1, 2, 3], 10)
    engine.add(one)
    run_all(engine)
    for tokens, (drafted, accepted) in zip((t for t, _ in engine.config.draft.asked), verified(engine), strict=True):
        drafts = [(3 * tokens[-1] + len(tokens) - 1) % 25]
        drafts.append((3 * drafts[0] + len(tokens)) % 25)
        kept = [0 if drafts[0] else 1 if drafted == 1 or drafts[1] else 2][0]
        assert accepted == kept
    assert one.output_ids == [0] * 10


def test_a_virtual_clock_counts_what_drafts_cost():
    """A step costs 1; 3 drafts of one row come to 3 x 0.25 more, as its row has room for them."""
    for drafter, per_step in ((GoesOn(), 1.75), ("none", 1.0)):
        engine = make_engine(
            Scripted(), draft=drafter, draft_tokens=3, adapt_drafts=False, step_costs=costs(0.0, 0.25), batch_tokens=32
        )
        one = ask("a", 4, 13)
        engine.add(one)
        run_all(engine)
        steps = [event.data["duration_s"] for event in engine.log if event.kind is EventKind.STEP]
        assert steps == [1.0] + [per_step] * (3 if drafter != "none" else 12)


def test_a_clock_that_stands_still_lets_drafts_go_on():
    """All prices are the same then, and a draft costs nothing."""
    engine = make_engine(Scripted(), draft=GoesOn(), draft_tokens=3, cost=lambda rows: 0.0, batch_tokens=32)
    one = ask("a", 4, 40)
    engine.add(one)
    run_all(engine)
    assert one.output_ids == scripted_tokens(one)
    assert len(verified(engine)) > 5 and max(drafted for drafted, _ in verified(engine)) == 3


# --- what is refused


def test_the_head_of_a_model_without_one_is_refused():
    with pytest.raises(InvalidValue, match="no MTP head.*EngineConfig.draft"):
        make_engine(small_model(), draft="mtp")


@pytest.mark.parametrize(
    "field, value",
    [("draft", "medusa"), ("draft", 3), ("draft", None), ("draft", object()), ("draft_tokens", 0),
     ("draft_tokens", True), ("draft_tokens", 2.0), ("draft_tokens", None), ("adapt_drafts", 1)],
)  # fmt: skip
def test_settings_that_cannot_be_are_refused(field, value):
    with pytest.raises(InvalidValue, match=field):
        EngineConfig(**{field: value})


@pytest.mark.parametrize("draft", ["none", "mtp", "ngram", GoesOn(), ConstantScorer([0.5, 0.5])], ids=str)
def test_drafters_that_can_be(draft):
    assert EngineConfig(draft=draft).draft is draft
