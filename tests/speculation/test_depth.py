"""How deep to draft: the most tokens per second, from what has been accepted, and what becomes of a useless drafter."""

from __future__ import annotations

import math
import random
from itertools import product

import pytest

from minserve.errors import InvalidValue
from minserve.speculation.depth import Acceptance, best_depth, expected_tokens


def tokens_by_outcomes(rates: list[float]) -> float:
    """The expected tokens of a step, over everything that may happen to its drafts."""
    total = 0.0
    for outcome in product([True, False], repeat=len(rates)):
        odds = math.prod(rate if kept else 1 - rate for rate, kept in zip(rates, outcome, strict=True))
        total += odds * (1 + next((i for i, kept in enumerate(outcome) if not kept), len(outcome)))
    return total


@pytest.mark.parametrize("seed", range(10))
def test_expected_tokens_are_those_of_all_outcomes(seed):
    draw = random.Random(seed)
    rates = [draw.random() for _ in range(seed)]
    assert expected_tokens(rates) == pytest.approx(tokens_by_outcomes(rates), rel=1e-12)


@pytest.mark.parametrize(
    "rate, tokens", [(0.65, (1.65, 2.07, 2.35)), (0.8, (1.8, 2.44, 2.95)), (0.9, (1.9, 2.71, 3.44))]
)
def test_equal_rates_give_the_formula_of_the_paper(rate, tokens):
    for depth, published in enumerate(tokens, start=1):
        found = expected_tokens([rate] * depth)
        assert found == pytest.approx((1 - rate ** (depth + 1)) / (1 - rate), rel=1e-12)
        assert abs(found - published) <= 0.005


