"""Faults of speculation: each is put in and seen, by the measure it was found by, and the library is free of it."""

from __future__ import annotations

from fractions import Fraction
from functools import partial

import pytest
import torch
from exact_odds import emitted, first_tokens, mean_accepted, plain
from faulty_drafts import (
    ConstantScorer,
    KnowsTheAnswer,
    acceptance,
    constant_engine,
    counted,
    cut_by_length_first,
    drop_the_bonus,
)
from scripted_chain import NoText
from small_engine import alone
from watched_drafts import request, watched_engine

from minserve import choosing, drafting
from minserve.events import EventKind
from minserve.model.evaluate import WholeText, whole_step
from minserve.parts import verify_row_by_row
from minserve.request import Request, SamplingParams
from minserve.sampling import Stream, filter_probs, token_logprobs
from minserve.speculation.verify import verify
from minserve.stopping import StopChecker

pytestmark = pytest.mark.usefixtures("shapes_unchecked")
STOP = 99


@pytest.mark.parametrize("max_tokens", range(1, 8))
@pytest.mark.parametrize("stop_at", range(8))
def test_the_first_end_of_a_run_counts(max_tokens, stop_at):  # fault E1
    run = [10, 11, 12, 20, 21, 22]
    run[stop_at : stop_at + 1] = [STOP] if stop_at < 6 else []
    checker = StopChecker(SamplingParams(max_tokens=max_tokens, stop_token_ids=[STOP]), NoText())
    num_kept, _, reason = checker.push(run)
    wanted = [], None
    for token in run:  # had they come one by one
        if wanted[1] is None:
            kept = [*wanted[0], token]
            wanted = kept, "stop" if token == STOP else "length" if len(kept) == max_tokens else None
    assert (run[:num_kept], reason) == wanted
    leaks = stop_at < max_tokens <= len(run)
    assert (cut_by_length_first(run, max_tokens, {STOP}) != wanted) == leaks


# --- E5, E7: what drafts were drawn from

P, Q = (0.3, 0.5, 0.2), (0.6, 0.2, 0.2)
P10, Q10, ARGMAX10 = [[3, 5, 2]] * 3, [[6, 2, 2]] * 3, [[10, 0, 0]] * 3  # in tenths, for the exact odds


