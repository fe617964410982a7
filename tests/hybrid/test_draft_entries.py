"""The count of a draft head's entries: never one that is not there, whoever shares, copies or exchanges pages."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minserve.hybrid.draft_entries import DraftEntries
from minserve.paging.page_table import PageAllocator, PageTable

FEW = st.integers(0, 7)


class EntriesModel(RuleBasedStateMachine):
    """Requests of the same tokens, some of which a draft head follows.

    What is there is told here place by place: a page is a list of yes and no.
    """

    @initialize(page_size=st.integers(1, 4))
    def start(self, page_size):
        self.size, self.allocator = page_size, PageAllocator(24)
        self.entries = DraftEntries(24, page_size)
        self.there = [[False] * page_size for _ in range(24)]
        self.tables = [PageTable(self.allocator, page_size)]

    def pick(self, index):
        return self.tables[index % len(self.tables)]

    def num_there(self, table):
        """Entries without a gap, counted one by one."""
        flat = [is_there for page in table.pages for is_there in self.there[page]]
        return next((at for at, is_there in enumerate(flat) if not is_there), len(flat))

    @rule(index=FEW, num=st.integers(1, 6))
    def grow(self, index, num):
        table = self.pick(index)
        before = len(table.pages)
        if table.grow(table.capacity + num):
            self.entries.clear(table.pages[before:])
            for page in table.pages[before:]:
                self.there[page] = [False] * self.size

    @rule(index=FEW, num=st.integers(0, 9))
    def fill(self, index, num):
        """The head makes the next entries, as far as there are pages; those that others read it leaves alone."""
        table = self.pick(index)
        start = self.entries.num(table)
        shared = [at * self.size for at, page in enumerate(table.pages) if self.allocator.ref_count(page) > 1]
        stop = min([start + num, table.capacity, *(begin for begin in shared if begin + self.size > start)])
        if start < stop:
            self.entries.fill(table, stop)
            for position in range(start, stop):
                self.there[table.pages[position // self.size]][position % self.size] = True

    @rule(index=FEW, num=st.integers(0, 3))
    def drop_drafts(self, index, num):
        """Pages behind the entries were for drafts that were turned down."""
        table = self.pick(index)
        table.shrink(max(self.entries.num(table), table.capacity - num * self.size))

    @rule(index=FEW, num=st.integers(0, 20))
    def fork(self, index, num):
        """Somebody goes on from the middle: full pages are shared, and the one that is cut is copied."""
        table = self.pick(index)
        num = min(num, table.capacity)
        forked = table.fork(num) if len(self.tables) < 6 else None
        if forked is None:
            return
        self.tables.append(forked[0])
        for source, target in forked[1]:
            self.entries.copy(source, target, num % self.size)
            self.there[target] = self.there[source][: num % self.size] + [False] * (self.size - num % self.size)

    @precondition(lambda self: len(self.tables) > 1)
    @rule(index=FEW, other=FEW)
    def adopt(self, index, other):
        """A request exchanges full pages for another's, of the same tokens."""
        table, giver = self.pick(index), self.pick(other)
        num = min(len(table.pages), len(giver.pages))
        if table is not giver and table.adopt(0, giver.pages[:num]):
            self.entries.count_again(table)

    @precondition(lambda self: len(self.tables) > 1)
    @rule(index=FEW)
    def leave(self, index):
        table = self.pick(index)
        table.release()
        self.tables.remove(table)

    @invariant()
    def none_is_counted_that_is_not_there(self):
        if not hasattr(self, "tables"):
            return
        for table in self.tables:
            assert self.entries.num(table) <= self.num_there(table)
            fresh = PageTable(self.allocator, self.size)
            fresh.pages = table.pages  # a request that has just found these pages
            assert self.entries.num(fresh) == self.num_there(table)


TestEntries = EntriesModel.TestCase
TestEntries.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, derandomize=True, print_blob=False
)


def table_of(entries, allocator, num_tokens, page_size=4):
    """A request's table with room for so many tokens."""
    table = PageTable(allocator, page_size)
    assert table.grow(num_tokens)
    entries.clear(table.pages)
    return table


@pytest.mark.parametrize("page_size", [1, 3, 4])
@pytest.mark.parametrize("steps", [(1, 2, 3), (4, 5, 9), (12,), (3, 4, 8, 12), (5, 5, 5)], ids=str)
def test_entries_are_counted_from_the_first_on(page_size, steps):
    allocator, entries = PageAllocator(12), DraftEntries(12, page_size)
    table = table_of(entries, allocator, 12, page_size)
    assert entries.num(table) == 0
    for stop in steps:
        entries.fill(table, stop)
        assert entries.num(table) == stop
    entries.count_again(table)
    assert entries.num(table) == steps[-1]


def test_filling_again_what_is_there_takes_nothing_away():
    allocator, entries = PageAllocator(4), DraftEntries(4, 4)
    table = table_of(entries, allocator, 12)
    entries.fill(table, 10)
    for stop in (1, 4, 9, 10):
        entries.fill(table, stop)
        assert entries.num(table) == 10
    entries.count_again(table)
    assert entries.num(table) == 10


@pytest.mark.parametrize("followed, num", [((8, 0), 0), ((0, 8), 8), ((8, 6), 6), ((3, 8), 8), ((8, 3), 3)], ids=str)
def test_who_adopts_pages_has_the_entries_of_these(followed, num):
    """Fault A6 of a head: pages of the same tokens, left by one who did not draft so far."""
    allocator, entries = PageAllocator(8), DraftEntries(8, 4)
    mine, cached = (table_of(entries, allocator, 8) for _ in range(2))
    for table, stop in zip((mine, cached), followed, strict=True):
        if stop:
            entries.fill(table, stop)
    assert entries.num(mine) == followed[0]
    assert mine.adopt(0, cached.pages[:2])
    entries.count_again(mine)
    assert entries.num(mine) == num


@pytest.mark.parametrize("num_filled", range(9))
@pytest.mark.parametrize("num_shared", range(9))
def test_a_copied_page_has_the_entries_up_to_where_the_tokens_part(num_filled, num_shared):
    allocator, entries = PageAllocator(8), DraftEntries(8, 4)
    table = table_of(entries, allocator, 8)
    if num_filled:
        entries.fill(table, num_filled)
    forked, copies = table.fork(num_shared)
    for source, target in copies:
        entries.copy(source, target, num_shared % 4)
    assert entries.num(forked) == min(num_filled, num_shared)
