"""Admission, forks, adoption and release of the hybrid cache, one at a time, with contents that are played."""

import pytest
from played_cache import PlayedCache, ask, path_tokens

from minserve.batching.batcher import Entry
from minserve.deltanet.state_pool import StateError

A = tuple(range(24))


def counts(cache):
    """Everything that a failed admission has to leave as it was."""
    return (
        cache.allocator.num_free, [cache.allocator.ref_count(page) for page in range(cache.allocator.num_pages)],
        {slot: cache.states.ref_count(slot) for slot in cache.states.held}, cache.holders, dict(cache.tables),
        dict(cache.slot_of), cache.tree.num_protected, cache.num_takeable, len(cache.snapshots),
    )  # fmt: skip


def running(played, tokens, name, output=(), stop=None, **more):
    """A request that has computed its prompt, or up to `stop`. Changes: the cache."""
    request = ask(name, tokens, **more)
    assert played.admit(request) is Entry.IN
    stop = stop or len(tokens)
    while request.num_computed < stop:
        played.run(request, stop, new_ids=output)
    return request


@pytest.mark.parametrize("num_hit", [8, 16, 20])
@pytest.mark.parametrize("num_pages", [8, 9, 10])
def test_an_admission_that_fails_a_hundred_times_takes_nothing(num_hit, num_pages):  # fault A7
    played = PlayedCache(num_pages=num_pages)
    played.serve(ask("before", A[:num_hit], max_tokens=1))
    other = running(played, [50 + i for i in range(4 * num_pages - 24)], "other")
    request = ask("again", (*A[:num_hit], *range(60, 88 - num_hit)))
    played.admit(request)  # the first time may cut an edge of the tree
    before = counts(played.cache)
    for _ in range(100):
        assert played.admit(request) is Entry.FULL
        assert counts(played.cache) == before and request.num_computed == 0
        played.check([other])
    played.cache.release(other)
    assert played.admit(request) is Entry.IN and request.num_computed == num_hit
    played.cache.release(request)
    played.check_idle()


