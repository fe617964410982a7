"""Pages and page tables: the KV cache as a heap of equal blocks, each counted by who refers to it.

    token at position p of a request:   page = pages[p // page_size],   slot = page * page_size + p % page_size

A request's tokens stand in order; its pages need not. So no free page is ever too small or in the wrong place, and what
is wasted is the unused end of each request's last page: (page_size - 1) / 2 tokens on average.
Kwon et al., Efficient Memory Management for Large Language Model Serving with PagedAttention (arXiv 2309.06180).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from minserve.errors import InvalidValue, MinserveError


class PageError(MinserveError, ValueError):
    """Page bookkeeping that cannot be: a page released more often than taken, or counts that do not add up."""


def pages_needed(num_tokens: int, page_size: int) -> int:
    """How many pages hold num_tokens tokens.

    >>> [pages_needed(n, 4) for n in (0, 1, 4, 5)]
    [0, 1, 1, 2]
    """
    return -(-num_tokens // page_size)


class Allocator(Protocol):
    """What hands out pages; `PageAllocator`, or a reader's own."""

    num_pages: int

    @property
    def num_free(self) -> int:
        """Pages that nobody refers to."""

    def take(self, num: int) -> list[int] | None:
        """Free pages, referred to once from now on; all of them, or None and no change."""

    def share(self, pages: Sequence[int]) -> None:
        """Count one more reference to each page."""

    def release(self, pages: Sequence[int]) -> None:
        """Count one reference less to each page."""

    def ref_count(self, page: int) -> int:
        """How many refer to the page."""

    def check(self) -> None:
        """Raise where its own counts contradict one another."""


class PageAllocator:
    """Hands out pages from a stack of free ones; every operation costs the same, however large the pool.

    Arguments:
        num_pages: ids are 0 .. num_pages - 1.

    >>> allocator = PageAllocator(3)
    >>> pages = allocator.take(2)
    >>> allocator.share(pages[:1])
    >>> allocator.release(pages)
    >>> allocator.num_free, allocator.ref_count(pages[0]), allocator.take(3)
    (2, 1, None)
    """

    def __init__(self, num_pages: int):
        if num_pages < 1:
            raise InvalidValue("num_pages", num_pages, "at least 1", "EngineConfig.num_pages or cache_bytes")
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._references: dict[int, int] = {}  # of held pages

    @property
    def num_free(self) -> int:
        """Pages that nobody refers to."""
        return len(self._free)

    def ref_count(self, page: int) -> int:
        """How many refer to the page."""
        return self._references.get(page, 0)

    def take(self, num: int) -> list[int] | None:
        """Take pages, each with one reference; all of them, or None when fewer are free. Changes: this allocator."""
        if not 0 <= num <= len(self._free):
            return None
        kept = len(self._free) - num
        pages = self._free[kept:][::-1]
        del self._free[kept:]
        for page in pages:
            self._references[page] = 1
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Count one more reference to each page. Changes: this allocator. Errors: PageError for a free page."""
        for page in pages:
            if page not in self._references:
                raise PageError(f"page {page} is free; only a page that somebody holds can be shared")
        for page in pages:
            self._references[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Count one reference less to each page; one that nobody refers to any more is free again.

        Changes: this allocator. Errors: PageError, before anything changes, when a page has fewer references than are
        given back, be it in one list or over time.
        """
        given: dict[int, int] = {}
        for page in pages:
            given[page] = given.get(page, 0) + 1
            if given[page] > self.ref_count(page):
                raise PageError(f"page {page} is released, and has {self.ref_count(page)} references to release")
        for page in pages:
            self._references[page] -= 1
            if not self._references[page]:
                del self._references[page]
                self._free.append(page)

    def check(self) -> None:
        """Raise PageError unless every page is free once or referred to, and never both."""
        if len(set(self._free)) != len(self._free):
            raise PageError(f"a page is free twice: {sorted(self._free)}")
        for page in self._free:
            if page in self._references:
                raise PageError(f"page {page} is free, and has {self._references[page]} references")
        num_held = len(self._references)
        if num_held + len(self._free) != self.num_pages:
            raise PageError(f"{num_held} pages held + {len(self._free)} free are not {self.num_pages}")


