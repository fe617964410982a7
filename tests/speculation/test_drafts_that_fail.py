"""Drafters that misbehave, requests that leave or are put back in the middle, logits that are none: nothing is lost."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from faulty_drafts import ConstantScorer, constant_engine
from scripted_drafts import Fails, GoesOn, verified
from small_engine import (
    CONFIG,
    Scripted,
    ask,
    check_idle,
    check_story,
    family,
    make_engine,
    outputs,
    run_all,
    scripted_tokens,
)

from minserve.errors import InvalidValue
from minserve.events import EventKind
from minserve.parts import Parts, verify_row_by_row
from minserve.request import Request, SamplingParams
from minserve.speculation.verify import verify

pytestmark = pytest.mark.usefixtures("shapes_unchecked")


def failing_engine(draft, **config):
    return make_engine(Scripted(), draft=draft, **{"adapt_drafts": False, "batch_tokens": 24, **config})


def check_recovers(engine, fail, repair, error, match=None):
    """Fail unless the engine, failing in the middle of its work and again, ends it rightly once it is repaired.

    A request waits to be let in by the very step that fails.
    """
    *early, late = requests = [ask("a", 5, 15), ask("b", 9, 12), ask("late", 7, 6)]
    for one in early:
        engine.add(one)
    progress = engine.step() + engine.step()
    engine.add(late)
    fail()
    before = {one.id: (one.num_computed, list(one.tokens)) for one in requests}
    for _ in range(3):
        with pytest.raises(error, match=match):
            engine.step()
        engine.check()
        assert all((one.num_computed, one.tokens) == before[one.id] for one in early)
    repair()
    run_all(engine, progress)
    check_story(engine, requests, progress)
    check_idle(engine)
    assert outputs(requests) == {one.id: scripted_tokens(one) for one in requests}
    for one in requests:
        kinds = [event.kind for event in engine.log.of(one.id)]
        assert kinds.count(EventKind.ADMITTED) == 1 and kinds.index(EventKind.ADMITTED) == 1


@pytest.mark.parametrize("ids, said", [
    ([26], r"propose\(...\)\[0\] is 26.*0 to 25"), ([3, -1], r"propose\(...\)\[1\] is -1"), ([1.5], r"\[0\] is 1.5"),
    ([2.0], r"\[0\] is 2.0"), ([True], r"\[0\] is True"), (["a"], r"\[0\] is 'a'"), ("ab", "is 'ab'"),
    (None, "is None"), (7, "is 7"), ([[1]], r"\[0\] is \[1\]"), (np.array([0.5]), r"\[0\] is 0.5"),
    (torch.tensor([[1]]), r"\[0\]"), ([2**70], r"\[0\] is"),
], ids=str)  # fmt: skip
def test_drafts_that_are_no_tokens(ids, said):
    drafter = Fails()
    check_recovers(failing_engine(drafter), lambda: drafter.do(lambda tokens, most: ids), lambda: drafter.do(None),
                   InvalidValue, said + ".*EngineConfig.draft")  # fmt: skip


def raises(*what):
    raise RuntimeError("no idea")


def changes_the_tokens(tokens, most):
    tokens[0] = most


@pytest.mark.parametrize("instead, error", [(raises, RuntimeError), (changes_the_tokens, TypeError)])
def test_a_drafter_that_raises_or_changes_what_it_is_given(instead, error):
    drafter = Fails()
    check_recovers(failing_engine(drafter), lambda: drafter.do(instead), lambda: drafter.do(None), error)


@pytest.mark.parametrize("make", [tuple, np.array, torch.tensor, lambda ids: np.array(ids, dtype=np.int32)])
def test_drafts_in_any_sequence_of_whole_numbers(make):
    drafter = Fails()
    drafter.instead = lambda tokens, most: make(GoesOn().propose(tokens, most))
    engine = failing_engine(drafter)
    one = ask("a", 5, 15)
    engine.add(one)
    run_all(engine)
    assert one.output_ids == scripted_tokens(one) and all(kept == num for num, kept in verified(engine))


def test_drafts_beyond_those_wanted_are_left_out():
    drafter = Fails()
    drafter.instead = lambda tokens, most: GoesOn().propose(tokens, most + 20)
    engine = failing_engine(drafter, draft_tokens=2)
    one = ask("a", 5, 15)
    engine.add(one)
    run_all(engine)
    check_idle(engine)
    assert one.output_ids == scripted_tokens(one) and {num for num, _ in verified(engine)} == {1, 2}


class FailingScorer(Fails):
    """Scores as the scripted model does, or does what a test wants it to do instead."""

    propose = None  # it has no such method

    def logits(self, contexts):
        if self.instead is not None:
            return self.instead(len(contexts))
        likeliest = torch.tensor([(3 * context[-1] + len(context) - 1) % 25 for context in contexts])
        return 100 * torch.nn.functional.one_hot(likeliest, CONFIG.vocab_size).double()


@pytest.mark.parametrize("instead, error, said", [
    (lambda n: torch.zeros(n, 25), InvalidValue, r"logits.shape of the drafter is \(\d, 25\); it must be \(\d, 26\)"),
    (lambda n: torch.zeros(n + 1, 26), InvalidValue, "shape"), (lambda n: torch.zeros(26), InvalidValue, "shape"),
    (lambda n: None, InvalidValue, "logits.shape"), (lambda n: [[0.0] * 26] * n, InvalidValue, "logits.shape"),
    (lambda n: torch.full((n, 26), torch.nan), InvalidValue, "logits of the drafter"),
    (lambda n: torch.full((n, 26), -torch.inf), InvalidValue, "logits of the drafter"),
    (lambda n: torch.full((n, 26), torch.inf), InvalidValue, "logits of the drafter"),
    (raises, RuntimeError, "no idea"),
])  # fmt: skip
def test_scores_that_are_none(instead, error, said):
    drafter = FailingScorer()
    engine = failing_engine(drafter)
    said += ".*EngineConfig.draft" if error is InvalidValue else ""
    check_recovers(engine, lambda: drafter.do(instead), lambda: drafter.do(None), error, said)
    assert all(kept == num for num, kept in verified(engine))


def test_a_scorer_may_mask_tokens_and_be_of_another_type():
    """Its q has no probability where p has some: such tokens come from the residual."""
    engine = constant_engine([0.3, 0.5, 0.2], ConstantScorer([0.5, 0.5, 0.0]), most=50)
    engine.drafting._drafter.scores = engine.drafting._drafter.scores.to(torch.float16)
    requests = [Request(i, [0], SamplingParams(max_tokens=20, temperature=1), i) for i in range(50)]
    for one in requests:
        engine.add(one)
    while engine.has_work:
        engine.step()
    assert {token for one in requests for token in one.output_ids} == {0, 1, 2} and verified(engine)


# --- the model fails, and its logits are none


def test_a_model_that_raises_in_a_step_with_drafts():
    during = Fails()
    during.do(lambda number, step: None)
    engine = make_engine(Scripted(during.propose), draft=GoesOn(3), adapt_drafts=False, batch_tokens=24)
    check_recovers(engine, lambda: during.do(raises), lambda: during.do(lambda number, step: None), RuntimeError)
    assert verified(engine)


@pytest.mark.parametrize("nan_at", range(6, 14))
@pytest.mark.parametrize("num_right", [1, 3, 100])
def test_logits_that_are_no_numbers_end_their_request_where_a_plain_step_would(nan_at, num_right):
    """Positions from there on have none; the other request's have."""

    def spoil(step, logits):
        is_mine = torch.zeros(len(step.tokens), dtype=torch.bool)
        for row, (start, stop) in enumerate(zip(step.row_starts[:-1], step.row_starts[1:], strict=True)):
            is_mine[start:stop] = rows[row] == "a"
        logits[(is_mine & (step.positions >= nan_at))[step.chosen]] = torch.nan
        return logits

    found = []
    for draft in ("none", GoesOn(num_right)):
        engine = make_engine(Scripted(logits=spoil), draft=draft, draft_tokens=4, adapt_drafts=False, batch_tokens=24)
        plan, rows = engine.batcher.plan, []

        def plan_and_see(room, plan=plan, rows=rows):
            planned = plan(room)
            rows[:] = [piece.request.id for piece in planned.slices]
            return planned

        engine.batcher.plan = plan_and_see
        one, other = ask("a", 5, 20), ask("b", 6, 12)
        engine.add(one)
        engine.add(other)
        progress = run_all(engine)
        check_story(engine, [one, other], progress)
        check_idle(engine)
        assert other.output_ids == scripted_tokens(other) and one.finish_reason == "error"
        found.append((one.output_ids, [step.error for step in progress if step.request is one][-1]))
    assert found[0] == found[1] and found[0][0] == scripted_tokens(one)[: nan_at - 4]


