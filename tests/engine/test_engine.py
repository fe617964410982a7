"""The life of a request in the engine: its events, its place in the steps, and who may come in."""

import pytest
import torch
from small_engine import CONFIG, Scripted, ask, check_idle, check_story, make_engine, run_all

from minserve.errors import InvalidValue, MinserveError
from minserve.events import EventKind
from minserve.metrics import metrics_of, steps
from minserve.paging.page_table import PageTable
from minserve.request import FinishReason, Status


def story(engine, name):
    """What the log says of a request, in short."""
    shown = {EventKind.SLICE: ("start", "stop", "phase"), EventKind.FINISHED: ("reason",), EventKind.TOKENS: ("count",)}
    return [(e.kind.value, *(e.data[field] for field in shown.get(e.kind, ()))) for e in engine.log.of(name)]


def test_the_life_of_a_request():
    engine, request = make_engine(Scripted()), ask("a", 17, 3)
    engine.add(request)
    assert (request.status, request.num_computed) == (Status.WAITING, 0) and engine.has_work
    progress = []
    for computed, committed in ((8, 17), (16, 17), (17, 18), (18, 19), (19, 20)):
        progress += engine.step()
        assert (request.num_computed, request.num_committed) == (computed, committed)
        assert request.status is (Status.RUNNING if committed < 20 else Status.FINISHED)
    assert story(engine, "a") == [
        ("arrived",), ("admitted",), ("slice", 0, 8, "prefill"), ("slice", 8, 16, "prefill"),
        ("slice", 16, 17, "prefill"), ("tokens", 1), ("slice", 17, 18, "decode"), ("tokens", 1),
        ("slice", 18, 19, "decode"), ("tokens", 1), ("finished", "length"),
    ]  # fmt: skip
    assert "".join(one.text for one in progress) == "".join(chr(97 + token) for token in request.output_ids)
    check_story(engine, [request], progress)
    check_idle(engine)


@pytest.mark.parametrize("length", [1, 2, 8, 9, 10, 16, 17, 25])
def test_a_slice_of_a_prompt_is_no_decode_however_short(length):  # fault D15
    engine, requests = make_engine(max_running=3), [ask("a", length), ask("b", length), ask("c", 1)]
    for request in requests:
        engine.add(request)
    run_all(engine)
    for request in requests:
        slices = [event for event in story(engine, request.id) if event[0] == "slice"]
        assert all((phase == "prefill") == (start < len(request.prompt_ids)) for _, start, _, phase in slices)


def test_times_are_those_of_the_virtual_clock():
    seen = []
    engine = make_engine(
        cost=lambda rows: seen.append(rows) or 0.5 * sum(stop - start for start, stop in rows), prefix_cache=False
    )
    for name, length in (("a", 6), ("b", 4)):
        engine.add(ask(name, length, 2))
    run_all(engine)
    assert seen == [[(0, 6), (0, 2)], [(6, 7), (2, 4)], [(4, 5)]]
    assert [metrics_of(engine.log, name).first_token for name in "ab"] == [4.0, 5.5]
    assert [(run.start_s, run.duration_s, run.num_rows, run.num_tokens) for run in steps(engine.log)] == [
        (0.0, 4.0, 2, 8), (4.0, 1.5, 2, 3), (5.5, 0.5, 1, 1),
    ]  # fmt: skip


def test_a_request_may_have_arrived_in_the_middle_of_a_step():
    engine = make_engine()
    for name, time_s in (("a", None), ("b", 0.25)):
        engine.add(ask(name, 3, 2), time_s=time_s)
        engine.step()
    run_all(engine)
    assert [metrics_of(engine.log, name).arrived for name in "ab"] == [0.0, 0.25]
    assert [metrics_of(engine.log, name).queue_s for name in "ab"] == [0.0, 0.75]


@pytest.mark.parametrize("batch_tokens", range(1, 10))
def test_no_step_passes_the_budget_and_none_computes_twice(batch_tokens):
    engine = make_engine(batch_tokens=batch_tokens, num_pages=60)
    requests = [ask(i, length, 3) for i, length in enumerate((5, 40, 1, 9, 17))]
    for request in requests:
        engine.add(request)
    check_story(engine, requests, run_all(engine))
    runs = steps(engine.log)
    assert all(run.num_tokens <= batch_tokens for run in runs)
    assert sum(run.num_tokens for run in runs) == sum(request.num_computed for request in requests)
    check_idle(engine)


def test_an_engine_without_work_does_nothing():
    engine = make_engine()
    assert engine.step() == [] and not engine.has_work and len(engine.log) == 0
    check_idle(engine)


def fresh_families():
    """Families of which one member cannot come in while "a" runs and "b" rides along."""
    begun, over, twin = ask("begun", 3), ask("over", 3), ask("twin", 3)
    begun.commit(1)
    over.finish(FinishReason.ABORT)
    return {
        "runs": [ask("a", 3)],
        "rides along": [ask("b", 3)],
        "has begun": [begun],
        "is over": [over],
        "a rider runs": [ask("x", 3), ask("a", 3)],
        "a rider is over": [ask("x", 3), ask("y", 3), over],
        "its own rider": [twin, twin],
        "a rider of its name": [ask("x", 3), ask("x", 3)],
        "two riders of one name": [ask("x", 3), ask("y", 3), ask("y", 3)],
    }


