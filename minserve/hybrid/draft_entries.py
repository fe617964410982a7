"""Which of the draft head's keys and values are there.

The MTP head is one more attention layer of the same pages. Its entry for token i is made of token i and of what the
model made of token i - 1, so entry 0 does not exist, and where nobody drafts none does. A request may draft only where
all entries of its tokens are there, and those it found in the cache may have been left by one who did not draft:

    tokens     0   1   2   3 | 4   5   6   7 | 8   9
    entries    -   x   x   x | x   x   .   . | .   .     count 4 in the first page (the missing 0 counts), 2, 0
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np

from minserve.paging.page_table import PageError, PageTable


class DraftEntries:
    """How many entries each page has, from its first position on, and each request without a gap.

    Arguments:
        num_pages, page_size: of the pool.

    >>> from minserve.paging.page_table import PageAllocator
    >>> table, entries = PageTable(PageAllocator(4), page_size=4), DraftEntries(4, page_size=4)
    >>> table.grow(12), entries.num(table)
    (True, 0)
    >>> entries.fill(table, 6)
    >>> entries.num(table)
    6
    """

    def __init__(self, num_pages: int, page_size: int):
        self._page_size = page_size
        self._counts = np.zeros(num_pages, dtype=np.int64)
        self._num: WeakKeyDictionary[PageTable, int] = WeakKeyDictionary()

    def num(self, table: PageTable) -> int:
        """How many entries there are without a gap, from position 0 on, where there is none to be missed."""
        known = self._num.get(table)
        if known is None:
            counts = self._counts[table.pages] if table.pages else self._counts[:0]
            gaps = (counts < self._page_size).nonzero()[0]
            known = len(counts) * self._page_size if not len(gaps) else gaps[0] * self._page_size + counts[gaps[0]]
            self._num[table] = int(known)
        return self._num[table]

    def fill(self, table: PageTable, stop: int) -> None:
        """Count a request's entries as there up to stop - 1. Changes: these counts."""
        size, start = self._page_size, self.num(table)
        for number in range(start // size, (stop - 1) // size + 1):
            self._counts[table.pages[number]] = min(size, stop - number * size)
        self._num[table] = max(start, stop)

    def cut(self, table: PageTable, num: int) -> None:
        """Count no entry of a request from `num` on: the step that brought them has failed. Changes: the counts."""
        for number, page in enumerate(table.pages[num // self._page_size :], start=num // self._page_size):
            self._counts[page] = min(self._counts[page], max(0, num - number * self._page_size))
        if table in self._num:
            self._num[table] = min(self._num[table], num)

    def clear(self, pages: Sequence[int]) -> None:
        """Forget the entries of pages that somebody has just taken. Changes: these counts."""
        if pages:
            self._counts[pages] = 0

    def copy(self, source: int, target: int, num: int) -> None:
        """Count a copied page's entries, of its first num positions: the next token is another. Changes: the counts."""
        self._counts[target] = min(self._counts[source], num)

    def check(self, table: PageTable) -> None:
        """Raise PageError unless a request's entries lie on its pages."""
        if self._num.get(table, 0) > table.capacity:
            raise PageError(f"{self._num[table]} draft entries are counted on pages {table.pages}")

    def count_again(self, table: PageTable) -> None:
        """Forget what is known of a request: it has exchanged pages for others of the same tokens. Changes: that."""
        self._num.pop(table, None)
