"""What requests find, whom they wait for, and where they keep states for one another."""

import pytest
from played_cache import PlayedCache, ask

from minserve.batching.batcher import Entry
from minserve.hybrid.prefixes import PATIENCE

A = tuple(range(20))


def fork_of(tokens, at, length=20):
    """A prompt that parts with another one at a position."""
    return (*tokens[:at], *(90 + i for i in range(length - at)))


def started(played, tokens, name="first", stop=1, **more):
    """A request that has come as far as `stop`. Changes: the cache."""
    request = ask(name, tokens, **more)
    assert played.admit(request) is Entry.IN
    while stop and request.num_computed < stop:
        played.run(request, stop)
    return request


@pytest.mark.parametrize("at", [0, 1, 3, 4, 5, 8, 15, 19])
@pytest.mark.parametrize("stop", [0, 1, 4, 8])
def test_a_request_waits_for_one_that_computes_a_page_more_than_it_can_reuse(at, stop):
    played = PlayedCache(snapshot_every=4)
    started(played, A, stop=stop)
    later = ask("later", fork_of(A, at))
    found = min(stop, at) // 4 * 4  # there are states at 4 and 8
    is_worth = at >= found + 4 and at > stop
    assert played.admit(later) is (Entry.LATER if is_worth else Entry.IN)
    assert later.num_computed == (0 if is_worth else found)


@pytest.mark.parametrize("has_states", [True, False])
@pytest.mark.parametrize("at", [5, 8, 11, 16, 19])
def test_who_has_waited_reuses_all_that_both_have_in_common(at, has_states):
    played = PlayedCache(snapshot_every=64, has_states=has_states)
    first, later = started(played, A, stop=0), ask("later", fork_of(A, at))
    while played.admit(later) is Entry.LATER:
        played.run(first, first.num_computed + 6)
        assert first.num_computed < 20 or played.admit(later) is not Entry.LATER
        if later.id in played.cache.tables:
            break
    assert at - 4 < later.num_computed <= at  # less than a page is not worth a wait
    assert not has_states or later.num_computed == at or at == 19
    played.check([first, later])


@pytest.mark.parametrize("at", [5, 9, 11])
def test_nobody_waits_for_what_has_been_computed_without_keeping_its_state(at):
    played = PlayedCache(snapshot_every=64)
    first, later = started(played, A, stop=12), ask("later", fork_of(A, at))
    assert played.admit(later) is Entry.IN and later.num_computed == 0
    played.check([first, later])


@pytest.mark.parametrize("waits", [True, False])
def test_a_request_keeps_its_state_at_a_few_partings_only(waits):
    played = PlayedCache(snapshot_every=64, page_size=2, num_pages=64)
    tokens = tuple(range(60))
    others = [ask(at, fork_of(tokens, at, 60)) for at in range(4, 44, 2)]
    first = ask("first", tokens)
    if waits:
        assert played.admit(first) is Entry.IN
        assert {played.admit(other) for other in others} == {Entry.LATER}
    else:
        with played.cache.open([first, *others]) as ticket:
            assert ticket.admit(first, 0) is Entry.IN
    points = played.cache.prefixes.points(first, 60)
    assert points[:-1] == list(range(4, 20, 2)) and points[-1] == 58


def test_patience_ends_even_if_the_other_one_stands_still():
    played = PlayedCache()
    first, later = started(played, A, stop=0), ask("later", A)
    entries = [played.admit(later) for _ in range(PATIENCE + 1)]
    assert entries == [Entry.LATER] * PATIENCE + [Entry.IN] and later.num_computed == 0
    played.run(first)
    played.run(later)
    played.check([first, later])


def test_patience_lasts_as_long_as_the_other_one_gets_on():
    played = PlayedCache(page_size=2)
    first, later = started(played, A, stop=0), ask("later", A)
    for stop in range(1, 18):
        assert {played.admit(later) for _ in range(PATIENCE // 2)} == {Entry.LATER}
        played.run(first, stop)
    played.run(first)
    assert played.admit(later) is Entry.IN and later.num_computed == 19
    played.check([first, later])


def test_who_left_is_not_waited_for():  # fault C9
    played = PlayedCache()
    first, later = started(played, A, stop=0), ask("later", A)
    assert played.admit(later) is Entry.LATER
    played.cache.release(first, keep=True)
    assert played.admit(later) is Entry.IN and later.num_computed == 0


def test_nobody_waits_for_one_that_has_its_prompt_computed():
    played = PlayedCache()
    first = started(played, A, stop=0)
    while first.num_computed < 20:
        played.run(first, new_ids=[7])
    later = ask("later", A)
    assert played.admit(later) is Entry.IN and later.num_computed == 16


@pytest.mark.parametrize("salts", [(None, "a"), ("a", None), ("a", "b"), ("1", None)])
def test_nobody_waits_for_another_salt_or_finds_it(salts):  # fault C7
    played = PlayedCache()
    first, later = started(played, A, stop=0, salt=salts[0]), ask("later", A, salt=salts[1])
    played.run(first, 4)
    assert played.admit(later) is Entry.IN and later.num_computed == 0
    same = ask("same", A, salt=salts[0])
    assert played.admit(same) is Entry.LATER
    played.check([first, later])


def test_nobody_waits_for_other_weights_or_finds_what_they_computed():
    played = PlayedCache()
    first, later = started(played, A, stop=8), ask("later", A)
    assert played.cache.prefixes.find(later).num_tokens == 8
    played.cache.prefixes.new_version()
    assert played.admit(later) is Entry.IN and later.num_computed == 0
    while first.num_computed < 20:
        played.run(first)
    played.run(later)
    played.check([first, later])
    played.cache.release(first, keep=True)
    third = ask("third", A)
    assert played.cache.prefixes.find(third).num_tokens <= later.num_computed
    played.cache.release(later, keep=True)
    played.check_idle()


@pytest.mark.parametrize("prefix_cache, scored", [(True, True), (False, False)])
def test_who_wants_a_prompt_scored_neither_waits_nor_finds(prefix_cache, scored):
    played = PlayedCache(prefix_cache=prefix_cache)
    assert played.serve(ask("before", A, scored=scored), output=[1, 2]) == 0
    running = started(played, A, stop=0)
    later = ask("later", A, scored=scored)
    assert played.admit(later) is Entry.IN and later.num_computed == 0
    for request in (running, later):
        played.cache.release(request)
    played.check_idle()


@pytest.mark.parametrize("at", [4, 5, 6, 7, 12, 19])
def test_the_second_to_part_at_a_place_finds_a_state_there(at):
    played = PlayedCache(snapshot_every=64)
    played.serve(ask("first", A), output=[1])
    assert played.serve(ask("second", fork_of(A, at, 22)), output=[1]) == (16 if at == 19 else 0)
    wanted = 16 if at == 19 else at  # three tokens more are not worth a state
    assert played.serve(ask("third", (*A[:at], 70, 71)), output=[1]) == wanted
    played.check_idle()


def test_find_changes_no_recency():
    played = PlayedCache(snapshot_every=64, num_states=2)
    for i in range(2):
        played.serve(ask(i, [i, 0, 0]), output=[1])
    for _ in range(3):
        assert played.cache.prefixes.find(ask("look", [0, 0, 0, 1, 1])).num_tokens == 3
    played.serve(ask(2, [2, 0, 0]), output=[1])
    found = [played.cache.prefixes.find(ask("look", [i, 0, 0, 1, 1])).num_tokens for i in range(3)]
    assert found == [0, 3, 3]
    played.check_idle()
