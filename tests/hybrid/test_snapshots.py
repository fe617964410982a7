"""Snapshots: who is dropped and who stays, and what is refused."""

from dataclasses import dataclass

import pytest

from minserve.deltanet.state_pool import StateError, StatePool
from minserve.hybrid.snapshots import Snapshots


@dataclass(frozen=True)
class Place:
    """A place of a snapshot, with a name of its own."""

    stop: int
    name: str = ""


def kept(pool, snapshots, stop, name=""):
    """A snapshot of its own slot, which nobody else holds. Changes: both."""
    place, slot = Place(stop, name), pool.take()
    pool.stamp(slot, stop)
    snapshots.put(place, slot)
    pool.release(slot)
    return place


@pytest.fixture
def pool():
    return StatePool(6)


@pytest.fixture
def snapshots(pool):
    return Snapshots(pool)


@pytest.mark.parametrize("stamp", [0, 7, 9, 16])
def test_a_state_of_another_count_is_refused_and_nothing_changes(pool, snapshots, stamp):  # fault A4
    slot = pool.take()
    pool.stamp(slot, stamp)
    with pytest.raises(StateError, match=f"has seen {stamp} tokens; its reader expects 8"):
        snapshots.put(Place(8), slot)
    assert not len(snapshots) and pool.ref_count(slot) == 1


def test_a_free_slot_is_refused(pool, snapshots):
    with pytest.raises(StateError, match="is free"):
        snapshots.put(Place(8), 3)
    assert not len(snapshots) and pool.num_free == 6


def test_what_is_there_already_stays_and_becomes_recent(pool, snapshots):
    first, second = kept(pool, snapshots, 8), kept(pool, snapshots, 16)
    slot, before = pool.take(), snapshots.slots
    pool.stamp(slot, 8)
    snapshots.put(first, slot)
    assert pool.ref_count(slot) == 1 and sorted(snapshots.slots) == sorted(before)
    pool.release(slot)
    snapshots.evict(1)
    assert first in snapshots and second not in snapshots


@pytest.mark.parametrize("used", range(4))
def test_only_the_state_that_is_used_becomes_recent(pool, snapshots, used):  # fault A15
    places = [kept(pool, snapshots, 4 * (i + 1)) for i in range(4)]  # as on one path, the shallowest first
    assert pool.ref_count(snapshots.use(places[used])) == 1
    order = [place for place in places if place is not places[used]] + [places[used]]
    for num_held in range(3, -1, -1):
        snapshots.evict(num_held)
        assert [place in snapshots for place in order] == [i >= 4 - num_held for i in range(4)]
    assert pool.num_free == 6


@pytest.mark.parametrize("reading", [{0}, {1}, {0, 1}, {0, 3}, {2}, {0, 1, 2, 3}])
@pytest.mark.parametrize("num_held", range(6))
def test_a_state_that_a_request_reads_is_never_dropped(pool, snapshots, reading, num_held):
    places = [kept(pool, snapshots, i + 1) for i in range(4)]
    for i in reading:
        pool.share(snapshots._slot_of[places[i]])
    snapshots.evict(num_held)
    others = [i for i in range(4) if i not in reading]
    stay = others[min(len(others), max(0, 4 - num_held)) :]
    assert [i for i in range(4) if places[i] in snapshots] == sorted([*reading, *stay])
    assert len(pool.held) == len(snapshots)
    snapshots.check()
    pool.check()


def test_a_dropped_state_is_free_only_when_its_reader_has_left(pool, snapshots):
    place = kept(pool, snapshots, 8)
    slot = snapshots.use(place)
    pool.share(slot)
    snapshots.drop(place)
    snapshots.drop(place)
    assert pool.ref_count(slot) == 1
    pool.expect(slot, 8)
    pool.release(slot)
    assert pool.num_free == 6


def test_check_names_a_slot_at_two_places_and_a_wrong_stamp(pool, snapshots):
    place = kept(pool, snapshots, 8)
    snapshots.check()
    slot = snapshots.use(place)
    pool.stamp(slot, 9)
    with pytest.raises(StateError, match="has seen 9 tokens; its reader expects 8"):
        snapshots.check()
    pool.stamp(slot, 8)
    snapshots.put(Place(8, "again"), slot)
    with pytest.raises(StateError, match="at two places"):
        snapshots.check()