@pytest.mark.parametrize("case", fresh_families())
def test_only_a_fresh_request_comes_in(case):  # fault I8: duplicate request id
    engine, inside = make_engine(), [ask("a", 12), ask("b", 12)]
    engine.add(inside[0], inside[1:])
    progress = engine.step()
    first, *riders = fresh_families()[case]
    num_events = len(engine.log)
    with pytest.raises(InvalidValue, match="request.id is"):
        engine.add(first, riders)
    assert list(engine.batcher.running) == ["a"] and not engine.batcher.waiting and len(engine.log) == num_events
    check_story(engine, inside, run_all(engine, progress))
    check_idle(engine)


@pytest.mark.parametrize("other", [4, [1, 2, 4], [1, 2], [1, 2, 3, 4]], ids=str)
def test_riders_have_the_prompt_of_the_first(other):
    engine = make_engine()
    with pytest.raises(InvalidValue, match="prompt"):
        engine.add(ask("a", [1, 2, 3]), [ask("b", [1, 2, 3]), ask("c", other)])
    assert not engine.has_work and len(engine.log) == 0


def test_an_id_may_come_again_when_its_request_is_gone():
    engine = make_engine(Scripted())
    for _ in range(3):
        request = ask("a", 5)
        engine.add(request)
        assert run_all(engine)[-1].request is request
        engine.log.__init__(engine.log.clock)  # a log tells of every id once
    check_idle(engine)


def test_a_request_may_come_in_while_the_model_runs():
    late = ask("late", 5)
    engine = make_engine(Scripted(during=lambda number, step: engine.add(late) if number == 1 else None))
    first = ask("first", 12)
    engine.add(first)
    check_story(engine, [first, late], run_all(engine))
    check_idle(engine)


def test_a_context_beyond_the_models_is_refused():
    assert make_engine(max_context=64).max_context == make_engine().max_context == 64
    with pytest.raises(InvalidValue, match="max_context is 65; it must be at most 64"):
        make_engine(max_context=65)


def begin(engine, name):
    """Give a request of that name a table and a place in the tree, as if it ran."""
    engine.cache.tables[name] = PageTable(engine.cache.allocator, engine.cache.page_size)
    engine.cache.prefixes._node_of[name] = engine.cache.tree.lock(engine.cache.tree.match([]))


BREAK = {
    "a page is lost": lambda engine: engine.cache.tables["a"].pages.pop(),
    "a page is taken by nobody": lambda engine: engine.cache.allocator.take(1),
    "a slot is taken by nobody": lambda engine: engine.cache.states.take(),
    "a slot is another one's": lambda engine: engine.cache.slot_of.update(a=engine.cache.slot_of["b"]),
    "a state is too old": lambda engine: engine.cache.states.stamp(engine.cache.slot_of["a"], 4),
    "a request is ahead of its state": lambda engine: engine.batcher.running["a"][0].commit(6, [1]),
    "one that waits holds pages": lambda engine: begin(engine, "c"),
    "one that is gone holds pages": lambda engine: begin(engine, "gone"),
    "a kept state is too old": lambda engine: engine.cache.states.stamp(engine.cache.snapshots.slots[0], 3),
    "a kept state is free": lambda engine: engine.cache.states.release(engine.cache.snapshots.slots[0]),
    "a kept page is free": lambda engine: engine.cache.allocator.release(next(engine.cache.tree.nodes()).pages),
    "more states are held than may be": lambda engine: setattr(engine.cache, "_num_states", 2),
    "one that holds pages holds no place": lambda engine: engine.cache.prefixes.leave(engine.batcher.running["a"][0]),
    "one that runs is forgotten": lambda engine: engine.batcher.remove(engine.batcher.running["a"][0]),
    "one that runs waits as well": lambda engine: engine.batcher._queue.append(((0, 0), ask("a", 3))),
}


@pytest.mark.parametrize("fault", BREAK)
def test_a_broken_invariant_is_found(fault):
    engine = make_engine(max_running=2, snapshot_every=4)
    for name in "abc":
        engine.add(ask(name, 3, 9))
    for _ in range(3):
        engine.step()
    engine.check()
    BREAK[fault](engine)
    with pytest.raises(MinserveError):
        engine.check()


def seven_then_the_end(step, logits):
    """Token 7 after every even position, the end token 25 after every odd one."""
    wanted = torch.where(step.positions[step.chosen] % 2 == 0, 7, 25)
    return torch.nn.functional.one_hot(wanted, CONFIG.vocab_size).to(torch.float64)


@pytest.mark.parametrize(
    "params, length, reason, text",
    [
        ({"ignore_eos": False}, 2, "stop", "h"),
        ({}, 6, "length", "hzhzhz"),
        ({"stop_token_ids": [7]}, 1, "stop", ""),
        ({"stop": "h"}, 1, "stop", ""),
        ({"stop": "zh"}, 3, "stop", "h"),
        ({"max_tokens": 2, "ignore_eos": False}, 2, "stop", "h"),
        ({"max_tokens": 1, "ignore_eos": False}, 1, "length", "h"),
    ],
)
def test_where_an_output_ends(params, length, reason, text):
    engine, request = (
        make_engine(Scripted(logits=seven_then_the_end)),
        ask("a", [1, 2, 3], **{"max_tokens": 6, **params}),
    )
    engine.add(request)
    progress = run_all(engine)
    assert request.output_ids == [7, 25, 7, 25, 7, 25][:length] and request.finish_reason == reason
    assert "".join(one.text for one in progress) == text
    check_story(engine, [request], progress)
    check_idle(engine)
