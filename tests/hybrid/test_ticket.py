"""The ticket: whatever a step took, all of it comes back, from whoever leaves and whenever the step fails."""

import pytest
from played_cache import PlayedCache, ask
from test_hybrid_cache import counts, running

from minserve.batching.batcher import Entry
from minserve.deltanet.state_pool import StateError

A = tuple(range(30))


class Broken(Exception):
    """A forward that fails."""


@pytest.mark.parametrize("stops", [(1, 2), (4, 8), (8, 3)])
def test_undo_gives_back_pages_and_slots_and_keeps_who_was_let_in(stops):
    played = PlayedCache()
    played.serve(ask("before", A[:9], max_tokens=1))
    old = running(played, [50] * 6, "old", stop=3)
    new = ask("new", (*A[:9], 90, 91))
    with pytest.raises(Broken), played.cache.open() as ticket:
        assert ticket.admit(new, 0) is Entry.IN and new.num_computed == 9
        before = counts(played.cache)
        for request, num in zip((old, new), stops, strict=True):
            assert ticket.grow(request, min(request.num_committed, request.num_computed + num))
        raise Broken
    assert counts(played.cache) == before
    played.kind_of["new"] = (0, None)
    played.check([old, new])
    for request in (old, new):
        while request.num_computed < len(request.prompt_ids):
            played.run(request)
        played.cache.release(request, keep=True)
    played.check_idle()


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("computed", [0, 4, 8, 10])
def test_who_leaves_in_the_middle_of_a_step_gives_all_back(computed, keep):
    played = PlayedCache(snapshot_every=4)
    request = running(played, A[:12], "leaves", stop=computed) if computed else ask("leaves", A[:12])
    other = running(played, [60, 61, 62], "stays", stop=1)
    with played.cache.open() as ticket:
        if not computed:
            assert ticket.admit(request, 0) is Entry.IN
        for one in (request, other):
            assert ticket.grow(one, one.num_computed + 1)
        ticket.abandon(request, keep)
        played.kind_of["stays"] = (0, None)
        played.compute(ticket, other, 2)
        other.commit(2)
        played.cache.commit(ticket, other, publish=True)
    played.check([other])
    found = played.cache.prefixes.find(ask("again", A[:12])).num_tokens
    assert found == (computed if keep else computed // 4 * 4)
    played.cache.release(other)
    played.check_idle()


def test_who_left_during_a_failed_step_is_no_problem_of_undo():
    played = PlayedCache()
    request = running(played, A[:9], "leaves", stop=4)
    with pytest.raises(Broken), played.cache.open() as ticket:
        assert ticket.grow(request, 9)
        ticket.abandon(request)
        raise Broken
    played.check_idle()


@pytest.mark.parametrize("stop", [1, 4, 7, 8, 13])
def test_a_preempted_request_finds_its_own_tokens_again(stop):  # fault B9
    played = PlayedCache(snapshot_every=64)
    request = running(played, A[:14], "again", stop=stop)
    with played.cache.open() as ticket:
        ticket.preempt(request)
    assert request.num_computed == 0 and not played.cache.holders
    assert played.admit(request) is Entry.IN and request.num_computed == request.num_committed - 1 == stop or stop < 13
    assert request.num_computed == stop
    played.run(request)
    played.check([request])
    played.cache.release(request)
    played.check_idle()


def test_a_step_does_not_read_a_state_of_another_count():  # faults A1, A3, A6
    played = PlayedCache()
    request = running(played, A[:9], "runs", stop=4)
    for wrong in (0, 3, 5, 8):
        request.num_computed = wrong
        with pytest.raises(StateError, match=f"has seen 4 tokens; its reader expects {wrong}"):
            played.cache.open().state_read(request)
    request.num_computed = 4
    assert played.cache.open().state_read(request) == played.cache.slot_of["runs"]


def test_there_is_a_slot_for_each_row_beside_all_that_is_kept():
    played = PlayedCache(num_states=3, num_rows=2, snapshot_every=1)
    for i in range(3):
        played.serve(ask(i, [i], max_tokens=1))
    rows = [ask(f"row{i}", [60 + i, 1]) for i in range(2)]
    with played.cache.open() as ticket:
        for row in rows:
            assert ticket.admit(row, 0) is Entry.IN and ticket.grow(row, 1)
        third = ask("third", [70])
        assert ticket.admit(third, 0) is Entry.IN and not ticket.grow(third, 1)
        for row in rows:
            played.kind_of[row.id] = (0, None)
            played.compute(ticket, row, 1)
            row.commit(1)
            played.cache.commit(ticket, row, publish=True)
    played.kind_of["third"] = (0, None)
    played.check([*rows, third])
    assert len(played.cache.states.held) == 3


@pytest.mark.parametrize("num_pages", range(2, 7))
@pytest.mark.parametrize("page_size", [3, 4])
@pytest.mark.parametrize("has_states", [True, False])
def test_a_request_of_the_whole_pool_is_served_whatever_it_could_reuse(num_pages, page_size, has_states):
    """A hit that ends inside a page needs that page and a copy: one more than the request by itself."""
    room = num_pages * page_size
    for shared in range(1, room):
        played = PlayedCache(4, num_pages=num_pages, page_size=page_size, has_states=has_states)
        played.serve(ask("before", A[:shared], max_tokens=2), output=[60])
        request = ask("whole", (*A[:shared], 70), max_tokens=room - shared)
        played.serve(request, output=[80] * (room - shared))
        assert request.num_computed == room
        played.check_idle()
