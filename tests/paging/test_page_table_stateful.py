"""Page tables under any sequence of operations, against a model that keeps every table's tokens in a list of its own.

The pool's contents are played too: what a table reads back through its slots must be what was written for it.
"""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from minserve.paging.page_table import PageAllocator, PageError, PageTable, check_references

SMALL = st.integers(0, 9)


class Owner:
    """A table and the tokens that it must hold."""

    def __init__(self, table, tokens):
        self.table, self.tokens = table, tokens


class PagesModel(RuleBasedStateMachine):
    """Tables grow, write, shrink, fork and go; loose pages are taken, shared and given back beside them."""

    owners, loose = Bundle("owners"), Bundle("loose")

    @initialize(num_pages=st.integers(1, 9), page_size=st.integers(1, 5))
    def start(self, num_pages, page_size):
        self.allocator, self.size, self.num_pages = PageAllocator(num_pages), page_size, num_pages
        self.pool, self.num_written = {}, 0
        self.live, self.loose_pages = [], []

    def counts(self):
        """How often each held page is held, by the model."""
        held = [page for owner in self.live for page in owner.table.pages] + self.loose_pages
        return {page: held.count(page) for page in held}

    def num_free(self):
        return self.num_pages - len(self.counts())

    @rule(target=owners)
    def begin(self):
        owner = Owner(PageTable(self.allocator, self.size), [])
        self.live.append(owner)
        return owner

    @rule(owner=owners, num=SMALL)
    def grow_and_write(self, owner, num):
        start, stop = len(owner.tokens), len(owner.tokens) + num
        pages, free = list(owner.table.pages), self.num_free()
        missing = max(0, -(-stop // self.size) - len(pages))
        assert owner.table.grow(stop) == (missing <= free)
        if missing > free:
            assert owner.table.pages == pages
            return
        assert owner.table.pages[: len(pages)] == pages and len(owner.table.pages) == len(pages) + missing
        for slot in owner.table.slots(start, stop):
            self.num_written += 1
            self.pool[slot] = self.num_written
            owner.tokens.append(self.num_written)

    @rule(owner=owners, num_pages=SMALL)
    def shrink(self, owner, num_pages):
        """Only whole pages go: the part of a shared page that is left would be written to by several."""
        stop = num_pages * self.size
        owner.table.shrink(stop)
        del owner.tokens[stop:]
        assert len(owner.table.pages) <= num_pages

    @rule(target=owners, owner=owners, back=SMALL)
    def fork(self, owner, back):
        num = max(0, len(owner.tokens) - back)
        free = self.num_free()
        forked = owner.table.fork(num)
        if forked is None:
            assert num % self.size and not free
            return multiple()
        table, copies = forked
        for source, target in copies:
            for offset in range(self.size):
                self.pool[target * self.size + offset] = self.pool.get(source * self.size + offset)
        self.live.append(Owner(table, owner.tokens[:num]))
        return self.live[-1]

    @rule(owner=consumes(owners))
    def release(self, owner):
        owner.table.release()
        self.live.remove(owner)

    @rule(target=loose, num=SMALL)
    def take(self, num):
        free = self.num_free()
        pages = self.allocator.take(num)
        assert (pages is None) == (num > free) and (pages is None or len(pages) == num)
        self.loose_pages += pages or []
        return multiple(*(pages or []))

    @rule(target=loose, page=loose)
    def share(self, page):
        self.allocator.share([page])
        self.loose_pages.append(page)
        return page

    @rule(page=consumes(loose))
    def give_back(self, page):
        self.allocator.release([page])
        self.loose_pages.remove(page)

    @rule(page=st.integers(0, 8), extra=st.integers(1, 2))
    def give_back_too_often(self, page, extra):
        page %= self.num_pages
        with pytest.raises(PageError):
            self.allocator.release([page] * (self.counts().get(page, 0) + extra))

    @invariant()
    def adds_up(self):
        self.allocator.check()
        counts = self.counts()
        assert [self.allocator.ref_count(page) for page in range(self.num_pages)] == [
            counts.get(page, 0) for page in range(self.num_pages)
        ]
        assert self.allocator.num_free == self.num_free()
        if not self.loose_pages:
            check_references(self.allocator, [owner.table for owner in self.live])
        for owner in self.live:
            assert [self.pool[slot] for slot in owner.table.slots(0, len(owner.tokens))] == owner.tokens

    def teardown(self):
        for owner in getattr(self, "live", ()):
            owner.table.release()
        if hasattr(self, "allocator"):
            self.allocator.release(self.loose_pages)
            assert self.allocator.num_free == self.num_pages


TestPages = PagesModel.TestCase
TestPages.settings = settings(max_examples=150, stateful_step_count=40, deadline=None, derandomize=True)