# --- requests that leave, or are put back


@pytest.mark.parametrize("leaves_in", range(2, 7))
def test_who_leaves_in_the_middle_of_a_step_gets_nothing_of_it(leaves_in):
    def during(number, step):
        if number == leaves_in:
            assert engine.abort("a")

    engine = make_engine(Scripted(during), draft=GoesOn(), draft_tokens=3, adapt_drafts=False, batch_tokens=24)
    one, other = ask("a", 5, 40), ask("b", 6, 20)
    for request in (one, other):
        engine.add(request)
    progress = run_all(engine)
    check_story(engine, [one, other], progress)
    check_idle(engine)
    assert one.finish_reason == "abort" and one.output_ids == scripted_tokens(one)[: 1 + 4 * (leaves_in - 1)]
    assert verified(engine, "a") == [(3, 3)] * (leaves_in - 1) and other.output_ids == scripted_tokens(other)


@pytest.mark.parametrize("num_right", [0, 1, 100])
def test_who_is_put_back_loses_nothing(num_right):
    engine = make_engine(
        Scripted(), draft=GoesOn(num_right), draft_tokens=3, adapt_drafts=False, num_pages=9, batch_tokens=24
    )
    requests = [ask("a", 5, 22), ask("b", 7, 20), ask("c", 6, 21), *family("f", 4, 3, 15)]
    for one in requests[:3]:
        engine.add(one)
    engine.add(requests[3], requests[4:])
    progress = run_all(engine)
    check_story(engine, requests, progress)
    check_idle(engine)
    assert any(event.kind is EventKind.PREEMPTED for event in engine.log) and verified(engine)
    assert outputs(requests) == {one.id: scripted_tokens(one) for one in requests}


