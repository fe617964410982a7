"""Hits together with all else that an engine does: forks, scores, preemption, budgets, full pools, new weights."""

import pytest
import torch
from alone import Alone, difference
from gated_models import build
from served import (
    Ask,
    Plain,
    cached_tokens,
    check_idle,
    make_engine,
    one_by_one,
    params,
    serve,
    serve_right,
    slices,
    small_models,
    tokens,
)
from worlds import A, engine_of, shared

from minserve.events import EventKind

ADMITTED, PREEMPTED = EventKind.ADMITTED, EventKind.PREEMPTED
names = pytest.mark.parametrize("name", ["ledger", "attention ledger", "hybrid", "attention"])


@names
@pytest.mark.parametrize("page_size", [1, 3, 4])
def test_a_preempted_request_hits_its_own_pages(name, page_size, worlds):  # fault B9
    model, plain = worlds[name]
    found = []
    for num_tokens in (32, 44) if name in ("hybrid", "attention") else (32, 40, 48):
        asks = [Ask(tokens(5 + i, seed=i), params(13), 0) for i in range(3)]
        engine = make_engine(model, page_size=page_size, num_pages=num_tokens // page_size)
        serve_right(engine, plain, asks)
        for request_id in engine.log.request_ids:
            events = [event for event in engine.log.of(request_id) if event.kind in (PREEMPTED, ADMITTED)]
            assert [event.kind for event in events[::2]] == [ADMITTED] * (len(events) // 2 + 1)
            for before, after in zip(events[1::2], events[2::2], strict=True):
                assert after.data["cached_tokens"] <= before.data["num_computed"]
                found.append(after.data["cached_tokens"])
            assert all(start < stop <= start + 8 for start, stop in slices(engine, request_id))
        check_idle(engine)
    assert any(found)


@names
@pytest.mark.parametrize("num_decoding", [0, 5, 7])
@pytest.mark.parametrize("num_shared", [16, 20])
def test_a_hit_with_little_budget_left_takes_what_is_left(name, num_decoding, num_shared, worlds):  # fault D13
    model, plain = worlds[name]
    engine = engine_of(model, (4, 16, 8), max_running=9)
    others = [Ask(tokens(1, seed=20 + i), params(12), 4) for i in range(num_decoding)]
    asks = [Ask(A, params(1), 0), *others, Ask(shared(num_shared, 23), params(2), 8)]
    serve_right(engine, plain, asks)
    assert cached_tokens(engine)[-1] == (f"{num_decoding + 1}.0", num_shared)
    assert slices(engine, f"{num_decoding + 1}.0")[0] == (num_shared, min(num_shared + 8 - num_decoding, 23))
    check_idle(engine)


@pytest.mark.parametrize("num_outputs", [2, 3])
@pytest.mark.parametrize("num", [8, 11, 13, 24])
def test_forks_start_from_a_hit(num_outputs, num, worlds):
    model, _ = worlds["hybrid"]
    alone = Alone(model)
    drawn = params(4, temperature=0.9, seed=7, n=num_outputs)
    engine = make_engine(model, snapshot_every=4, max_running=2 if num == 13 else 4)
    answers = serve(engine, [Ask(A[:num], params(2)), *(Ask(A[:num], drawn, 10 + i) for i in range(2))])
    for family in answers[1:]:
        for index, found in enumerate(family):
            assert not difference(found, alone.answer(A[:num], drawn, index))
    cached = dict(cached_tokens(engine))
    assert cached["1.0"] == cached["2.0"] == (num - 1) // 4 * 4 or num == 24 and cached["1.0"] > 0
    check_idle(engine)


@names
@pytest.mark.parametrize("max_tokens", [0, 1, 3])
@pytest.mark.parametrize("num", [1, 8, 9])
def test_a_prompt_is_scored_whole_although_it_is_there(name, max_tokens, num, worlds):
    model, plain = worlds[name]
    scored = {"prompt_logprobs": model.config.vocab_size, "logprobs": model.config.vocab_size}
    asks = [*one_by_one([A[:num]] * 2, 2), *one_by_one([A[:num]] * 2, max_tokens, **scored), *one_by_one([A[:num]], 2)]
    engine = make_engine(model)
    answers = serve_right(engine, plain, asks)
    assert [len(answer.prompt_logprobs or ()) for answer in answers] == [0, 0, num, num, 0]
    cached = [count for _, count in cached_tokens(engine)]
    assert cached[2:4] == [0, 0] and (cached[4] > 0) == (num > (1 if not engine.cache.snapshots else 4))
    check_idle(engine)


@names
@pytest.mark.parametrize("max_tokens", [0, 1])
def test_a_scored_prompt_leaves_its_pages_to_others(name, max_tokens, worlds):
    model, plain = worlds[name]
    scored = params(max_tokens, prompt_logprobs=model.config.vocab_size)
    for num in (1, 4, 8, 9, 15):
        engine = make_engine(model)
        serve_right(engine, plain, [Ask(A[:num], scored), *one_by_one([shared(num, num + 3)], 2)])
        assert cached_tokens(engine)[1] == ("1.0", num)
        check_idle(engine)


@names
@pytest.mark.parametrize("page_size", [3, 4])
def test_a_request_of_the_whole_pool_is_served_whatever_is_kept(name, page_size, worlds):  # fault D1
    model, plain = worlds[name]
    num = 4 * page_size
    for num_shared in range(1, num - 2, 2 if "ledger" in name else 4):
        asks = one_by_one([A[: num_shared + 1]], 1)
        asks += one_by_one([shared(num_shared, num_shared + 2)], num - num_shared - 1)
        engine = make_engine(model, page_size=page_size, num_pages=4, snapshot_every=2)
        serve_right(engine, plain, [*asks, *one_by_one([A[:num]], 1)])
        check_idle(engine)


@pytest.mark.parametrize("num", [9, 16, 24])
@pytest.mark.parametrize("kind", ["hybrid", "attention"])
def test_nothing_of_older_weights_is_found(kind, num):
    model = small_models()[kind]
    engine, plain = make_engine(model), Plain(model)
    serve_right(engine, plain, one_by_one([A[:num], A[:num]]))
    before = cached_tokens(engine)[-1][1]

    def change():
        generator = torch.Generator().manual_seed(num)
        for weight in model.parameters():
            weight.add_(0.05 * torch.randn(weight.shape, generator=generator, dtype=weight.dtype))

    change()
    (stale,) = serve(engine, one_by_one([A[:num]]))[0]
    assert before and Plain(model).wrong(one_by_one([A[:num]])[0], stale)
    for _ in range(2):
        change()
        engine.weights_changed()
        check_idle(engine)
        serve_right(engine, Plain(model), one_by_one([A[:num], A[:num], shared(num - 1, num + 2)]))
        assert [count > 0 for _, count in cached_tokens(engine)[-3:]] == [False, True, True]


def test_who_runs_while_the_weights_change_leaves_nothing_to_others(worlds):
    model, plain = worlds["ledger"]
    for at in range(1, 9):
        engine = make_engine(model, batch_tokens=5)
        step, count = engine.step, iter(range(100))

        def stepping(step=step, count=count, at=at, engine=engine):
            """A step; before one of them the weights change."""
            if next(count) == at:
                engine.weights_changed()
            return step()

        engine.step = stepping
        serve_right(engine, plain, [Ask(A, params(4), 0), Ask(A, params(4), at), *one_by_one([A])])
        old, new, last = cached_tokens(engine)
        assert old[1] == new[1] == 0 and last[1] > 0
        assert len({node.namespace for node in engine.cache.tree._roots.values()}) <= 2
        check_idle(engine)


def test_a_slice_without_numbers_is_kept_for_nobody(worlds):
    model, plain = worlds["ledger"]

    class Broken:
        """The model, whose second forward gives no numbers."""

        def __init__(self):
            self.model, self.config, self.num = model.model, model.config, 0

        def __call__(self, step, memory):
            out, self.num = model(step, memory), self.num + 1
            out.logits[:] = torch.nan if self.num == 2 else out.logits
            return out

    engine = make_engine(Broken(), snapshot_every=64, batch_tokens=64)
    asks = one_by_one([A[:12], A[:12]])
    (first,), (second,) = serve(engine, asks)
    assert first.finish_reason == "error" and not plain.wrong(asks[1], second)
    assert cached_tokens(engine) == [("0.0", 0), ("1.0", 8)]
    check_idle(engine)


def test_the_small_model_of_the_fault_rows():  # faults A1, A3, C9
    for name in ("mixture", "dense"):
        model = build(name)
        alone, drawn = Alone(model), params(3, logprobs=258)
        prompts = [A, shared(16), A, A[:16], A[:16], shared(19)]
        engine = make_engine(model, num_states=6, max_running=2)
        asks = [Ask(prompt, drawn, at) for prompt, at in zip(prompts, (0, 0, 9, 10, 30, 31), strict=True)]
        for ask, (found,) in zip(asks, serve(engine, asks), strict=True):
            assert not difference(found, alone.answer(ask.prompt_ids, ask.params))
        assert sum(count for _, count in cached_tokens(engine)) > 40
        check_idle(engine)
