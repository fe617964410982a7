"""The ticket of a step: all that the step takes from the caches, and the only way to give it back.

Between planning a step and committing it, pages and state slots are taken that belong to nobody yet for good. Whatever
goes wrong in between, the model's error or a client who leaves, `undo` returns exactly these.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from minserve.batching.batcher import Entry
from minserve.request import Request

if TYPE_CHECKING:
    from minserve.hybrid.hybrid_cache import HybridCache


class Ticket:
    """What one step holds; the room that the batcher plans in. Made by `HybridCache.open`.

    Attributes:
        state_write: per request, the slot that gets its state after this step.
    """

    def __init__(self, cache: HybridCache, waiting: Sequence[Request] = ()):
        self.state_write: dict[Hashable, int] = {}
        self._cache, self._waiting = cache, waiting
        self._room_before: dict[Hashable, int] = {}
        self._kept: set[Hashable] = set()

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
        if self._cache.prefixes.is_awaited(request, hit):
            return Entry.LATER
        if not self._cache.admit(request, hit, spare_pages):
            return Entry.FULL
        self._cache.prefixes.begin(request, hit, self._waiting)
        return Entry.IN

    def stop_at(self, request: Request, stop: int) -> int:
        """Where a slice up to `stop` ends at the latest, so that the state after it can be kept."""
        return self._cache.prefixes.stop_at(request, stop)

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
            self.state_write[request.id] = states.take()
        if self._cache.prefixes.keeps(request, stop):
            self._kept.add(request.id)
        return True

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

    def settle(self, request: Request) -> tuple[int, bool]:
        """Leave to a request what this step took for it: its slot, and whether others shall find the state in it.

        Changes: the ticket.
        """
        self._room_before.pop(request.id, None)
        return self.state_write.pop(request.id), request.id in self._kept

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
        for slot in self.state_write.values():
            self._cache.states.release(slot)
        for request_id, before in self._room_before.items():
            if request_id in self._cache.tables:  # who left meanwhile has given all pages back
                self._cache.tables[request_id].shrink(before)
        self.state_write.clear()
        self._room_before.clear()

    def abandon(self, request: Request, keep: bool = False) -> None:
        """Give back what this step took for a request that left meanwhile, and all it held. Changes: the cache."""
        slot = self.state_write.pop(request.id, None)
        if slot is not None:
            self._cache.states.release(slot)
        self._room_before.pop(request.id, None)  # its pages are its table's, and go with that
        self._cache.release(request, keep)
