"""Looking ahead: drafts run on what a step has left over, and change nothing else about its plan."""

from copy import deepcopy

import pytest
from counted_room import Asked, Play, Room, shown
from hypothesis import given, settings
from hypothesis import strategies as st

from minserve.batching.batcher import POLICIES, Batcher, Phase
from minserve.parts import PlannedBatcher


def decoding(*requests, **limits):
    """A play in which all of these have their prompts read, in one step."""
    play = Play(*requests, **{"batch_tokens": sum(request.num_committed for request in requests), **limits})
    play.step()
    assert {phase for _, phase in play.batcher.running.values()} == {Phase.DECODE}
    return play


def drafts(plan):
    """How many drafts each slice has."""
    return {piece.request.id: piece.num_drafts for piece in plan.slices}


@pytest.mark.parametrize(
    "batch_tokens, wanted",
    [
        (3, {"a": 0, "b": 0, "c": 0}),
        (4, {"a": 1, "b": 0, "c": 0}),
        (6, {"a": 2, "b": 0, "c": 1}),  # b wants none
        (7, {"a": 2, "b": 0, "c": 2}),
        (9, {"a": 2, "b": 0, "c": 4}),
        (64, {"a": 2, "b": 0, "c": 4}),
    ],
)
def test_each_decoding_row_gets_what_it_wants_of_the_budget_that_is_left(batch_tokens, wanted):
    play = decoding(Asked("a", 2, drafts=2), Asked("b", 3), Asked("c", 1, drafts=4))
    play.batcher.batch_tokens = batch_tokens
    plan = play.step()
    assert drafts(plan) == wanted and sum(piece.num_tokens for piece in plan.slices) == 3 + sum(wanted.values())


def test_prompts_go_before_drafts_and_have_none():
    play = decoding(Asked("a", 2, drafts=3), batch_tokens=6)
    play.add(Asked("long", 8, drafts=3), Asked("short", 2, drafts=3))
    assert drafts(play.step()) == {"a": 0, "long": 0}  # its one token, and five of the prompt
    assert drafts(play.step()) == {"a": 0, "long": 0, "short": 0}  # 1 + 3 + 2
    assert drafts(play.step()) == {"a": 3, "long": 0, "short": 0}


def test_a_slice_that_does_not_reach_the_last_known_token_has_no_drafts():
    play = decoding(Asked("a", 2, drafts=3), Asked("b", 1, drafts=3), batch_tokens=8)
    a, b = play.running
    a.num_committed += 7  # 8 tokens to be computed
    play.batcher.batch_tokens = 11
    assert drafts(play.batcher.plan(play.room)) == {"a": 2, "b": 0}
    play.batcher.batch_tokens, b.num_committed = 6, 1 + b.num_computed
    plan = play.batcher.plan(play.room)
    assert shown(plan) == [("a", 2, 8, "d")] and drafts(plan) == {"a": 0}


@pytest.mark.parametrize("num_pages, wanted", [(7, (2, 0)), (8, (3, 0)), (9, (3, 2)), (10, (3, 3)), (20, (3, 3))])
def test_drafts_take_free_pages_and_put_nobody_back(num_pages, wanted):
    """Two rows of six tokens, on three pages each; with three drafts a row is on five."""
    play = decoding(Asked("a", 5, drafts=3), Asked("b", 5, drafts=3), batch_tokens=32, num_pages=num_pages, page_size=2)
    plan = play.step()
    assert tuple(drafts(plan).values()) == wanted and not plan.preempted and not play.put_back


