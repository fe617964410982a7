"""How many drafts a step asks for: by the rows that have some, with rests where none pays, each twice as long."""

from __future__ import annotations

import pytest

from minserve.depth_choice import FIRST_REST_STEPS, LONGEST_REST_STEPS, SURE_STEPS, DepthChoice
from minserve.step_costs import ENOUGH, STALE_AFTER, CostTable, MeasuredCosts

FLAT = CostTable(step_s=lambda rows, tokens: 1.0, draft_s=lambda rows: 0.0)
STEEP = CostTable(step_s=lambda rows, tokens: float(tokens), draft_s=lambda rows: 0.5)


def steps(choice: DepthChoice, num_drafts: list[int], num: int, outcome=None) -> list[int]:
    """The depth of each of so many steps; `outcome` is what became of each step's drafts."""
    depths = []
    for _ in range(num):
        depths.append(0 if choice.begin_step(len(num_drafts)) else choice.choose(num_drafts))
        if outcome and depths[-1]:
            choice.acceptance.observe([outcome(min(depths[-1], count)) for count in num_drafts])
        else:
            choice.acceptance.observe([(0, 0)])
    return depths


def test_where_drafts_cost_nothing_all_are_made_and_where_tokens_do_none():
    assert steps(DepthChoice(3, FLAT), [3, 3], 4) == [3] * 4
    assert steps(DepthChoice(3, STEEP), [3, 3], 4) == [0] * 4


def test_what_pays_depends_on_the_rows_that_have_drafts():
    """A draft costs a fifth of a step here, and each verified token a tenth of one. Prior rates: .75 at each depth."""
    costs = CostTable(step_s=lambda rows, tokens: 1 + 0.1 * (tokens - rows), draft_s=lambda rows: 0.2)
    assert DepthChoice(3, costs).choose([3]) == 2  # 1.75 / 1.3 = 1.346, 2.3125 / 1.6 = 1.445, 2.734 / 1.9 = 1.439
    assert DepthChoice(3, costs).choose([1]) == 1  # a deeper one would wait for drafts that do not exist
    # 1 of 4 rows: 4.75 / 1.3 = 3.65, 5.31 / 1.6 = 3.32 and 5.73 / 1.9 = 3.02, all below 4 tokens at the price of 1.
    assert DepthChoice(3, costs).choose([3, 0, 0, 0]) == 0


def test_nothing_to_draft_is_no_sign_that_drafts_do_not_pay():
    choice = DepthChoice(3, FLAT)
    assert steps(choice, [0, 0], 3 * SURE_STEPS) == [0] * 3 * SURE_STEPS
    assert not choice.is_resting and choice.choose([3, 3]) == 3


def test_it_rests_once_it_is_sure_and_each_time_twice_as_long():
    choice, time, began = DepthChoice(3, STEEP), 0, []
    rested = False
    while len(began) < 7:
        time += 1
        now = choice.begin_step(1)
        if not now:
            choice.choose([3])
        if now and not rested:
            began.append(time)
        rested = now
    gaps = [after - before for before, after in zip(began, began[1:], strict=False)]
    lengths = [min(FIRST_REST_STEPS * 2**i, LONGEST_REST_STEPS) for i in range(6)]
    assert gaps == [length - 1 + SURE_STEPS for length in lengths] and lengths[-1] == LONGEST_REST_STEPS


def test_a_bad_step_or_two_is_no_reason_to_rest():
    choice = DepthChoice(1, CostTable(step_s=lambda rows, tokens: prices[tokens], draft_s=lambda rows: 0.0))
    prices = {1: 1.0, 2: 1.0}
    for _ in range(5):
        prices[2] = 3.0
        assert steps(choice, [1], SURE_STEPS - 1) == [0] * (SURE_STEPS - 1)
        prices[2] = 1.0
        assert steps(choice, [1], 1) == [1] and not choice.is_resting


def test_a_batch_of_another_size_has_rests_of_its_own():
    costs = CostTable(step_s=lambda rows, tokens: 1.0 if rows == 1 else float(tokens), draft_s=lambda rows: 0.0)
    choice = DepthChoice(2, costs)
    steps(choice, [2] * 32, SURE_STEPS)
    assert choice.begin_step(32) and not choice.begin_step(1) and choice.choose([2]) == 2 and choice.begin_step(32)
    choice.begin_step(1)
    assert not choice.is_resting
    assert not choice.begin_step(0), "prompts alone: as the last decoding rows had it"


def test_when_drafts_have_paid_for_a_while_the_next_rest_is_a_short_one_again():
    prices = {1: 1.0, 2: 3.0}
    choice = DepthChoice(1, CostTable(step_s=lambda rows, tokens: prices[tokens], draft_s=lambda rows: 0.0))
    assert steps(choice, [1], SURE_STEPS + FIRST_REST_STEPS - 1) == [0] * (SURE_STEPS + FIRST_REST_STEPS - 1)
    prices[2] = 1.0
    assert steps(choice, [1], FIRST_REST_STEPS + 2) == [1] * (FIRST_REST_STEPS + 2)
    prices[2] = 3.0
    steps(choice, [1], SURE_STEPS)
    assert sum(choice.begin_step(1) for _ in range(10 * FIRST_REST_STEPS)) == FIRST_REST_STEPS - 1


@pytest.mark.parametrize("table, wants", [(True, False), (False, True)])
def test_a_plain_step_is_wanted_where_its_price_is_not_known(table, wants):
    choice = DepthChoice(2, FLAT if table else MeasuredCosts())
    assert choice.wants_plain_step(1) == wants
    if not table:
        for _ in range(ENOUGH):
            choice.costs.observe_step(1, 0.01)
        assert not choice.wants_plain_step(1) and choice.wants_plain_step(8)
        for _ in range(STALE_AFTER + 1):
            choice.costs.observe_step(3, 0.01)
        assert choice.wants_plain_step(1), "that was long ago, and machines have moods"


def test_a_head_that_is_never_right_drafts_ever_more_seldom():
    costs = CostTable(step_s=lambda rows, tokens: 1 + 0.1 * (tokens - rows), draft_s=lambda rows: 0.2)
    choice = DepthChoice(3, costs)
    depths = steps(choice, [3], 4000, outcome=lambda drafts: (drafts, 0))
    tried = [step for step, depth in enumerate(depths) if depth]
    assert depths[0] == 2 and tried[:7] == list(range(7)), "until it is known how bad it is"
    gaps = [after - before for before, after in zip(tried[6:], tried[7:], strict=False)]
    assert len(gaps) == 5 and all(after > 1.8 * before for before, after in zip(gaps, gaps[1:], strict=False))


def test_a_draft_is_priced_for_the_rows_that_have_one():
    asked = []
    costs = CostTable(step_s=lambda rows, tokens: 1.0, draft_s=lambda rows: asked.append(rows) or 0.0)
    DepthChoice(3, costs).choose([3, 0, 1, 0])
    assert asked == [2]
