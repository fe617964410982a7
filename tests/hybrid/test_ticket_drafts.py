"""The ticket of a step with drafts: what it takes for them, and that what is not accepted leaves nothing behind."""

from itertools import product

import pytest
from played_cache import PlayedCache, ask
from test_hybrid_cache import counts, running

from minserve.deltanet.state_pool import EMPTY
from minserve.paging.page_table import pages_needed

A = tuple(range(30))
WRONG = 77


def with_drafts(*args, num_draft_slots=8, **more):
    """A cache with room for the states of some drafts."""
    return PlayedCache(*args, num_draft_slots=num_draft_slots, **more)


class Broken(Exception):
    """A forward that fails."""


def decoding(played, length, name="decodes", max_tokens=40):
    """A request that has its prompt computed and one token said. Changes: the cache."""
    return running(played, A[:length], name, output=[50], max_tokens=max_tokens)


def kept_counts(played, request):
    """After which of a request's tokens its state is kept for others."""
    path = played.cache.tree.match(request.tokens).path
    return {node.stop for node in path if node in played.cache.snapshots}


@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
@pytest.mark.parametrize("length", [3, 4, 7, 8])
def test_pages_and_slots_shrink_to_what_is_accepted(page_size, length):
    for num_drafts, num_right in product(range(6), range(6)):
        played = with_drafts(64, page_size=page_size)
        request = decoding(played, length)
        states, kept_for_others = played.cache.states, set(played.cache.snapshots.slots)
        kept = played.verify(request, [60, 61, 62, 63, 64][:num_drafts], num_right, 90)
        assert kept == min(num_drafts, num_right)
        assert request.tokens == [*A[:length], 50, *[60, 61, 62, 63, 64][:kept], 90]
        assert request.num_computed == length + 1 + kept
        table = played.cache.tables[request.id]
        assert len(table.pages) == pages_needed(length + 1 + kept, page_size)
        # Of all that was written one state is held, the request's own.
        assert {*states.held} == {played.cache.slot_of[request.id]} | kept_for_others
        assert set(played.cache.snapshots.slots) == kept_for_others
        played.cache.release(request, keep=True)
        played.check_idle()


@pytest.mark.parametrize("page_size", [1, 3, 4])
@pytest.mark.parametrize("num_drafts", [0, 1, 4])
def test_undo_gives_back_what_was_taken_for_drafts(page_size, num_drafts):
    played = with_drafts(4, page_size=page_size)
    request = decoding(played, 7)
    played.verify(request, [60, 61], 1, 90)
    before = counts(played.cache)
    for _ in range(3):
        with pytest.raises(Broken), played.cache.open((), lambda request: num_drafts) as ticket:
            assert ticket.grow(request, request.num_committed)
            assert ticket.look_ahead(request, 9) == num_drafts
            assert len(ticket.state_write[request.id]) == 1 + num_drafts
            stop = request.num_committed + num_drafts
            assert len(played.cache.tables[request.id].pages) == pages_needed(stop, page_size)
            ticket.keep_states(request, stop)
            played.compute(ticket, request, request.num_committed, [WRONG] * num_drafts)
            raise Broken
        assert counts(played.cache) == before
        played.check([request])
    played.verify(request, [60, 61], 2, 91)
    played.cache.release(request, keep=True)
    played.check_idle()


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("num_drafts", [1, 4])
def test_who_leaves_or_gives_way_with_drafts_gives_all_back(num_drafts, keep):
    played = with_drafts(4)
    request, other = decoding(played, 7), decoding(played, 5, "other")
    with played.cache.open((), lambda request: num_drafts) as ticket:
        for one in (request, other):
            assert ticket.grow(one, one.num_committed) and ticket.look_ahead(one, 9) == num_drafts
            ticket.keep_states(one, one.num_committed + num_drafts)
            played.compute(ticket, one, one.num_committed, [WRONG] * num_drafts)
        ticket.abandon(request, keep)
        ticket.preempt(other)
    assert not played.cache.holders
    played.check_idle()