def on_a_grid(monkeypatch):
    """Give request i the i-th point of a grid of 10 x 10 x 10 random numbers: counts are then exact odds."""
    places = {Stream.DRAFT: 0, Stream.ACCEPT: 1, Stream.RESAMPLE: 2}

    def of_grid(seed, position, stream=Stream.SAMPLE):
        return (seed // 10 ** places[stream] % 10 + 0.5) / 10 if stream in places else 0.5

    for module in (drafting, choosing):
        monkeypatch.setattr(module, "uniform", of_grid)


def second_tokens(monkeypatch) -> tuple[list[Fraction], Fraction]:
    """The exact odds of the token behind a draft from Q, by a whole engine; and how often the draft was kept."""
    on_a_grid(monkeypatch)
    engine = constant_engine(P, ConstantScorer(Q))
    requests = [Request(i, [0], SamplingParams(max_tokens=3, temperature=1), i) for i in range(1000)]
    for one in requests:
        engine.add(one)
    for _ in range(2):
        engine.step()
    found = [one.output_ids[1] for one in requests]
    kept = sum(counted(engine, EventKind.DRAFTS, "accepted"))
    assert counted(engine, EventKind.DRAFTS, "drafted") == [1] * 1000
    return [Fraction(found.count(token), 1000) for token in range(3)], Fraction(kept, 1000)


def test_drafts_drawn_from_q(monkeypatch):  # faults E5, E7
    odds, kept = second_tokens(monkeypatch)
    assert odds == [Fraction(3, 10), Fraction(5, 10), Fraction(2, 10)] and kept == Fraction(7, 10)
    assert first_tokens(emitted(P10, Q10, Q10, 1, 10, 30), P10, 2) == plain(P10, 2)


def test_argmax_drafts_taken_for_drawn_ones(monkeypatch):  # fault E5
    monkeypatch.setattr(drafting, "choose", lambda q, u: q.argmax(-1))
    odds, kept = second_tokens(monkeypatch)
    assert odds == [Fraction(1, 2), Fraction(1, 2), 0] and kept == Fraction(1, 2)
    wrong = first_tokens(emitted(P10, ARGMAX10, Q10, 1, 10, 30), P10, 1)
    assert wrong == {(0,): Fraction(1, 2), (1,): Fraction(1, 2)}


def test_argmax_drafts_are_one_hot():  # fault E5
    odds = emitted(P10, ARGMAX10, None, 1, 10, 70)
    assert first_tokens(odds, P10, 2) == plain(P10, 2) and mean_accepted(odds) == Fraction(3, 10)


def test_drawn_drafts_taken_for_one_hot_ones(monkeypatch):  # fault E7
    """No bias, and fewer drafts are kept: 0.32 of them instead of 0.70."""

    def without_q(p, draft_ids, q, *rest):
        return verify(p, draft_ids, None, *rest)

    odds = emitted(P10, Q10, None, 1, 10, 280)
    assert first_tokens(odds, P10, 2) == plain(P10, 2) and mean_accepted(odds) == Fraction(32, 100)
    on_a_grid(monkeypatch)
    engine = constant_engine(P, ConstantScorer(Q))
    engine._runner.verify = without_q
    for i in range(1000):
        engine.add(Request(i, [0], SamplingParams(max_tokens=3, temperature=1), i))
    engine.step()
    engine.step()
    assert acceptance(engine) == 0.32


# --- E9, E13, E15: what comes out


def off_by(model, params, drafter) -> list[float]:
    """How far the logprobs of each token are from those of one run over the whole text."""
    prompt, found = [5, 6, 7, 5, 6, 7, 5, 6], []
    if drafter == "knows":
        drafter = KnowsTheAnswer([[*prompt, *alone(model, request("one", prompt, **params))[0]]], (3, 2))
    engine, _ = watched_engine(model, draft=drafter)
    one = request("one", prompt, **params)
    engine.add(one)
    while engine.has_work:
        found += [scores for progress in engine.step() for scores in progress.logprobs]
    assert sum(counted(engine, EventKind.DRAFTS, "accepted")) > 3
    with torch.inference_mode():
        logits = model(whole_step(one.tokens), WholeText(len(one.tokens))).logits[len(prompt) - 1 :]
    wanted = [token_logprobs(row, token, 3) for row, token in zip(logits, one.output_ids, strict=False)]
    return [max(abs(b.get(token, 0) - score) for token, score in a.items()) for a, b in zip(wanted, found, strict=True)]


@pytest.mark.parametrize("drafter, temperature", [("mtp", 3.0), ("knows", 0.0)])
def test_logprobs_of_accepted_tokens(dense, monkeypatch, drafter, temperature):  # fault E9
    params = {"logprobs": 3, "max_tokens": 24, "temperature": temperature}
    assert max(off_by(dense, params, drafter)) < 1e-9
    right = choosing._Verified.logprobs
    wrong = lambda row, at, token: {token: 0.0} if at else right(row, at, token)  # noqa: E731
    monkeypatch.setattr(choosing._Verified, "logprobs", wrong)
    off = off_by(dense, params, drafter)
    assert off[0] < 1e-9 and sum(x > 1e-4 for x in off) > 3


@pytest.mark.parametrize("depth", [1, 2, 3, 5])
@pytest.mark.parametrize("is_wrong", [False, True])
def test_a_full_acceptance_brings_one_token_more_than_drafts(depth, is_wrong):  # fault E13
    engine = constant_engine(P, ConstantScorer(P), depth, most=4)
    one_of_the_library = verify_one
    if is_wrong:
        engine._runner.verify = verify_row_by_row(partial(drop_the_bonus, verify_one=one_of_the_library))
    for i in range(4):
        engine.add(Request(i, [0], SamplingParams(max_tokens=1 + 10 * (depth + 1), temperature=1), i))
    while engine.has_work:
        engine.step()
    drafted = counted(engine, EventKind.DRAFTS, "drafted")
    given = [count for count in counted(engine, EventKind.TOKENS, "count")]
    assert given[:4] == [1] * 4, "the first step has no drafts"
    if is_wrong:
        assert given[4:8] == [depth] * 4
    else:
        assert drafted == [depth] * 40 and given[4:] == [depth + 1] * 40 and acceptance(engine) == 1


def verify_one(p, drafts, q, accept_u, sample_u):
    """The library's verification, of one row."""
    starts, u = torch.tensor([0, len(p)]), torch.tensor([sample_u], dtype=torch.float64)
    num, token = verify(p, torch.tensor(drafts), q, starts, torch.tensor(accept_u, dtype=torch.float64), u)
    return [*drafts[: int(num)], int(token)]


FILTERED = (0.35, 0.25, 0.20, 0.05, 0.03, 0.04, 0.04, 0.04)
FILTERS = SamplingParams(max_tokens=100, temperature=1, top_k=4, top_p=0.82)


def top_p_before_top_k(logits, params):
    """The two filters the other way round."""
    params = [params] * len(logits) if isinstance(params, SamplingParams) else params
    left = filter_probs(logits, [SamplingParams(temperature=p.temperature, top_p=p.top_p) for p in params])
    return filter_probs(left.log(), [SamplingParams(temperature=1, top_k=p.top_k) for p in params])


def support(draft) -> set[int]:
    """The tokens that come out."""
    engine = constant_engine(FILTERED, draft, 2, most=8)
    requests = [Request(i, [0, 1, 2, 0, 1], FILTERS, i) for i in range(8)]
    for one in requests:
        engine.add(one)
    while engine.has_work:
        engine.step()
    return {token for one in requests for token in one.output_ids}


@pytest.mark.parametrize("draft", ["none", "ngram", ConstantScorer(FILTERED), ConstantScorer(FILTERED[::-1])])
def test_one_order_of_filters_for_all_paths(monkeypatch, draft):  # fault E15
    assert support(draft) == {0, 1, 2}
    monkeypatch.setattr(choosing, "filter_probs", top_p_before_top_k)
    assert support(draft) == ({0, 1, 2} if draft == "none" else {0, 1, 2, 3})