# --- a part for verification


def test_a_part_verifies_row_by_row():
    """It gets what the exercise promises, and what it gives is what comes out."""
    asked = []

    def part(p, drafts, q, accept_u, sample_u):
        assert p.shape == (len(drafts) + 1, 3) and torch.allclose(p.sum(-1), torch.ones(len(p), dtype=p.dtype))
        assert isinstance(drafts, list) and len(accept_u) == len(drafts) and 0 <= sample_u < 1
        assert q.shape == (len(drafts), 3) and all(q[i, token] > 0 for i, token in enumerate(drafts))
        assert all(isinstance(u, float) and 0 <= u < 1 for u in (*accept_u, sample_u))
        starts = torch.tensor([0, len(p)])
        u, last = torch.tensor(accept_u, dtype=torch.float64), torch.tensor([sample_u], dtype=torch.float64)
        kept, token = verify(p, torch.tensor(drafts), q, starts, u, last)
        asked.append([*drafts[: int(kept)], int(token)])
        return asked[-1]

    found = []
    for parts in (Parts(verify=part), None):
        engine = constant_engine([0.3, 0.5, 0.2], ConstantScorer([0.6, 0.2, 0.2]), 3, most=4, parts=parts)
        requests = [Request(i, [0, 1], SamplingParams(max_tokens=20, temperature=1), i) for i in range(4)]
        for one in requests:
            engine.add(one)
        while engine.has_work:
            engine.step()
        found.append([one.output_ids for one in requests])
    given = [event.data["count"] for event in engine.log if event.kind is EventKind.TOKENS]
    assert found[0] == found[1] and len(asked) == len(verified(engine)) and sum(map(len, asked)) <= sum(given)


@pytest.mark.parametrize("wrong", [
    lambda p, drafts, q, u, sample_u: [], lambda p, drafts, q, u, sample_u: [*drafts, 0, 0],
    lambda p, drafts, q, u, sample_u: [drafts[0] + 1, 0],
], ids=["no token", "two more", "another draft"])  # fmt: skip
def test_a_part_that_makes_tokens_up_is_refused(wrong):
    engine = failing_engine(GoesOn())
    right = engine._runner.verify

    def put_in(part):
        engine._runner.verify = part

    check_recovers(engine, lambda: put_in(verify_row_by_row(wrong)), lambda: put_in(right), InvalidValue,
                   "verify of row 0.*Parts.verify")  # fmt: skip


def test_a_part_that_drops_tokens_is_slower_and_not_wrong():
    """Where it keeps fewer drafts than it might, greedy tokens are the same."""

    def keeps_one(p, drafts, q, accept_u, sample_u):
        kept = drafts[: int(p[0].argmax()) == drafts[0]] if drafts else []
        return [*kept, int(p[len(kept)].argmax())]

    engine = make_engine(Scripted(), Parts(verify=keeps_one), draft=GoesOn(), adapt_drafts=False, batch_tokens=24)
    one = ask("a", 5, 20)
    engine.add(one)
    run_all(engine)
    assert one.output_ids == scripted_tokens(one) and {kept for _, kept in verified(engine)} == {1}