@pytest.mark.parametrize("every", [1, 3, 4])
@pytest.mark.parametrize("length", [5, 6, 7, 8])
def test_a_state_that_a_verify_run_passes_is_kept_at_its_count_if_it_was_accepted(every, length):  # faults A4, A6
    for num_drafts, num_right in product((0, 1, 3, 5), range(6)):
        played = with_drafts(every, num_states=40)
        request = decoding(played, length)
        before, start = kept_counts(played, request), request.num_computed
        played.verify(request, [60, 61, 62, 63, 64][:num_drafts], num_right, 90)
        points = {count for count in range(start + 1, request.num_computed + 1) if count % every == 0}
        assert kept_counts(played, request) == before | points
        for count in range(start + 1, request.num_committed + 1):
            found = played.cache.prefixes.find(ask("another", [*request.tokens[:count], WRONG])).num_tokens
            assert found == max(point for point in before | points if point <= count)
        # Nobody finds what the model has computed behind a draft that was turned down.
        rejected = [*request.tokens[:-1], *[60, 61, 62, 63, 64][request.num_computed - length - 1 : num_drafts], WRONG]
        assert played.cache.prefixes.find(ask("another", rejected)).num_tokens <= request.num_computed
        played.cache.release(request)
        played.check_idle()


@pytest.mark.parametrize("num_drafts", [(3, 0, 2, 0), (0, 4, 0, 0, 1), (5, 5, 0), (1, 2, 3, 4, 0)], ids=str)
@pytest.mark.parametrize("every", [1, 4, 64])
def test_any_pattern_of_counts_leaves_the_right_state(num_drafts, every):  # fault E4
    """Each step reads a state that has seen exactly the tokens before: `compute` and `check` fail on any other."""
    for page_size, right in product((1, 3, 4), ((0,), (1, 2), (9,), (0, 9), (2, 0, 9))):
        played = with_drafts(every, page_size=page_size, num_pages=64, num_states=60)
        request = decoding(played, 6)
        for number in range(8):
            count, num_right = num_drafts[number % len(num_drafts)], right[number % len(right)]
            played.verify(request, [60 + number] * count, num_right, 80 + number)
        played.cache.release(request, keep=True)
        played.check_idle()


@pytest.mark.parametrize("most, wanted, free_slots, free_pages, got", [
    (9, 3, 9, 9, 3), (2, 3, 9, 9, 2), (9, 0, 9, 9, 0), (9, 3, 1, 9, 1), (9, 3, 0, 9, 0),
    (9, 5, 9, 0, 2), (9, 5, 9, 1, 5), (9, 9, 9, 1, 6), (9, 9, 9, 2, 9),
])  # fmt: skip
def test_as_many_as_are_wanted_and_fit(most, wanted, free_slots, free_pages, got):
    """Six of eight places are used, so two drafts fit without a page, and four more with each."""
    played = with_drafts(64, num_states=4, num_rows=2, num_draft_slots=14)
    request = decoding(played, 5)
    with played.cache.open((), lambda request: wanted) as ticket:
        assert ticket.grow(request, 6)
        for _ in range(played.cache.states.num_free - free_slots):
            played.cache.states.take()
        played.cache.allocator.take(played.cache.allocator.num_free - free_pages)
        assert ticket.look_ahead(request, most) == got
        assert len(ticket.state_write[request.id]) == 1 + got
        assert len(played.cache.tables[request.id].pages) == pages_needed(6 + got, 4)


def test_without_anybody_who_wants_drafts_there_are_none():
    played = with_drafts()
    request = decoding(played, 5)
    with played.cache.open() as ticket:
        assert ticket.grow(request, 6) and ticket.look_ahead(request, 9) == 0


def test_drafts_take_pages_that_only_the_tree_holds():
    played = with_drafts(64, num_pages=4)
    played.serve(ask("before", [90] * 7, max_tokens=1))
    request = decoding(played, 4)
    assert played.cache.allocator.num_free == 1 and played.cache.num_takeable == 3  # and two more are needed
    assert played.verify(request, [60, 61, 62, 63, 64], 5, 91) == 5
    played.cache.release(request)
    played.check_idle()


@pytest.mark.parametrize("page_size", [1, 3, 4])
@pytest.mark.parametrize("num_drafts", range(1, 6))
def test_a_model_without_states_has_drafts_as_well(page_size, num_drafts):
    played = with_drafts(4, page_size=page_size, has_states=False)
    request = decoding(played, 6)
    for number in range(4):
        played.verify(request, [60 + number] * num_drafts, number, 90)
    played.cache.release(request, keep=True)
    played.check_idle()
    assert played.cache.slot_of.get(request.id, EMPTY) == EMPTY
