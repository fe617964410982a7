"""What a whole engine draws with drafts has the distribution of plain steps, whoever drafts.

Joint counts of four or five tokens, of 20,000 requests with seeds 0 to 19,999: the first token comes from a plain step,
the others from steps with up to three drafts. Chi-square rejects at p < 1e-3; the seeds are fixed, so every run gives
the same. Verification that is wrong in one of the known ways is rejected by the same statistic, at p < 1e-9, on fewer
requests.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import pytest
from scripted_chain import PARAMS, PROMPT, VOCAB, ChainScorer, Uneven, distribution, drawn, odds, p_value, tables

from minserve import choosing, drafting
from minserve.events import EventKind
from minserve.parts import Parts
from minserve.request import SamplingParams
from minserve.sampling import Stream, choose, uniform

pytestmark = pytest.mark.usefixtures("shapes_unchecked")
NUM_SAMPLES, NUM_WRONG = 20_000, 2_000
DRAFTERS = {
    "none": ("none", {}),
    "ngram": ("ngram", {}),
    "uneven": (Uneven(), {"draft_tokens": 3, "params": replace(PARAMS, max_tokens=5)}),
    "scorer": (ChainScorer(tables()[1]), {}),
    "mtp": ("mtp", {}),
}


def drafts_of(log) -> list[tuple[int, int]]:
    """(drafted, accepted) of each row of each step that had some."""
    return [(e.data["drafted"], e.data["accepted"]) for e in log if e.kind is EventKind.DRAFTS]


@pytest.mark.parametrize("name", DRAFTERS)
def test_an_engine_draws_from_the_distribution(name):  # fault E5; DIST
    draft, config = DRAFTERS[name]
    counts, log = drawn(draft, NUM_SAMPLES, **config)
    assert counts.total() == NUM_SAMPLES and p_value(counts, odds(config.get("params", PARAMS))) > 1e-3
    drafts = drafts_of(log)
    if name == "none":
        assert not drafts
        return
    assert len(drafts) > NUM_SAMPLES / 3
    for drafted in {drafted for drafted, _ in drafts}:
        assert {kept for num, kept in drafts if num == drafted} == {*range(drafted + 1)}, "some of each are kept"
    assert {drafted for drafted, _ in drafts} == ({1, 2, 3} if name == "uneven" else {1, 2})


def test_drafts_that_are_drawn_are_kept_as_often_as_can_be():  # fault E7
    """Of a first draft, sum min(p, q) are kept: no bias, and no acceptance given away either."""
    p, q = tables()
    wanted = 0.0
    for first, odd in enumerate(distribution(p[PROMPT[-2:]].tolist(), PARAMS)):
        of_p, of_q = (distribution(table[PROMPT[-1], first].tolist(), PARAMS) for table in (p, q))
        wanted += odd * sum(map(min, of_p, of_q))
    _, log = drawn(ChainScorer(q), NUM_WRONG, draft_tokens=1)
    first_steps = {event.request_id: event.data["accepted"] for event in reversed([*log]) if "drafted" in event.data}
    spread = (wanted * (1 - wanted) / NUM_WRONG) ** 0.5
    assert len(first_steps) == NUM_WRONG
    assert abs(sum(first_steps.values()) / NUM_WRONG - wanted) < 4 * spread


def verified(p, drafts, q, accept_u, sample_u, rest, bonus):
    """Verification of a row, with the two places where it can be wrong left open."""
    for i, draft in enumerate(drafts):
        if accept_u[i] * q[i, draft] >= p[i, draft]:
            return [*drafts[:i], int(choose(rest(p[i], q[i]), sample_u))]
    return [*drafts, int(choose(bonus(p, q), sample_u))]


def residual(p, q):
    return (p - q).clamp(min=0)


def behind(p, q):
    return p[-1]


def verify_by(rest=residual, bonus=behind):
    return Parts(verify=lambda *row: verified(*row, rest, bonus))


def test_the_statistic_lets_a_right_verification_pass():
    assert p_value(drawn("mtp", NUM_WRONG, verify_by())[0], odds()) > 1e-3


@pytest.mark.parametrize(
    "rest, bonus",
    [(lambda p, q: p, behind), (lambda p, q: q, behind), (residual, lambda p, q: q[-1]), (residual, lambda p, q: p[0])],
    ids=["resampled from p", "resampled from q", "bonus from q", "bonus from the first p"],
)
def test_the_statistic_rejects_a_wrong_verification(rest, bonus):  # fault E5
    assert p_value(drawn("mtp", NUM_WRONG, verify_by(rest, bonus))[0], odds()) < 1e-9


def test_the_statistic_rejects_argmax_drafts_with_the_softmax_as_q(monkeypatch):  # fault E5
    monkeypatch.setattr(drafting, "choose", lambda q, u: q.argmax(-1))
    assert p_value(drawn("mtp", NUM_WRONG)[0], odds()) < 1e-9


@pytest.mark.parametrize(
    "used, instead", [(Stream.DRAFT, Stream.ACCEPT), (Stream.ACCEPT, Stream.RESAMPLE)], ids=lambda s: s.name
)
def test_the_statistic_rejects_a_random_number_used_twice(monkeypatch, used, instead):
    def mixed_up(seed, position, stream):
        return uniform(seed, position, used if stream == instead else stream)

    monkeypatch.setattr(choosing, "uniform", mixed_up)
    assert p_value(drawn("mtp", NUM_WRONG)[0], odds()) < 1e-9


def test_what_cannot_come_must_not_come():
    counts, wanted = drawn("none", 200)[0], odds()
    assert sum(wanted.values()) == pytest.approx(1, abs=1e-12) and p_value(counts, wanted) > 1e-3
    counts[next(output for output in product(range(VOCAB), repeat=4) if not wanted[output])] += 1
    assert p_value(counts, wanted) == 0.0


def test_the_order_of_the_filters():  # fault E15
    """Top_k leaves 0.85, of which the first three have 0.94; of all, they have 0.80."""
    scores = [math.log(x) for x in (0.35, 0.25, 0.20, 0.05, 0.03, 0.04, 0.04, 0.04)]
    params = SamplingParams(temperature=1, top_k=4, top_p=0.82)
    wanted = [0.35 / 0.8, 0.25 / 0.8, 0.20 / 0.8, 0, 0, 0, 0, 0]
    assert distribution(scores, params) == pytest.approx(wanted, abs=1e-12)