@pytest.mark.parametrize("page_size", [1, 3, 4, 5, 16])
@pytest.mark.parametrize("num_hit", [1, 2, 3, 4, 5, 7, 8])
def test_a_page_that_a_hit_ends_inside_is_copied_and_full_ones_are_shared(page_size, num_hit):
    played = PlayedCache(page_size=page_size)
    played.serve(ask("before", A[:num_hit], max_tokens=1))
    request = ask("now", (*A[:num_hit], 90, 91))
    assert played.admit(request) is Entry.IN and request.num_computed == num_hit
    table, num_full = played.cache.tables["now"], num_hit // page_size
    cached = played.cache.tree.pages(played.cache.prefixes._node_of["now"])
    assert table.pages[:num_full] == cached[:num_full] and len(table.pages) == len(cached) == -(-num_hit // page_size)
    assert not {*table.pages[num_full:]} & {*cached}
    played.run(request)
    played.check([request])
    played.cache.release(request)
    played.check_idle()


@pytest.mark.parametrize("length", [4, 5, 8, 11, 12])
def test_who_computes_what_the_tree_has_adopts_its_full_pages(length):  # fault C9
    played = PlayedCache()
    twins = [ask(name, A[:length], scored=True) for name in "ab"]  # who is scored neither waits nor reuses
    for twin in twins:
        assert played.admit(twin) is Entry.IN
    with played.cache.open() as ticket:
        for twin in twins:
            assert ticket.grow(twin, length)
            played.compute(ticket, twin, length)
        for twin in twins:
            twin.commit(length, [7])
            played.cache.commit(ticket, twin, publish=True)
    first, second = (played.cache.tables[twin.id].pages for twin in twins)
    full = length // 4
    assert first[:full] == second[:full] and not {*first[full:]} & {*second[full:]}
    assert played.cache.allocator.num_free == 32 - full - 2 * (length % 4 > 0)
    for token, twin in enumerate(twins, start=80):
        played.run(twin, new_ids=[token], publish=False)
    played.check(twins)
    for twin in twins:
        played.cache.release(twin, keep=True)
    played.check_idle()


@pytest.mark.parametrize("length", [3, 4, 5, 8, 9])
def test_a_fork_shares_what_is_full_and_goes_on_by_itself(length):
    played = PlayedCache()
    parent, child = running(played, A[:length], "parent", output=[7]), ask("child", A[:length])
    assert played.cache.fork(parent, child)
    child.commit(length, [9])
    played.kind_of["child"] = played.kind_of["parent"]
    first, second = (played.cache.tables[name].pages for name in ("parent", "child"))
    assert first[: length // 4] == second[: length // 4] and len({*first, *second}) == len(first) + (length % 4 > 0)
    played.check([parent, child])
    for token in (1, 2, 3):
        played.run(parent, new_ids=[token], publish=False)
        played.run(child, new_ids=[token + 20], publish=False)
    played.check([parent, child])
    played.cache.release(parent, keep=True)
    played.check([child])
    played.cache.release(child, keep=True)
    assert played.cache.prefixes.find(ask("x", [*parent.tokens, 0])).num_tokens == length + 3
    assert played.cache.prefixes.find(ask("x", [*child.tokens, 0])).num_tokens == length + 3
    played.check_idle()


def test_a_fork_without_a_page_changes_nothing():
    """Leaves that share their pages with what is locked would free nothing: they stay, and so do their states."""
    played = PlayedCache(num_pages=3, snapshot_every=64)
    played.serve(ask("before", A[:7], max_tokens=1))
    parent = running(played, A[:6], "parent", output=[7])  # a copy of the page that it shares
    before = counts(played.cache)
    assert not played.cache.num_takeable
    assert not played.cache.fork(parent, ask("child", A[:6]))
    assert counts(played.cache) == before
    played.check([parent])


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("num_output", [1, 2, 5])
def test_release_keeps_tokens_and_state_or_neither(keep, num_output):
    played = PlayedCache(snapshot_every=64)
    played.serve(ask("first", A[:10]), output=[70, 71, 72, 73, 74][:num_output], keep=keep)
    hit = played.cache.prefixes.find(ask("again", (*A[:10], 70, 71, 72, 73, 74, 75)))
    assert (hit.num_tokens, hit.match.num_tokens) == ((9 + num_output,) * 2 if keep else (8, 10))
    played.check_idle()


def test_release_of_one_that_owns_nothing_is_nothing():
    played = PlayedCache()
    before = counts(played.cache)
    for keep in (True, False):
        played.cache.release(ask("nobody", A), keep)
    assert counts(played.cache) == before
    request = ask("fresh", A)
    played.admit(request)
    played.cache.release(request, keep=True)  # nothing is computed yet
    assert counts(played.cache) == before


def test_a_state_that_does_not_fit_is_kept_for_nobody():  # faults A1, A7
    played = PlayedCache(snapshot_every=4)
    request = running(played, A[:8], "first", stop=4)
    request.num_computed = 7
    with pytest.raises(StateError, match="has seen 4 tokens; its reader expects 7"):
        played.cache.state_of(request)
    played.cache.release(request, keep=True)
    assert not [node for node in played.cache.tree.nodes() if len(path_tokens(node)) > 4]
    played.check_idle()


@pytest.mark.parametrize("num_states", [1, 2, 3, 5])
def test_trim_drops_the_oldest_states_and_running_ones_never(num_states):
    played = PlayedCache(num_states=num_states, num_rows=1, snapshot_every=64)
    prompts = [[i] * 3 for i in range(6)]
    for i, tokens in enumerate(prompts):
        played.serve(ask(i, tokens, max_tokens=1))
        assert len(played.cache.states.held) == min(i + 1, num_states)
    request = running(played, [90, 91], "runs")
    found = [played.cache.prefixes.find(ask("x", [*tokens, 0])).num_tokens for tokens in prompts]
    assert found == [0] * (7 - num_states) + [3] * (num_states - 1)
    played.check([request])
    played.cache.release(request)
    played.check_idle()


@pytest.mark.parametrize("num_old", [0, 1, 2, 3])
def test_states_inside_a_slice_take_the_slots_of_older_ones(num_old):
    played = PlayedCache(num_states=3, num_rows=1)
    for i in range(num_old):
        played.serve(ask(i, [50 + i] * 3, max_tokens=1))
    request = running(played, A, "new")  # one slice, past 8 and 16, to the end of it
    assert played.cache.prefixes.find(ask("x", (*A[:16], 90))).num_tokens == 16
    assert len(played.cache.states.held) == 3
    played.check([request])
    played.cache.release(request)
    played.check_idle()


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_without_a_prefix_cache_nothing_is_kept(prefix_cache):
    played = PlayedCache(prefix_cache=prefix_cache)
    for name in "ab":
        cached = played.serve(ask(name, A[:9]), output=[1, 2])
    assert cached == (8 if prefix_cache else 0)
    assert (played.cache.allocator.num_free == 32) == (not prefix_cache)
    played.check_idle()