class PageTable:
    """The pages of one request, in the order of its tokens.

    Arguments:
        allocator: where pages come from and go back to.
        page_size: tokens per page.
    Attributes:
        pages: their ids; page i holds positions [i * page_size, (i + 1) * page_size).

    >>> table = PageTable(PageAllocator(8), page_size=4)
    >>> table.grow(6), table.capacity, table.slots(3, 6)
    (True, 8, [3, 4, 5])
    """

    def __init__(self, allocator: Allocator, page_size: int):
        self.pages: list[int] = []
        self.page_size = page_size
        self._allocator = allocator

    @property
    def capacity(self) -> int:
        """Tokens that the pages have room for."""
        return len(self.pages) * self.page_size

    def grow(self, stop: int) -> bool:
        """Make room for positions [0, stop). Changes: the table and the allocator, or neither, and then False."""
        missing = pages_needed(stop, self.page_size) - len(self.pages)
        taken = self._allocator.take(max(0, missing))
        self.pages += taken or ()
        return taken is not None

    def shrink(self, stop: int) -> None:
        """Keep the pages of positions [0, stop), give the others back. Changes: the table and the allocator."""
        kept = pages_needed(stop, self.page_size)
        self._allocator.release(self.pages[kept:])
        del self.pages[kept:]

    def share(self, pages: Sequence[int]) -> None:
        """Go on with pages that others hold as well. Changes: the table and the allocator."""
        self._allocator.share(pages)
        self.pages += pages

    def adopt(self, start: int, pages: Sequence[int]) -> bool:
        """Refer to pages of the same contents instead of the own ones from index `start` on, which are given back.

        Returns whether any of them is another. Changes: the table and the allocator.
        """
        stop = start + len(pages)
        if self.pages[start:stop] == [*pages]:
            return False
        self._allocator.share(pages)
        self._allocator.release(self.pages[start:stop])
        self.pages[start:stop] = pages
        return True

    def slots(self, start: int, stop: int) -> list[int]:
        """Where in the pool the tokens at positions start .. stop - 1 lie."""
        size, pages = self.page_size, self.pages
        return [pages[position // size] * size + position % size for position in range(start, stop)]

    def fork(self, num_tokens: int) -> tuple[PageTable, list[tuple[int, int]]] | None:
        """A second table that begins with this one's first num_tokens tokens.

        Full pages are shared. The last one, where it is partly filled, will be written to by both, so the new table
        gets a page of its own and the caller copies the contents: copy-on-write, at the moment of the split.

        Returns the table and the (source, target) pages to copy; or None, and no change, without a free page.
        Changes: the allocator.
        """
        num_full = num_tokens // self.page_size
        partial = self.pages[num_full : pages_needed(num_tokens, self.page_size)]
        own = self._allocator.take(len(partial))
        if own is None:
            return None
        self._allocator.share(self.pages[:num_full])
        fork = PageTable(self._allocator, self.page_size)
        fork.pages = self.pages[:num_full] + own
        return fork, list(zip(partial, own, strict=True))

    def release(self) -> None:
        """Give all pages back. Changes: the table and the allocator."""
        self.shrink(0)


def check_references(allocator: Allocator, tables: Iterable[PageTable]) -> None:
    """Raise PageError unless the references of every page are exactly those of the tables, and the rest is free."""
    counted: dict[int, int] = {}
    for table in tables:
        for page in table.pages:
            counted[page] = counted.get(page, 0) + 1
    for page, count in counted.items():
        if allocator.ref_count(page) != count:
            raise PageError(f"page {page} is in {count} tables, and has {allocator.ref_count(page)} references")
    if len(counted) + allocator.num_free != allocator.num_pages:
        lost = allocator.num_pages - allocator.num_free - len(counted)
        raise PageError(f"{lost} pages are neither free nor in a table")