@pytest.mark.parametrize("right", [0, 1, 3, 5])
def test_drafts_that_are_kept_are_tokens_and_the_others_leave_nothing(right):
    play = decoding(Asked("a", 4, 20, drafts=3, right=right), batch_tokens=8, page_size=2)
    (a,), gained = play.running, 1 + min(3, right)
    for number in range(3):
        assert (a.num_computed, a.num_committed) == (4 + gained * number, 5 + gained * number)
        assert play.room.pages_held(a) == -(-a.num_computed // 2)
        play.step()
    assert play.run_all(20) == ["a"] and a.num_out == 0


def unasked(play):
    """The same play, in which nobody wants drafts."""
    play = deepcopy(play)
    for request in play.running + play.batcher.waiting:
        request.drafts = 0
    return play


SHAPE = (st.integers(1, 9), st.integers(1, 12), st.integers(-1, 1), st.integers(0, 9), st.integers(0, 3))
REQUESTS = st.lists(st.tuples(*SHAPE, st.just(0), st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=7)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(REQUESTS, st.integers(1, 12), st.integers(1, 5), st.integers(1, 5), st.integers(0, 6), st.sampled_from(POLICIES))
def test_a_plan_is_the_same_without_drafts(requests, batch_tokens, max_running, page_size, extra_pages, policy):
    """Whoever runs, waits, comes in or gives way: drafts are asked for last. And everybody gets done. PROG"""
    asked = [Asked(number, *shape) for number, shape in enumerate(requests)]
    total = sum(request.num_committed + request.num_out for request in asked)
    largest = max(request.num_committed + request.num_out for request in asked)
    play = Play(*asked, batch_tokens=batch_tokens, max_running=max_running, policy=policy, page_size=page_size,
                num_pages=-(-largest // page_size) + extra_pages)  # fmt: skip
    for _ in range(total * len(asked) + len(asked)):
        if not play.batcher.has_work:
            break
        without = unasked(play).batcher.plan(unasked(play).room)
        plan = play.step()
        assert [(*piece[1:4], piece.request.id) for piece in plan.slices] == [
            (*piece[1:4], piece.request.id) for piece in without.slices
        ]
        for kind in ("admitted", "stuck"):
            assert [r.id for r in getattr(plan, kind)] == [r.id for r in getattr(without, kind)]
        assert [(r.id, num) for r, num in plan.preempted] == [(r.id, num) for r, num in without.preempted]
        left = batch_tokens - sum(piece.stop - piece.start for piece in plan.slices)
        assert sum(drafts(plan).values()) <= left
    assert {*play.done} == {*asked} and play.room.pages == {} and not any(request.num_out for request in asked)


def one_token_each(running, waiting, batch_tokens, max_running, free_pages, page_size):
    """A reader's plan: everybody's next token, and who waits comes in whole."""
    chosen = [(r.id, r.num_computed, r.num_computed + 1, r.phase) for r in running][:batch_tokens]
    for r in waiting[: max_running - len(running)]:
        left = batch_tokens - sum(stop - start for _, start, stop, _ in chosen)
        chosen += [(r.id, 0, min(left, r.num_tokens), "prefill")] if left else []
    return chosen


@pytest.mark.parametrize("batch_tokens, wanted", [(2, (0, 0)), (4, (2, 0)), (5, (3, 0)), (7, (3, 2)), (20, (3, 4))])
def test_a_readers_plan_gets_drafts_on_what_it_has_left(batch_tokens, wanted):
    batcher, room = PlannedBatcher(one_token_each, 20, 4), Room()
    asked = [Asked("a", 3, drafts=3), Asked("b", 3, drafts=4)]
    for request in asked:
        batcher.add(request)
    assert drafts(batcher.plan(room)) == {"a": 0, "b": 0}
    for request in asked:
        request.num_computed, request.num_committed = 3, 4
        batcher.starts_decoding(request)
    batcher.batch_tokens = batch_tokens
    plan = batcher.plan(room)
    assert shown(plan) == [("a", 3, 4, "d"), ("b", 3, 4, "d")] and tuple(drafts(plan).values()) == wanted


def test_nobody_is_asked_for_drafts_where_no_budget_is_left():
    asked, batcher, room = [], Batcher(3, 3), Room()
    room.look_ahead = lambda request, most: asked.append((request.id, most)) or 0
    for name in "abc":
        batcher.add(Asked(name, 1))
    for batch_tokens in (3, 3, 5):
        batcher.batch_tokens = batch_tokens
        for piece in batcher.plan(room).slices:
            piece.request.num_computed, piece.request.num_committed = piece.stop, piece.stop + 1
            batcher.starts_decoding(piece.request)
    assert asked == [("a", 2), ("b", 2), ("c", 2)]
