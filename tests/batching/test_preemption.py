"""Preemption: who gives way when pages run out, what becomes of the step it was in, and that it comes to an end."""

import pytest
from counted_room import Asked, Play, shown
from hypothesis import given, settings
from hypothesis import strategies as st

from minserve.batching.batcher import POLICIES, Phase


def reading(play, *requests):
    """Let requests in, one a step, and have them read their prompts."""
    for request in requests:
        play.add(request)
        play.step()
    assert play.running == [*requests]


@pytest.mark.parametrize(
    "policy, priorities, victim",
    [
        ("fcfs", (0, 0, 0), "c"),  # the newest
        ("fcfs", (5, 0, 9), "c"),  # priorities are none of its business
        ("priority", (0, 0, 0), "c"),
        ("priority", (5, 0, 9), "b"),  # the lowest
        ("priority", (5, 0, 0), "c"),  # of equals the newest
        ("priority", (-1, 0, 3), "a"),
    ],
)
def test_who_gives_way(policy, priorities, victim):
    play = Play(num_pages=16, policy=policy)
    reading(play, *(Asked(name, 2, 30, priority) for name, priority in zip("abc", priorities, strict=True)))
    while not play.put_back:
        play.step()
    assert [request.id for request in play.put_back] == [victim]


@pytest.mark.parametrize("page_size", [1, 2, 3, 4])
def test_the_one_let_in_first_is_never_asked(page_size):
    play = Play(*(Asked(number, 3, 9) for number in range(6)), num_pages=-(-13 // page_size), page_size=page_size)
    while play.batcher.has_work:
        first = play.running[0] if play.running else None
        plan = play.step()
        assert first not in [request for request, _ in plan.preempted]
    assert [request.id for request in play.done] == [0, 1, 2, 3, 4, 5] and play.put_back


def test_who_was_put_back_waits_where_it_was_in_line_and_starts_again():
    play = Play(num_pages=8)
    reading(play, Asked("a", 2, 6), Asked("b", 2, 6))
    play.add(Asked("c", 1, 1))
    while not play.put_back:
        plan = play.step()
    (b,) = play.put_back
    assert plan.preempted == [(b, 3)] and [request.id for request in play.batcher.waiting] == ["b", "c"]
    while play.done == []:
        assert not play.step().admitted
    readmitted = play.step()
    assert readmitted.admitted[0] is b and shown(readmitted)[0] == ("b", 0, b.num_committed - 1, "p")


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("batch_tokens", [4, 5, 6, 9])
def test_the_budget_of_a_victim_goes_to_those_who_are_left(policy, batch_tokens):  # fault D5
    play = Play(batch_tokens=batch_tokens, num_pages=4 + 3 + 9 + 2, policy=policy)
    older, third, victim = Asked("older", 6, priority=2), Asked("third", 12, priority=1), Asked("victim", 10)
    for request, phase, computed in ((older, Phase.PREFILL, 4), (third, Phase.PREFILL, 3), (victim, Phase.DECODE, 9)):
        assert play.batcher.adopt(request, phase)
        request.num_computed = play.room.pages[request.id] = computed
    plan = play.step()  # the victim's one token comes first and takes a page; then older's two are one page short
    assert plan.preempted == [(victim, 9)]
    assert shown(plan) == [("older", 4, 6, "p"), ("third", 3, 3 + batch_tokens - 2, "p")]


@pytest.mark.parametrize("batch_tokens", [4, 6])
def test_the_budget_of_a_victim_is_there_though_it_was_not_enough(batch_tokens):  # fault D5
    play = Play(batch_tokens=batch_tokens, policy="priority")
    low, middle, high = (Asked(name, 30, priority=number) for number, name in enumerate(("low", "middle", "high")))
    for request, phase, computed in ((low, Phase.DECODE, 29), (middle, Phase.PREFILL, 0), (high, Phase.PREFILL, 0)):
        assert play.batcher.adopt(request, phase)
        request.num_computed = play.room.pages[request.id] = computed
    play.room.grow = lambda request, stop: request is not middle  # as if the pages of low were shared: none comes free
    plan = play.batcher.plan(play.room)
    assert plan.preempted == [(low, 29)] and shown(plan) == [("high", 0, batch_tokens, "p")]


@pytest.mark.parametrize("num_rows", [2, 3, 5])
def test_a_victim_that_was_planned_already_runs_no_more(num_rows):  # fault D5
    play = Play(batch_tokens=32, num_pages=32, policy="priority")
    low = [Asked(number, 2, 9, -number) for number in range(num_rows)]  # decoding, and so planned first
    reading(play, *low)
    high = Asked("high", 20, 9, priority=9)
    assert play.batcher.adopt(high, Phase.PREFILL)
    play.room.pages["high"] = 0
    play.room.num_pages = sum(play.room.pages.values()) + num_rows + 19  # one page short, all low ones being served
    plan = play.step()
    assert plan.preempted[0][0] is low[-1] and len(plan.preempted) == 1
    assert shown(plan)[-1] == ("high", 0, 20, "p") and low[-1] not in [piece.request for piece in plan.slices]
    assert [piece.request for piece in plan.slices[:-1]] == low[:-1]


def test_two_do_not_take_pages_from_each_other_in_turn():
    play = Play(Asked("a", 1, 12), Asked("b", 1, 12), num_pages=12)
    assert play.run_all(40) == ["a", "b"]
    assert [request.id for request in play.put_back] == ["b"]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_who_was_put_back_returns_once_somebody_has_left_and_not_before(policy):
    play = Play(num_pages=8, policy=policy)
    reading(play, Asked("a", 2, 9), Asked("b", 2, 9))
    play.add(Asked("c", 1, 1))
    preempt = play.room.preempt
    play.room.preempt = lambda request: preempt(request) or setattr(play.room, "num_pages", 100)  # room for everybody
    while not play.put_back:
        play.step()
    while not play.done:
        assert play.step().admitted == [] and len(play.batcher.waiting) == 2
    assert [request.id for request in play.step().admitted] == ["b", "c"]


def test_those_let_in_keep_what_they_need():
    play = Play(Asked("long", 12, 5), Asked("b", 3, 5), batch_tokens=5, num_pages=16)
    assert play.run_all(40) == ["long", "b"] and play.put_back == []


@pytest.mark.parametrize("num_pages, page_size", [(2, 1), (1, 2), (1, 4), (2, 4), (3, 3), (5, 1), (5, 2), (3, 4)])
def test_alone_and_without_a_page_is_stuck(num_pages, page_size):  # fault D3
    usable = num_pages * page_size
    fits, outgrows, after = (Asked(name, 1, num) for name, num in (("fits", usable), ("outgrows", 99), ("after", 1)))
    play = Play(fits, outgrows, after, num_pages=num_pages, page_size=page_size, max_running=1 + (num_pages > 2))
    stuck = []
    while play.batcher.has_work:
        stuck += [(request.id, request.num_committed) for request in play.step().stuck]
        assert len(play.done) + len(play.batcher.waiting + play.running) == 3
    assert stuck == [("outgrows", usable + 1)]
    assert sorted(request.id for request in play.done) == ["after", "fits", "outgrows"]


def test_a_request_with_somebody_beside_it_is_not_stuck():  # fault D3
    play = Play(num_pages=6, policy="priority")
    reading(play, Asked("high", 1, 5, 1), Asked("low", 1, 5, 0))
    plans = []
    while play.batcher.has_work:
        plans.append(play.step())
    assert not any(plan.stuck for plan in plans)
    assert [request.id for request in play.done] == ["high", "low"]


def test_a_fork_gets_no_place_before_somebody_has_left():
    play = Play(num_pages=8)
    reading(play, Asked("a", 2, 6), Asked("b", 2, 6))
    while not play.put_back:
        play.step()
    assert not play.batcher.adopt(Asked("fork", 3), Phase.DECODE)
    while play.done == []:
        play.step()
    assert play.batcher.adopt(Asked("fork", 3), Phase.DECODE)


SHAPE = (st.integers(1, 14), st.integers(1, 12), st.integers(-1, 1), st.integers(0, 9), st.integers(0, 3))
REQUESTS = st.lists(st.tuples(*SHAPE), min_size=1, max_size=9)


@settings(max_examples=250, deadline=None, derandomize=True)
@given(REQUESTS, st.integers(1, 9), st.integers(1, 5), st.integers(1, 5), st.integers(0, 6), st.data())
def test_everybody_gets_done(requests, batch_tokens, max_running, page_size, extra_pages, data):  # PROG
    """Between two departures nobody is let in twice, so each computes each of its tokens once at most."""
    policy = data.draw(st.sampled_from(POLICIES))
    asked = [Asked(number, *shape) for number, shape in enumerate(requests)]
    total = sum(request.num_committed + request.num_out for request in asked)
    largest = max(request.num_committed + request.num_out for request in asked)
    play = Play(batch_tokens=batch_tokens, max_running=max_running, policy=policy, page_size=page_size,
                num_pages=-(-largest // page_size) + extra_pages)  # fmt: skip
    num_early = data.draw(st.integers(0, len(asked)))
    play.add(*asked[:num_early])
    for request in asked[num_early:]:
        play.add(request)
        play.step()
    play.run_all(total * len(asked) + len(asked))
    assert {*play.done} == {*asked} and play.room.pages == {}
    assert all(request.num_out == 0 for request in asked)
    for request in asked:
        assert play.put_back.count(request) < len(asked)
