"""The hybrid cache: who holds which pages and which state slot. It keeps count; the tensors are in `cache_memory`.

A request owns a page table, which grows, and one state slot, which does not. A step never writes the state that it
reads: it writes to a second slot, and `commit` makes that the request's own and sets the first one free.

    tokens computed     pages (grow)            state (is replaced)
    0                   -                       reads EMPTY, writes a
    5                   [ p0 p1 ]               owns a, reads a, writes b
    6                   [ p0 p1 ]               owns b, a is free again
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from minserve.deltanet.state_pool import StateError, StatePool
from minserve.errors import InvalidValue
from minserve.hybrid.ticket import Ticket
from minserve.paging.page_table import Allocator, PageAllocator, PageTable, check_references, pages_needed
from minserve.request import Request


class Fork(NamedTuple):
    """What must be copied for a fork to be real: pages, each from where to where, and a state slot likewise."""

    pages: list[tuple[int, int]]
    state: tuple[int, int]


class HybridCache:
    """Pages and state slots of all running requests.

    Arguments:
        num_pages: in the pool.
        page_size: tokens per page.
        num_states: slots that running requests own, one each.
        num_rows: rows of a step at most: each needs one more slot while the step runs.
        allocator: hands out the pages; a `PageAllocator` unless given.
    Attributes:
        tables: page table by request id.
        slot_of: state slot by request id; none before the first step.
        states: the pool of slots.
        allocator: the pool of pages.
    """

    def __init__(
        self, num_pages: int, page_size: int, num_states: int, num_rows: int, allocator: Allocator | None = None
    ):  # fmt: skip
        if page_size < 1:
            raise InvalidValue("page_size", page_size, "at least 1", "EngineConfig.page_size")
        self.page_size = page_size
        self.allocator = PageAllocator(num_pages) if allocator is None else allocator
        self.states = StatePool(num_states + num_rows)
        self.tables: dict[Hashable, PageTable] = {}
        self.slot_of: dict[Hashable, int] = {}

    def open(self) -> Ticket:
        """A ticket for the next step, with nothing on it."""
        return Ticket(self)

    def pages_needed(self, num_tokens: int) -> int:
        """How many pages so many tokens of one request take."""
        return pages_needed(num_tokens, self.page_size)

    def begin(self, request: Request) -> None:
        """Give a request that is let in an empty table. Changes: this cache."""
        self.tables[request.id] = PageTable(self.allocator, self.page_size)

    def commit(self, ticket: Ticket, request: Request) -> None:
        """Make what the ticket holds for a request its own, after `request.commit`. Changes: this cache, the ticket."""
        slot = ticket.settle(request)
        self.states.stamp(slot, request.num_computed)
        old = self.slot_of.get(request.id)
        self.slot_of[request.id] = slot
        if old is not None:
            self.states.release(old)

    def fork(self, request: Request, child: Request) -> Fork | None:
        """Let a child go on from where a request stands, sharing its full pages.

        The child's counts are the caller's to move afterwards. Returns what is to be copied; None, and no change, when
        there is no page or no slot. Changes: this cache.
        """
        slot = self.states.take()
        forked = None if slot is None else self.tables[request.id].fork(request.num_computed)
        if forked is None:
            if slot is not None:
                self.states.release(slot)
            return None
        self.tables[child.id], pages = forked
        self.states.stamp(slot, request.num_computed)
        self.slot_of[child.id] = slot
        return Fork(pages, (self.slot_of[request.id], slot))

    def release(self, request: Request) -> None:
        """Take back all that a request owns; nothing where it owns nothing. Changes: this cache."""
        table = self.tables.pop(request.id, None)
        if table is not None:
            table.release()
        slot = self.slot_of.pop(request.id, None)
        if slot is not None:
            self.states.release(slot)

    def check(self) -> None:
        """Raise PageError or StateError unless, between steps, all is owned by exactly those who hold it."""
        self.allocator.check()
        check_references(self.allocator, self.tables.values())
        self.states.check()
        if sorted(self.slot_of.values()) != sorted(self.states.held):
            raise StateError(f"slots {sorted(self.states.held)} are held; requests own {sorted(self.slot_of.values())}")
