"""Slots for the memory that cannot be paged: one convolution tail and one matrix per head and layer, all or nothing.

A slot is valid for exactly one count of tokens, and says so: its stamp. A state that has seen n tokens is no use to a
request that stands at m, and nothing about its numbers shows it; so every reader names the count that it expects.

A step writes other slots than those that it reads. So a state that is to be kept is not copied: whoever wants it holds
a reference, and the slot is free when the last one is given back.
"""

from __future__ import annotations

from collections.abc import Collection

from minserve.errors import InvalidValue, MinserveError

EMPTY = -1  # read instead of a slot by a request that has computed nothing: the state of zeros


class StateError(MinserveError):
    """State bookkeeping that cannot be: a slot given back twice, or read for another count of tokens than its own."""


class StatePool:
    """Hands out state slots, counts who refers to each, and remembers how many tokens each has seen.

    Arguments:
        num_slots: ids are 0 .. num_slots - 1.

    >>> pool = StatePool(2)
    >>> slot = pool.take()
    >>> pool.stamp(slot, 8)
    >>> pool.share(slot)  # a snapshot, say: no copy
    >>> pool.release(slot), pool.ref_count(slot), pool.num_free
    (None, 1, 1)
    >>> pool.expect(slot, 9)
    Traceback (most recent call last):
    minserve.deltanet.state_pool.StateError: state slot 0 has seen 8 tokens; its reader expects 9
    """

    def __init__(self, num_slots: int):
        if num_slots < 1:
            raise InvalidValue("num_slots", num_slots, "at least 1", "EngineConfig.num_states or cache_bytes")
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._num_tokens: dict[int, int] = {}  # of held slots
        self._references: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        """Slots that nobody holds."""
        return len(self._free)

    @property
    def held(self) -> Collection[int]:
        """Slots that somebody holds."""
        return self._num_tokens.keys()

    def ref_count(self, slot: int) -> int:
        """How many refer to the slot."""
        return self._references.get(slot, 0)

    def take(self) -> int | None:
        """Take a slot, which has seen nothing yet; None when none is free. Changes: this pool."""
        if not self._free:
            return None
        slot = self._free.pop()
        self._num_tokens[slot], self._references[slot] = 0, 1
        return slot

    def share(self, slot: int) -> None:
        """Count one more reference to a slot. Changes: this pool. Errors: StateError for a free one."""
        if slot not in self._references:
            raise StateError(f"state slot {slot} is free; only a slot that somebody holds can be shared")
        self._references[slot] += 1

    def stamp(self, slot: int, num_tokens: int) -> None:
        """Say how many tokens the state in a slot has seen. Changes: the slot's stamp.

        Errors: StateError for a free slot, and for one that somebody else refers to: he relies on what it says.
        """
        if self.ref_count(slot) != 1:
            raise StateError(f"state slot {slot} has {self.ref_count(slot)} references and cannot be stamped")
        self._num_tokens[slot] = num_tokens

    def expect(self, slot: int, num_tokens: int) -> None:
        """Raise StateError unless the state has seen exactly so many tokens; `EMPTY` has seen none."""
        seen = 0 if slot == EMPTY else self._num_tokens.get(slot)
        if seen is None:
            raise StateError(f"state slot {slot} is free; its reader expects {num_tokens} tokens")
        if seen != num_tokens:
            raise StateError(f"state slot {slot} has seen {seen} tokens; its reader expects {num_tokens}")

    def release(self, slot: int) -> None:
        """Count one reference less to a slot. Changes: this pool. Errors: StateError for a free one."""
        if slot not in self._references:
            raise StateError(f"state slot {slot} is given back, and nobody holds it")
        self._references[slot] -= 1
        if not self._references[slot]:
            del self._references[slot], self._num_tokens[slot]
            self._free.append(slot)

    def check(self) -> None:
        """Raise StateError unless every slot is free once or held, and never both."""
        if len(set(self._free)) != len(self._free) or set(self._free) & self._num_tokens.keys():
            raise StateError(f"a state slot is free twice, or free and held: {sorted(self._free)}")
        if len(self._free) + len(self._num_tokens) != self.num_slots:
            raise StateError(f"{len(self._num_tokens)} held + {len(self._free)} free are not {self.num_slots} slots")
        if self._references.keys() != self._num_tokens.keys() or min(self._references.values(), default=1) < 1:
            raise StateError(f"held slots {sorted(self._num_tokens)} and references {self._references} do not agree")
