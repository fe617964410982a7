"""Snapshots: the states that are kept at places in the tree, so that a request can go on from there.

A snapshot is a reference to a slot, not a copy: the request that left the state behind writes its next one elsewhere.
States and pages have recencies of their own, for a node may lose its state and keep its pages.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Protocol

from minserve.deltanet.state_pool import StateError, StatePool


class Place(Protocol):
    """Where a snapshot is kept: a node of the tree, which ends after `stop` tokens."""

    stop: int


class Snapshots:
    """State slots by place, least recently used first.

    Arguments:
        states: the pool that the slots are of.
    """

    def __init__(self, states: StatePool):
        self._states = states
        self._slot_of: OrderedDict[Hashable, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._slot_of)

    def __contains__(self, place: Place) -> bool:
        return place in self._slot_of

    @property
    def slots(self) -> list[int]:
        """The slots of all snapshots."""
        return list(self._slot_of.values())

    def put(self, place: Place, slot: int) -> None:
        """Keep the state in a slot at a place; what is there already stays, for it is the same.

        Changes: these snapshots, the pool. Errors: StateError when the state has not seen the tokens up to there.
        """
        self._states.expect(slot, place.stop)
        if place in self._slot_of:
            self._slot_of.move_to_end(place)
        else:
            self._states.share(slot)
            self._slot_of[place] = slot

    def use(self, place: Place) -> int:
        """The slot at a place, to read from; it alone becomes recent, not those on the way to it. Changes: recency."""
        self._slot_of.move_to_end(place)
        return self._slot_of[place]

    def drop(self, place: Place) -> None:
        """Forget the state at a place, if there is one. Changes: these snapshots, the pool."""
        slot = self._slot_of.pop(place, None)
        if slot is not None:
            self._states.release(slot)

    def evict(self, num_held: int) -> None:
        """Forget the least recently used states that nobody else reads, until the pool has at most so many slots held.

        Changes: these snapshots, the pool.
        """
        surplus = len(self._states.held) - num_held
        if surplus > 0:
            alone = (place for place, slot in self._slot_of.items() if self._states.ref_count(slot) == 1)
            for place, _ in zip(list(alone), range(surplus), strict=False):
                self.drop(place)

    def check(self) -> None:
        """Raise StateError unless each snapshot's slot is held, and has seen the tokens up to its place."""
        if len(set(self._slot_of.values())) != len(self._slot_of):
            raise StateError(f"a slot is kept at two places: {self.slots}")
        for place, slot in self._slot_of.items():
            self._states.expect(slot, place.stop)
