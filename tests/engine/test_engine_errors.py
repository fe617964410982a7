"""A step that fails has not been; a row that is no numbers is its own request's end and nobody else's."""

import math

import pytest
import torch
from small_engine import (
    STEP_S,
    Scripted,
    alone,
    ask,
    check_idle,
    check_story,
    family,
    make_engine,
    poison_free,
    run_all,
    scripted_tokens,
)

from minserve.batching.batcher import Phase, Slice
from minserve.choosing import choose_tokens
from minserve.events import EventKind
from minserve.request import FinishReason


class Unlucky(Exception):
    """What goes wrong in these tests."""


def scene():
    """Rows that decode, read, wait, fork, are scored, and are put back."""
    scored = [ask("s", 11, 1, prompt_logprobs=0)], [ask("z", 9, 0, prompt_logprobs=0)]
    return [[ask("a", 5, 8)], family("f", 6, 3, 4), *scored, [ask("b", 3, 6)]]


def late_victim():
    """A row that has its page for the step already when one of higher priority needs that page."""
    return [[ask("low", 2, 10)], [ask("high", 4, 8, priority=1)]]


ROOMY, TIGHT = (scene, {}), (scene, {"num_pages": 5})
LATE_VICTIM = (late_victim, {"num_pages": 12, "page_size": 1, "policy": "priority", "batch_tokens": 7})  # fault D5


def standing(engine, requests):
    """All that a step may change, of those that have their place from before."""
    cache = engine.cache
    return {
        request.id: (
            request.num_computed, list(request.tokens), request.finish_reason,
            list(cache.tables[request.id].pages) if request.id in cache.tables else [], cache.slot_of.get(request.id),
        )
        for request in requests
    }  # fmt: skip


class FailsOnce(Scripted):
    """A model, a choice of tokens and a cost of which one fails, at one call."""

    def __init__(self, at, kind, error):
        super().__init__(during=lambda number, step: self.count("model"))
        self.at, self.kind, self.error, self.counts = at, kind, error, {"model": 0, "choose": 0, "cost": 0}

    def count(self, kind):
        self.counts[kind] += 1
        if (kind, self.counts[kind] - 1) == (self.kind, self.at):
            raise self.error

    def choose(self, *args):
        chosen = choose_tokens(*args)
        self.count("choose")
        return chosen

    def cost(self, rows):
        self.count("cost")
        return STEP_S


FAILURES = [
    ("model", Unlucky(), ROOMY), ("model", Unlucky(), TIGHT), ("model", Unlucky(), LATE_VICTIM),
    ("model", KeyboardInterrupt(), TIGHT), ("choose", Unlucky(), LATE_VICTIM), ("cost", Unlucky(), TIGHT),
]  # fmt: skip


@pytest.mark.parametrize("kind, error, played", FAILURES)
def test_a_step_that_fails_can_be_tried_again(kind, error, played, monkeypatch):  # standing pattern 2: one undo
    num_failed = 0
    for at in range(100):
        model, families, config = FailsOnce(at, kind, error), played[0](), played[1]
        engine = make_engine(model, cost=model.cost, **config)
        monkeypatch.setattr("minserve.engine.choose_tokens", model.choose)
        requests, progress = [request for members in families for request in members], []
        while families or engine.has_work:
            if families:
                first, *riders = families.pop(0)
                engine.add(first, riders)
            before, num_events = standing(engine, requests), len(engine.log)
            try:
                progress += engine.step()
            except type(error):
                num_failed += 1
                check_nothing_moved(engine, before, standing(engine, requests), num_events)
        check_story(engine, requests, progress)
        assert all(request.output_ids == scripted_tokens(request) for request in requests)
        assert all(
            len(request.prompt_logprobs) == len(request.prompt_ids) for request in requests if request.id in ("s", "z")
        )
        check_idle(engine)
        if at >= model.counts[kind]:
            break
    assert 5 < num_failed == at < 99


def check_nothing_moved(engine, before, after, num_events):
    """Fail if a failed step did more than let requests in, and put others back."""
    events = list(engine.log)[num_events:]
    assert {event.kind for event in events} <= {EventKind.PREEMPTED, EventKind.ADMITTED}
    put_back = {event.request_id for event in events if event.kind is EventKind.PREEMPTED}
    let_in = {event.request_id: event.data["cached_tokens"] for event in events if event.kind is EventKind.ADMITTED}
    for name in before.keys() - put_back - let_in.keys():
        assert before[name] == after[name]
    for name in before.keys() & let_in.keys():  # what it found in the cache is its own, and no more
        assert after[name][:3] == (let_in[name], *before[name][1:3])
        assert len(after[name][3]) == engine.cache.pages_needed(let_in[name])
    assert all(after[name][0] == 0 and after[name][1] == before[name][1] for name in put_back)
    engine.check()


def test_failing_again_and_again_loses_nothing():
    engine, request = make_engine(Scripted(during=lambda number, step: 1 / 0 if number % 5 else None)), ask("a", 20, 4)
    engine.add(request)
    for _ in range(200):
        try:
            engine.step()
        except ZeroDivisionError:
            engine.check()
    assert request.output_ids == scripted_tokens(request)
    check_idle(engine)


class FailsAfterwards:
    """A model that does its work, writes its pages and states, and fails then, at every other call."""

    def __init__(self, model):
        self.inner, self.model, self.num_calls = model, model.model, 0

    def __call__(self, step, memory):
        output, self.num_calls = self.inner(step, memory), self.num_calls + 1
        if self.num_calls % 2:
            raise Unlucky
        return output


