"""The equivalence matrix: every route to a token gives the same tokens, and the same numbers to 1e-9.

In float64 a request's answer is its own. It does not depend on who runs beside it, how its prompt was cut, how large
pages are, whether it was thrown out and computed again, or whether it shares a prompt with a fork. The answer to
compare with is what the request gets by itself, through the plain loop, without any of these.
"""

from __future__ import annotations

from itertools import product

import pytest
from covering import all_pairs, covering_rows, pairs_of
from log_rules import cached_tokens, check_slices, check_steps, forked_ids, preempted_ids, verified
from routes import FACTORS, LENGTHS, problems, routes, run

ROUTES = tuple(routes())


@pytest.mark.parametrize("route", ROUTES, ids=str)
def test_the_route_gives_what_each_request_gets_alone(route, alone):  # REF, CONS, PROG; faults A10, A11, B4, D10, J1
    ran = run(route, alone)
    assert not problems(route, ran, alone)
    log = ran.engine.log
    check_steps(log, ran.engine.config.batch_tokens)
    for request_id in log.request_ids:
        check_slices(log, request_id)
    forked = forked_ids(log)
    assert bool(forked) == (route.levels["outputs"] > 1)
    company, preempted = route.levels["company"], preempted_ids(log)
    assert bool(preempted) == (company == "preempted")
    if company == "preempted" and forked:
        assert preempted & forked, "no fork was preempted"
    check_hits(route, log)
    check_drafts(route, log)


def check_hits(route, log):
    """Tokens are reused where they can be, and only there: nobody reuses what has to be scored."""
    has_cache = route.levels["prefix_cache"] and not route.levels["scored"]
    hits = cached_tokens(log)
    if not has_cache:
        assert not any(hits)
    elif route.levels["prompts"] != "unlike":
        assert any(not hit for hit in hits)
        # Else those who run have the slots, or the pages.
        has_room = route.levels["states"] == "many" and route.levels["company"] != "preempted"
        alone = route.levels["company"] == "alone"
        assert sum(hits) >= (
            sum(route.lengths) / 2 if has_room and alone else len(route.lengths) if has_room else alone
        )


def check_drafts(route, log):
    """Drafts are verified where a step has room for some; some are kept, and of many some are not."""
    levels, counts = route.levels, verified(log)
    num_drafted, num_kept = (sum(column) for column in zip(*counts, strict=True)) if counts else (0, 0)
    assert all(0 < drafted <= levels["draft_tokens"] for drafted, _ in counts)
    if levels["draft"] == "none" or levels["batch_tokens"] == 1:
        assert not counts
    # Measured prices may long be unknown, where most steps read a prompt, too; and n-grams must have occurred before.
    elif levels["depth"] != "as measured" and (levels["draft"] != "ngram" or levels["prompts"] == "continued"):
        assert 0 < num_kept < num_drafted or 0 < num_kept == num_drafted < 20


def test_every_two_levels_meet_and_every_length_meets_every_level():
    met = set().union(*(pairs_of(route.levels) for route in ROUTES))
    assert all_pairs(FACTORS, lambda row: True).keys() <= met
    assert sorted(LENGTHS) == list(range(1, 41))
    for length, (name, levels) in product(LENGTHS, FACTORS.items()):
        assert {route.levels[name] for route in ROUTES if length in route.lengths} == set(levels), (length, name)


def test_rows_are_few_and_impossible_ones_are_left_out():
    factors = {"a": (1, 2, 3), "b": (1, 2, 3), "c": (1, 2), "d": (1, 2)}
    rows = covering_rows(factors, lambda row: (row.get("a"), row.get("b")) != (1, 1))
    assert len(rows) < 14 and all((row["a"], row["b"]) != (1, 1) for row in rows)
    met = set().union(*map(pairs_of, rows))
    assert len(met) == 3 * 3 - 1 + 2 * (3 * 2 + 3 * 2) + 2 * 2
