"""The ticket of a step: all that the step takes from the caches, and the only way to give it back.

Between planning a step and committing it, pages and state slots are taken that belong to nobody yet for good. Whatever
goes wrong in between, the model's error or a client who leaves, `undo` returns exactly these.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from minserve.batching.batcher import Entry
from minserve.request import Request

if TYPE_CHECKING:
    from minserve.hybrid.hybrid_cache import HybridCache

MOST_STATES = 8  # kept inside one slice: each is a pass more over the DeltaNet layers


class Settled(NamedTuple):
    """What a step leaves to a request.

    Fields: `slot` of its state; `kept`, (count, slot) of each state before that one which others shall find; `is_kept`,
    whether they shall find the last one; `unused`, slots of states that nobody needs.
    """

    slot: int
    kept: list[tuple[int, int]]
    is_kept: bool
    unused: list[int]


class Ticket:
    """What one step holds; the room that the batcher plans in. Made by `HybridCache.open`.

    Arguments:
        cache: where all is taken from.
        waiting: requests that may be let in.
        wanted: how many drafts a request wants.
    Attributes:
        state_write: per request, the slots that get its states: after its last known token, and after each draft.
        state_between: per request, slots for states that are to be kept inside its slice, by count of tokens, in order.
    """

    def __init__(
        self, cache: HybridCache, waiting: Sequence[Request] = (), wanted: Callable[[Request], int] | None = None
    ):
        self.state_write: dict[Hashable, list[int]] = {}
        self._cache, self._waiting, self._wanted = cache, waiting, wanted
        self._start: dict[Hashable, int] = {}  # tokens computed before this step
        self._stop: dict[Hashable, int] = {}  # tokens known: the first slot of state_write is for these
        self.state_between: dict[Hashable, list[tuple[int, int]]] = {}
        self._room_before: dict[Hashable, int] = {}
        self._points: dict[Hashable, list[int]] = {}  # after these counts others shall find the state

    @property
    def free_pages(self) -> int:
        """Pages that can be taken."""
        return self._cache.num_takeable

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self._cache.page_size

    def cached_tokens(self, request: Request) -> int:
        """How many tokens of a request that waits could be reused now."""
        return self._cache.prefixes.find(request).num_tokens

    def admit(self, request: Request, spare_pages: int) -> Entry:
        """Let a request in, if all its tokens and one more fit beside `spare_pages` others.

        Its cached tokens are counted as computed from now on. Changes: the cache, the request.
        """
        hit = self._cache.prefixes.find(request)
        if self._cache.prefixes.waits_for_another(request, hit):
            return Entry.LATER
        if not self._cache.admit(request, hit, spare_pages):
            return Entry.FULL
        self._cache.prefixes.begin(request, hit, self._waiting)
        return Entry.IN

    def grow(self, request: Request, stop: int) -> bool:
        """Take the pages for the tokens up to stop, and a slot for the state after them; all, or nothing and False.

        Changes: the cache.
        """
        table, states = self._cache.tables[request.id], self._cache.states
        needs_slot = request.id not in self.state_write
        if needs_slot and not states.num_free:
            return False
        before = table.capacity
        if stop > before:
            if not self._cache.grow(table, stop):
                return False
            self._room_before.setdefault(request.id, before)
        if needs_slot:
            self.state_write[request.id] = [states.take()]
        self._start[request.id], self._stop[request.id] = request.num_computed, stop
        return True

    def look_ahead(self, request: Request, most: int) -> int:
        """Take pages and slots for drafts behind a slice, as many as are wanted and there are; how many.

        Changes: the cache.
        """
        num_drafts = min(most, self._wanted(request) if self._wanted else 0, self._cache.states.num_free)
        table, stop = self._cache.tables[request.id], self._stop[request.id]
        room = table.capacity - stop + self._cache.num_takeable * self.page_size
        num_drafts = max(0, min(num_drafts, room))
        if stop + num_drafts > table.capacity:
            self._room_before.setdefault(request.id, table.capacity)
            self._cache.grow(table, stop + num_drafts)
        self.state_write[request.id] += [self._cache.states.take() for _ in range(num_drafts)]
        return num_drafts

    def keep_states(self, request: Request, stop: int) -> None:
        """Note which states that a slice up to `stop` passes others may want; take slots for them, as far as there are.

        After all of a step's slices are planned. The last ones go first: they save the most. Behind the tokens that
        are known every state has a slot already. Changes: the cache.
        """
        points = self._points[request.id] = self._cache.prefixes.points(request, stop)
        inside = [point for point in points if point < self._stop[request.id]]
        taken = []
        for point in reversed(inside[-MOST_STATES:]):
            slot = self._cache.take_for_snapshot()
            if slot is None:
                break
            taken.append((point, slot))
        if taken:
            self.state_between[request.id] = taken[::-1]

    def missing(self, request: Request, stop: int) -> int:
        """How many pages are to be taken yet for the tokens up to stop."""
        return max(0, self._cache.pages_needed(stop) - self.pages_held(request))

    def pages_held(self, request: Request) -> int:
        """How many pages the request holds."""
        table = self._cache.tables.get(request.id)
        return len(table.pages) if table is not None else 0

    def preempt(self, request: Request) -> None:
        """Take back all that a request holds, in this step and from before; it starts again. Changes: the cache.

        What it has computed stays in the tree as long as nobody needs the room, for it to find again.
        """
        self.abandon(request, keep=True)
        request.restart()

    def state_read(self, request: Request) -> int:
        """The slot that the request's slice continues from, see `HybridCache.state_of`.

        Errors: StateError when the state in it has not seen exactly the request's computed tokens.
        """
        return self._cache.state_of(request)

    def settle(self, request: Request) -> Settled:
        """Leave to a request what this step took for it, as far as its count has come. Changes: the ticket."""
        self._room_before.pop(request.id, None)
        slots, stop = self.state_write.pop(request.id), self._stop.pop(request.id)
        self._start.pop(request.id)
        kept, points = self.state_between.pop(request.id, []), self._points.pop(request.id, ())
        last = request.num_computed - stop
        kept += [(stop + at, slot) for at, slot in enumerate(slots[:last]) if stop + at in points]
        unused = [slot for at, slot in enumerate(slots) if at > last or (at < last and stop + at not in points)]
        return Settled(slots[last], kept, request.num_computed in points, unused)

    def __enter__(self) -> Ticket:
        """The ticket itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        """Undo what is not settled, where the step did not come to its end. Changes: the cache."""
        if kind is not None:
            self.undo()
        self._cache.trim()

    def undo(self) -> None:
        """Give back all that this step took; who was let in keeps what was cached, and is still let in.

        Changes: the cache.
        """
        for request_id in [*self.state_write]:
            self._give_back_slots(request_id)
        tables = self._cache.tables
        for request_id, before in self._room_before.items():
            if request_id in tables:  # who left meanwhile has given all pages back
                tables[request_id].shrink(before)
        for request_id, start in self._start.items():
            if request_id in tables:
                self._cache.entries.cut(tables[request_id], start)
        self._room_before.clear()

    def abandon(self, request: Request, keep: bool = False) -> None:
        """Give back what this step took for a request that left meanwhile, and all it held. Changes: the cache."""
        self._give_back_slots(request.id)
        self._room_before.pop(request.id, None)  # its pages are its table's, and go with that
        self._cache.release(request, keep)

    def _give_back_slots(self, request_id: Hashable) -> None:
        """Give back the slots that this step took for a request. Changes: the cache."""
        slots = [slot for _, slot in self.state_between.pop(request_id, ())]
        slots += self.state_write.pop(request_id, ())
        for slot in slots:
            self._cache.states.release(slot)