@pytest.mark.parametrize("seed", range(40))
def test_the_best_depth_is_the_best_of_all(seed):
    """Costs here have steps, so that the second best is often nearer."""
    draw = random.Random(seed)
    rates, draft_cost = [draw.random() ** 0.3 for _ in range(draw.randrange(8))], draw.choice([0.0, 0.1, 0.3])
    costs = [1.0 + 0.5 * (d // 3) + 0.02 * d for d in range(len(rates) + 1)]
    speed = [tokens_by_outcomes(rates[:d]) / (costs[d] + d * draft_cost) for d in range(len(costs))]
    found = best_depth(rates, costs, draft_cost)
    assert speed[found] >= max(speed) * (1 - 1e-12)
    assert (
        found
        == best_depth(rates, lambda depth: costs[depth], draft_cost)
        == best_depth(rates, [*costs, 9.0], draft_cost)
    )


@pytest.mark.parametrize(
    "rates, costs, draft_cost, depth",
    [
        ([], [1.0], 0.0, 0),
        ([1.0, 1.0], [1.0, 1.0, 1.0], 0.0, 2),
        ([0.0, 1.0], [1.0, 1.0, 1.0], 0.0, 0),  # nothing is gained and nothing lost: the smallest
        ([0.3, 0.3], [1.0, 1.5, 2.0], 0.0, 0),  # a large batch: verification costs
        ([0.3, 0.3], [1.0, 1.0, 1.0], 0.5, 0),  # a dear drafter
        ([0.3, 0.3], [1.0, 1.0, 1.0], 0.0, 2),  # both free
        ([0.9, 0.2, 0.9], [1.0] * 4, 0.25, 1),  # i.i.d. at the mean rate of 2/3 would be worth two
        ([0.6, 0.9, 0.9, 0.9], [1.0, 1.7, 1.7, 1.7, 1.7], 0.0, 4),  # one does not pay, four do
    ],
)
def test_depths_that_are_known(rates, costs, draft_cost, depth):
    assert best_depth(rates, costs, draft_cost) == depth


@pytest.mark.parametrize(
    "rates, costs, draft_cost, said",
    [
        ([0.5, 1.5], [1.0] * 3, 0.0, r"acceptance\[1\]"),
        ([math.nan], [1.0] * 3, 0.0, r"acceptance\[0\]"),
        ([0.5, -0.1], [1.0] * 3, 0.0, r"acceptance\[1\]"),
        ([0.5, 0.5], [1.0] * 2, 0.0, r"len\(step_cost\)"),
        ([0.5, 0.5], [1.0, 0.0, 1.0], 0.0, "depth 1"),
        ([0.5, 0.5], [1.0, 1.0, math.nan], 0.0, "depth 2"),
        ([0.5], [1.0, math.inf], 0.0, "depth 1"),
        ([0.5], [1.0] * 2, -1.0, "draft_cost"),
        ([0.5], [1.0] * 2, math.nan, "draft_cost"),
    ],
)
def test_what_best_depth_refuses(rates, costs, draft_cost, said):
    with pytest.raises(InvalidValue, match=said):
        best_depth(rates, costs, draft_cost)


# --- what has been accepted


def outcome_of(draw: random.Random, rates: list[float], num_drafts: int) -> tuple[int, int]:
    """A row whose drafts are kept at these conditional rates."""
    kept = 0
    while kept < num_drafts and draw.random() < rates[kept]:
        kept += 1
    return num_drafts, kept


def test_rates_are_conditional():
    """A draft behind a rejection shows nothing; with nothing forgotten, rates are the plain counts."""
    acceptance = Acceptance(3, prior=0.5, prior_weight=1e-9, memory=1e12)
    acceptance.observe([(3, 0), (3, 1), (3, 2), (3, 3), (1, 1), (0, 0), (2, 2)])
    assert acceptance.rates() == pytest.approx([5 / 6, 3 / 4, 1 / 2])
    assert acceptance.proposed == [6, 4, 2] and acceptance.accepted == [5, 3, 1]
    acceptance.observe(iter([(3, 3)]))  # what can be read once is enough
    assert acceptance.accepted == pytest.approx([6, 4, 2])


@pytest.mark.parametrize("num_rows", [1, 8])
def test_it_learns_the_rates(num_rows):
    true, draw = [0.69, 0.78, 0.74], random.Random(1)
    acceptance = Acceptance(3, memory=2000)
    for _ in range(4000):
        acceptance.observe([outcome_of(draw, true, 3) for _ in range(num_rows)])
    assert acceptance.rates() == pytest.approx(true, abs=0.05)


def test_at_first_the_prior_stands():
    acceptance = Acceptance(2, prior=0.8, prior_weight=3)
    assert acceptance.rates() == pytest.approx([0.8, 0.8])
    acceptance.observe([(2, 0)])
    assert acceptance.rates() == pytest.approx([0.8 * 3 / 4, 0.8])


def test_what_is_long_ago_weighs_less():
    """The weights are a geometric series: after n steps, keep ** n; a step's rows are of one age."""
    acceptance, memory = Acceptance(1, prior=0.5, prior_weight=2, memory=10), 10
    outcomes = [[(1, 1), (1, 0)], [(1, 1)], [(0, 0)], [(1, 0)], [(1, 1), (1, 1)]]
    for outcome in outcomes:
        acceptance.observe(outcome)
    ages = [3, 2, None, 1, 0]  # a step that shows nothing makes nothing older
    weights = [(1 - 1 / memory) ** age if age is not None else 0 for age in ages]
    accepted = sum(w * sum(kept for _, kept in o) for w, o in zip(weights, outcomes, strict=True))
    proposed = sum(w * sum(drafts for drafts, _ in o) for w, o in zip(weights, outcomes, strict=True))
    assert acceptance.rates() == pytest.approx([(accepted + 1) / (proposed + 2)], rel=1e-12)


@pytest.mark.parametrize("retry_after", [1, 5, 20])
def test_a_depth_not_seen_for_a_while_is_judged_by_the_prior(retry_after):
    acceptance = Acceptance(2, prior=0.75, retry_after=retry_after)
    for _ in range(30):
        acceptance.observe([(2, 1)])
    (first, low), plain_steps = acceptance.rates(), 0
    assert first > 0.9 and low < 0.15
    while acceptance.rates()[1] != 0.75:
        acceptance.observe([(1, 1)])
        plain_steps += 1
    assert plain_steps == retry_after and acceptance.rates()[0] > 0.9
    acceptance.observe([(2, 0)])  # it shows nothing of the second draft
    assert acceptance.rates()[1] == 0.75
    acceptance.observe([(2, 1)])
    assert acceptance.rates()[1] < 0.15, "what was known is not forgotten"
    for _ in range(2 * retry_after):
        acceptance.observe([])
    assert acceptance.rates()[0] > 0.9, "the prior is no worse than what is known"


COSTS, DRAFT_COST = [1.0, 1.05, 1.1, 1.15], 0.15


def played(true: list[float], num_steps: int, acceptance: Acceptance, draw: random.Random) -> list[int]:
    """The depths that are chosen in these steps."""
    depths = []
    for _ in range(num_steps):
        depths.append(best_depth(acceptance.rates(), COSTS, DRAFT_COST))
        acceptance.observe([outcome_of(draw, true, depths[-1])])
    return depths


def test_a_useless_drafter_is_switched_off_and_asked_again():  # fault E17
    acceptance, draw = Acceptance(3, retry_after=50), random.Random(0)
    shuffled = played([0.02] * 3, 1000, acceptance, draw)
    tries = [step for step, depth in enumerate(shuffled) if depth > 0]
    later = [step for step in tries if step >= 15]
    assert shuffled[0] == 3 and len(tries) - len(later) <= 15
    assert {b - a for a, b in zip(later, later[1:], strict=False)} == {51}, "one step in so many, and no more"
    good = played([0.9] * 3, 2000, acceptance, draw)
    assert sum(d == 3 for d in good[-500:]) >= 490, "a drafter that has become good is taken back"
    assert played([0.9] * 3, 100, Acceptance(3), random.Random(0)) == played(
        [0.9] * 3, 100, Acceptance(3), random.Random(0)
    )


@pytest.mark.parametrize("outcome", [(1, 2), (3, 1), (-1, -1), (1, -1)])
def test_outcomes_that_cannot_be_are_refused(outcome):
    acceptance = Acceptance(2)
    with pytest.raises(InvalidValue, match="accepted"):
        acceptance.observe([(1, 1), outcome])
    assert acceptance.proposed == [0, 0] and acceptance.num_steps_since == [0, 0]


@pytest.mark.parametrize(
    "argument, value",
    [("most", -1), ("prior", 1.1), ("prior", math.nan), ("prior_weight", 0), ("prior_weight", math.inf),
     ("memory", 0.5), ("retry_after", 0)],
)  # fmt: skip
def test_arguments_out_of_range_are_refused(argument, value):
    with pytest.raises(InvalidValue, match=argument):
        Acceptance(**{"most": 2, argument: value})


@pytest.mark.parametrize("num_drafts", [[3], [0], [2, 2], [1, 0, 3], [0, 0, 0, 1], [3, 1, 2, 0, 3]])
@pytest.mark.parametrize("draft_cost", [0.0, 0.1, 0.4])
def test_rows_without_so_many_drafts_bring_no_more_tokens(num_drafts, draft_cost):
    rates = [0.7, 0.5, 0.9]
    cost = [1 + 0.05 * sum(min(depth, count) for count in num_drafts) for depth in range(4)]
    tokens_per_s = []
    for depth in range(4):
        tokens = 0.0
        for count in num_drafts:  # one token, and each draft with the chance that all up to it are kept
            reach = 1.0
            tokens += 1
            for at in range(min(depth, count)):
                reach *= rates[at]
                tokens += reach
        tokens_per_s.append(tokens / (cost[depth] + depth * draft_cost))
    wanted = tokens_per_s.index(max(tokens_per_s))
    assert best_depth(rates, cost, draft_cost, num_drafts) == wanted
    if set(num_drafts) == {3}:
        assert best_depth(rates, cost, draft_cost) == wanted