@pytest.mark.parametrize("num_pages", [6, 32])
def test_what_a_failed_step_has_written_is_not_seen(model, num_pages):  # standing pattern 2; fault A3: nothing twice
    engine = make_engine(FailsAfterwards(model), num_pages=num_pages)
    poison_free(engine)
    requests = [ask("a", 13, 6, temperature=0.9), *family("f", 6, 2, 7, temperature=0.9, seed=3)]
    engine.add(requests[0])
    engine.add(requests[1], requests[2:])
    progress = []
    while engine.has_work:
        try:
            progress += engine.step()
        except Unlucky:
            poison_free(engine)
    check_story(engine, requests, progress)
    for request in requests:
        assert request.output_ids == alone(model, request)[0]
    check_idle(engine)


def bad_at(position, value):
    """Logits of one position, in whatever row, replaced: only a row that is so long has it."""

    def logits(step, logits):
        logits = logits.clone()
        logits[step.positions[step.chosen] == position] = value
        return logits

    return logits


NOT_NUMBERS = pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])


@NOT_NUMBERS
@pytest.mark.parametrize("position, num_tokens", [(18, None), (19, 0), (20, 1), (22, 3)])
def test_a_row_that_is_no_numbers_ends_one_request(value, position, num_tokens):
    bad, others = ask("bad", 20, 6), [ask(i, 3 + i, 8, temperature=0.5 * i) for i in range(3)]
    engine = make_engine(Scripted(logits=bad_at(position, value)))
    for request in [others[0], bad, *others[1:]]:
        engine.add(request)
    progress = run_all(engine)
    check_story(engine, [bad, *others], progress)
    if num_tokens is None:  # nobody asks for the logits in the middle of a prompt
        assert bad.finish_reason is FinishReason.LENGTH
    else:
        assert bad.finish_reason is FinishReason.ERROR and bad.output_ids == scripted_tokens(bad)[:num_tokens]
        assert ["logits" in (one.error or "") for one in progress if one.request is bad][-1]
    assert all(request.finish_reason is FinishReason.LENGTH for request in others)
    assert others[0].output_ids == scripted_tokens(others[0])
    check_idle(engine)


@NOT_NUMBERS
@pytest.mark.parametrize("max_tokens", [0, 2])
@pytest.mark.parametrize("position", [0, 7, 8, 16, 18])
def test_a_prompt_that_cannot_be_scored_is_an_error(value, position, max_tokens):
    bad, other = ask("bad", 20, max_tokens, prompt_logprobs=1), ask("other", 3, 4)  # the other is not scored
    engine = make_engine(Scripted(logits=bad_at(position, value)))
    engine.add(bad)
    engine.add(other)
    progress = run_all(engine)
    check_story(engine, [bad, other], progress)
    assert bad.finish_reason is FinishReason.ERROR and bad.output_ids == []
    assert other.output_ids == scripted_tokens(other)
    assert ["scored" in one.error for one in progress if one.error] == [True]
    check_idle(engine)


@NOT_NUMBERS
@pytest.mark.parametrize("position, wanted", [(19, ["error"] * 3), (21, ["error"] * 3), (8, ["length"] * 3)])
def test_a_family_ends_one_by_one(value, position, wanted):
    branches, other = family("f", 20, 3, 4), ask("other", 7, 1)
    engine = make_engine(Scripted(logits=bad_at(position, value)))
    engine.add(branches[0], branches[1:])
    engine.add(other)
    check_story(engine, [*branches, other], run_all(engine))
    assert [request.finish_reason for request in branches] == wanted
    assert other.output_ids == scripted_tokens(other)
    check_idle(engine)


@pytest.mark.parametrize("size", [1e37, -1e37])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_overflow_under_a_penalty_end_one_request(size, temperature):
    """Numbers as the model gave them, and none any more when the penalty has divided them."""
    bad = ask("bad", 5, 4, repetition_penalty=0.01 if size > 0 else 100.0, temperature=temperature)
    other = ask("other", 5, 4, temperature=temperature)
    far = Scripted(logits=lambda step, logits: (size * (logits / 100 + 1)).to(torch.float32), dtype=torch.float32)
    engine = make_engine(far, dtype="float32")
    engine.add(bad)
    engine.add(other)
    check_story(engine, [bad, other], run_all(engine))
    assert other.finish_reason is FinishReason.LENGTH and len(other.output_ids) == 4
    check_idle(engine)


@pytest.mark.parametrize("bad_first", [True, False])
def test_a_poisoned_row_beside_a_family_is_nobody_elses(bad_first):
    alone_, branches = ask("bad", 3), family("f", 3, 2)
    rows = {"bad": torch.full((1, 264), math.nan), "f0": torch.zeros(1, 264)}
    names = ["bad", branches[0].id] if bad_first else [branches[0].id, "bad"]
    requests = {"bad": alone_, branches[0].id: branches[0]}
    slices = [Slice(requests[name], 0, 3, Phase.PREFILL) for name in names]
    logits = torch.cat([rows["bad" if name == "bad" else "f0"] for name in names])
    chosen = choose_tokens(slices, logits, lambda request: branches[1:] if request is branches[0] else [])
    assert list(chosen.errors) == ["bad"]
    assert {name: len(new) for name, new in chosen.tokens.items()} == {"f0": 1, "f1": 1}
