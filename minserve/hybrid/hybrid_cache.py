"""The hybrid cache: who holds which pages and which state, and what of it others may start from. It keeps count; the
tensors are in `cache_memory`.

A request owns a page table, which grows, and one state slot, which does not. A step never writes the state that it
reads: it writes to a second slot, and with drafts to one more for each, and `commit` makes the one at the request's new
count its own and lets go of the others; pages behind that count go back. If somebody still wants the first one, it is a
snapshot: kept in the tree, at no cost but its slot.

    tokens computed     pages (grow)            state (is replaced)
    0                   -                       reads EMPTY, writes a
    16                  [ p0 p1 ]               owns a; the tree keeps p0, p1 and, if 16 is a point for one, a
    17                  [ p0 p1 p2 ]            owns b; a is free again, or the tree's alone
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from itertools import chain

from minserve.deltanet.state_pool import EMPTY, StateError, StatePool
from minserve.engine_config import CacheSizes
from minserve.hybrid.draft_entries import DraftEntries
from minserve.hybrid.prefixes import Hit, Prefixes
from minserve.hybrid.snapshots import Snapshots
from minserve.hybrid.ticket import Ticket
from minserve.paging.page_table import PageError, PageTable, check_references, pages_needed
from minserve.parts import Parts
from minserve.request import Request


class HybridCache:
    """Pages, state slots and the tree of all requests, behind one admission.

    Arguments:
        sizes: of the pools; `num_states` slots are for running requests and snapshots, the others for a step.
        snapshot_every: tokens between two snapshots of a request.
        prefix_cache: whether anything is kept for others.
        parts: what of this a reader has replaced.
        copy_page: copies one page's contents to another; nothing unless given, for a cache without tensors.
    Attributes:
        tables: page table by request id.
        slot_of: state slot by request id; none before the first step.
        states: the pool of slots.
        allocator: the pool of pages.
        tree, snapshots: pages and states that are kept for others; no snapshots for a model without states.
        prefixes: where running requests stand in them.
        entries: which of the draft head's keys and values the pages hold.
    """

    def __init__(
        self, sizes: CacheSizes, snapshot_every: int = 256, prefix_cache: bool = True, parts: Parts | None = None,
        copy_page: Callable[[int, int], None] | None = None,
    ):  # fmt: skip
        parts = parts or Parts()
        self.page_size, self._num_states = sizes.page_size, sizes.num_states
        self._copy_page = copy_page or (lambda source, target: None)
        self.allocator = parts.page_allocator(sizes.num_pages)
        self.states: StatePool = parts.state_pool(sizes.num_slots)
        self.tree = parts.radix_tree(self.allocator, sizes.page_size)
        self.snapshots = Snapshots(self.states) if sizes.state_bytes else None
        self.prefixes = Prefixes(
            self.tree, self.snapshots, sizes.page_size, snapshot_every, parts.match_hybrid, prefix_cache
        )
        self.entries = DraftEntries(sizes.num_pages, sizes.page_size)
        self.tables: dict[Hashable, PageTable] = {}
        self.slot_of: dict[Hashable, int] = {}

    @property
    def num_takeable(self) -> int:
        """Pages that a step can have: free ones, and those that only the tree holds and nobody reads."""
        return self.allocator.num_free + self.tree.num_evictable

    @property
    def holders(self) -> set[Hashable]:
        """The requests that hold anything."""
        return {*self.tables, *self.slot_of} | self.prefixes.holders

    def open(self, waiting: Sequence[Request] = (), wanted: Callable[[Request], int] | None = None) -> Ticket:
        """A ticket for the next step, with nothing on it; for a step into which some of `waiting` may be let.

        Arguments:
            wanted: how many drafts a request wants; none unless given.
        """
        return Ticket(self, waiting, wanted)

    def pages_needed(self, num_tokens: int) -> int:
        """How many pages so many tokens of one request take."""
        return pages_needed(num_tokens, self.page_size)

    def admit(self, request: Request, hit: Hit, spare_pages: int) -> bool:
        """Let a request in with what it reuses, if its tokens and one more fit beside `spare_pages` other pages.

        Where the hit ends inside a page, the request gets a copy of it to write on. Where it is the only one
        here and does not fit beside what it reuses, it is let in with nothing reused.
        Changes: this cache and the request's count of computed tokens; or nothing, and then False.
        """
        cached, slot = self.prefixes.lock(request, hit)
        num_full = hit.num_tokens // self.page_size
        num_tokens = min(request.num_committed + 1, request.max_computed)
        fits = spare_pages + self.pages_needed(num_tokens) - num_full <= self.num_takeable
        table = PageTable(self.allocator, self.page_size)
        table.share(cached[:num_full])
        if not (fits and self.grow(table, hit.num_tokens)):
            table.release()
            self.prefixes.leave(request)
            return bool(hit.num_tokens and not self.tables) and self.admit(request, self.prefixes.miss(request), 0)
        self.tables[request.id] = table
        if len(cached) > num_full:
            self._copy(cached[-1], table.pages[-1], hit.num_tokens)
        if slot != EMPTY:
            self.states.share(slot)
            self.slot_of[request.id] = slot
        request.reuse(hit.num_tokens)
        return True

    def grow(self, table: PageTable, stop: int) -> bool:
        """Give a table pages up to token `stop`, evicting what is needed. Changes: this cache; or nothing: False."""
        num_before = len(table.pages)
        missing = self.pages_needed(stop) - num_before
        if missing > self.num_takeable and [*self.tables.values()] == [table]:
            # A path holds a page twice where somebody went on from the middle of it. The only one here needs no path.
            self.prefixes.let_go(next(iter(self.tables)))
        if missing > self.num_takeable:
            return False
        if missing > self.allocator.num_free:
            self.prefixes.evict(missing - self.allocator.num_free)
        if not table.grow(stop):
            return False
        self.entries.clear(table.pages[num_before:])
        return True

    def commit(self, ticket: Ticket, request: Request, publish: bool = False) -> None:
        """Make what the ticket holds for a request its own, after `request.commit`, and keep what others may want.

        Arguments:
            publish: add its tokens to the tree even where its state is not to be kept.
        Changes: this cache, the ticket.
        """
        slot, kept, is_kept, unused = ticket.settle(request)
        self.states.stamp(slot, request.num_computed)
        old = self.slot_of.get(request.id)
        self.slot_of[request.id] = slot
        if old is not None:
            unused.append(old)
        for num_tokens, at in kept:
            self.states.stamp(at, num_tokens)
            self._publish(request, num_tokens, at)
            unused.append(at)
        for at in unused:
            self.states.release(at)
        self.tables[request.id].shrink(request.num_computed)
        if publish or is_kept:
            self._publish(request, request.num_computed, slot if is_kept else None)

    def fork(self, request: Request, child: Request) -> bool:
        """Let a child go on from where a request stands: full pages and the state are shared, the last page is copied.

        The request's tokens have just been published, so that the child can hold on to the same place in the tree. The
        child's counts are the caller's to move afterwards. Changes: this cache; or nothing, and then False.
        """
        table = self.tables[request.id]
        if request.num_computed % self.page_size and not self.allocator.num_free and self.num_takeable:
            self.prefixes.evict(1)
        forked = table.fork(request.num_computed)
        if forked is None:
            return False
        self.tables[child.id], copies = forked
        for source, target in copies:
            self._copy(source, target, request.num_computed)
        self.slot_of[child.id] = self.slot_of[request.id]
        self.states.share(self.slot_of[child.id])
        self.prefixes.fork(request, child)
        return True

    def release(self, request: Request, keep: bool = False) -> None:
        """Take back all that a request owns; nothing where it owns nothing.

        Arguments:
            keep: leave its tokens and its state to those who come after it; its own slot is the snapshot.
        Changes: this cache.
        """
        if keep and self.slot_of.get(request.id, EMPTY) != EMPTY and request.num_computed:
            with suppress(StateError):  # a state of other tokens, which its step has refused: nobody else is to have it
                self._publish(request, request.num_computed, self.state_of(request))
        table, slot = self.tables.pop(request.id, None), self.slot_of.pop(request.id, None)
        if table is not None:
            table.release()
        if slot is not None:
            self.states.release(slot)
        self.prefixes.leave(request)

    def state_of(self, request: Request) -> int:
        """The slot that a request goes on from; `EMPTY` at its beginning, and for a model that has no states.

        Errors: StateError when the state in it has not seen exactly the request's computed tokens.
        """
        slot = self.slot_of.get(request.id, EMPTY)
        if slot != EMPTY or self.snapshots is not None:
            self.states.expect(slot, request.num_computed)
        return slot

    def take_for_snapshot(self) -> int | None:
        """A slot to keep a state in, of the oldest snapshot if need be; None where all are in use. Changes: this cache.

        Only for slots that no row of the step needs any more.
        """
        if not self.states.num_free:
            self.snapshots.evict(len(self.states.held) - 1)
        return self.states.take()

    def trim(self) -> None:
        """Drop the oldest snapshots that there is no slot for beside the running requests. Changes: this cache."""
        if self.snapshots is not None:
            self.snapshots.evict(self._num_states)

    def check(self) -> None:
        """Raise PageError, StateError or TreeError unless, between steps, all is owned by exactly those who hold it."""
        self.allocator.check()
        self.prefixes.check()
        check_references(self.allocator, chain(self.tables.values(), self.tree.nodes()))
        self.states.check()
        kept = [] if self.snapshots is None else self.snapshots.slots
        owned = sorted([*self.slot_of.values(), *kept])
        counted = sorted(chain.from_iterable([slot] * self.states.ref_count(slot) for slot in self.states.held))
        if owned != counted:
            raise StateError(f"slots {counted} are referred to; requests and snapshots own {owned}")
        if len(self.states.held) > self._num_states:
            raise StateError(f"{len(self.states.held)} slots are held between steps; num_states is {self._num_states}")
        for table in self.tables.values():
            self.entries.check(table)
        if self.prefixes.holders != {*self.tables}:
            raise PageError(f"requests {self.prefixes.holders} have a place in the tree, and {[*self.tables]} pages")

    def _copy(self, source: int, target: int, num_tokens: int) -> None:
        """Copy the page on which somebody's first `num_tokens` tokens end. Changes: the target page."""
        self._copy_page(source, target)
        self.entries.copy(source, target, num_tokens % self.page_size)

    def _publish(self, request: Request, num_tokens: int, slot: int | None) -> None:
        """Add a request's first tokens to the tree, and give up pages that the tree has, too. Changes: this cache."""
        if not self.prefixes.enabled:
            return
        table = self.tables[request.id]
        pages = self.prefixes.publish(request, num_tokens, table.pages[: self.pages_needed(num_tokens)], slot)
        if table.adopt(0, pages[: num_tokens // self.page_size]):
            self.entries.count_again(table)
