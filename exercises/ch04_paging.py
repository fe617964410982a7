# Write your code where it says YOUR CODE, in place of the line that raises. Check it with: pytest tests/exercises
# ruff: noqa: F401
"""Chapter 4, paging: the KV cache as a heap, in pages that are handed out, shared, copied and found again.

A request's page table lists its pages in order: position p lies in page pages[p // page_size], at offset p % page_size.
"""

import math
from collections import Counter

import torch


def slots(pages: list[int], start: int, stop: int, page_size: int) -> list[int]:
    """Find where tokens lie in memory, which is one row of pages: slot = page x page_size + offset.

    Args:
        pages: a request's page table.
        start, stop: its positions start to stop - 1 are asked for.
        page_size: tokens that fit in a page.

    Returns:
        One slot per position.

    >>> slots([7, 2], start=3, stop=6, page_size=4)
    [31, 8, 9]
    """
    # YOUR CODE (5 min, easy): which entry of the page table, and which offset?
    raise NotImplementedError("exercise 4.1")


class PageAllocator:
    """Hand out the pages of a pool, each to as many holders as share it: a heap with reference counts.

    A page is free, or it has a count of 1 or more references. Pages are numbered from 0.

        num_pages, num_free   how many pages there are, and how many are free
        ref_count(page)       its references, 0 when it is free
        take(num)             `num` free pages with one reference each, in any order; None, and nothing taken, when
                              fewer are free
        share(pages)          one more reference for each entry; ValueError when one of them is free
        release(pages)        one reference less for each entry; a page without any is free again, once. ValueError
                              when one has fewer references than entries

    A call that raises ValueError changes nothing. The work of a call grows with the pages that it is about, not with
    the pool: looking through all pages is too slow.

    >>> allocator = PageAllocator(4)
    >>> pages = allocator.take(3)
    >>> allocator.take(2) is None, allocator.num_free
    (True, 1)
    >>> allocator.share(pages[:1])
    >>> allocator.release(pages)
    >>> allocator.num_free, allocator.ref_count(pages[0])
    (3, 1)
    """

    def __init__(self, num_pages: int):
        # YOUR CODE (40 min, hard): a list of the free pages, used from its end, and one count per page
        raise NotImplementedError("exercise 4.2")

    @property
    def num_free(self) -> int:
        """How many pages are free."""
        # YOUR CODE (40 min, hard): the list of free pages knows
        raise NotImplementedError("exercise 4.2")

    def ref_count(self, page: int) -> int:
        """How many references a page has."""
        # YOUR CODE (40 min, hard): the counts know
        raise NotImplementedError("exercise 4.2")

    def take(self, num: int) -> list[int] | None:
        """Take pages, all or none."""
        # YOUR CODE (40 min, hard): look first, then take
        raise NotImplementedError("exercise 4.2")

    def share(self, pages: list[int]) -> None:
        """Add a reference to each page."""
        # YOUR CODE (40 min, hard): who may be shared?
        raise NotImplementedError("exercise 4.2")

    def release(self, pages: list[int]) -> None:
        """Drop a reference to each page."""
        # YOUR CODE (40 min, hard): a page may stand in the list twice: check all, then drop one by one
        raise NotImplementedError("exercise 4.2")

    def check(self) -> None:
        """Raise ValueError unless the free pages are as many as those without a reference; the engine asks this."""
        num_without = sum(self.ref_count(page) == 0 for page in range(self.num_pages))
        if num_without != self.num_free:
            raise ValueError(f"{self.num_free} pages are said to be free, {num_without} have no reference")


def pages_needed(num_tokens: int, num_new: int, page_size: int, max_tokens: int) -> int:
    """Count the pages that a request must take before its next step.

    Args:
        num_tokens: tokens that its pages hold now, no page more than they need.
        num_new: tokens that the step will write: a chunk of a prompt, or one token and some drafts ahead of it.
        page_size: tokens that fit in a page.
        max_tokens: where the request ends, at least num_tokens. No token is ever kept from there on.

    Returns:
        Pages to take.

    >>> pages_needed(num_tokens=6, num_new=3, page_size=4, max_tokens=100)
    1
    """
    # YOUR CODE (10 min, easy): pages for all tokens, less the pages that are there
    raise NotImplementedError("exercise 4.3")


def fork(
    allocator: PageAllocator, pages: list[int], num_tokens: int, page_size: int, num_branches: int
) -> tuple[list[list[int]], list[tuple[int, int]]] | None:
    """Let a request go on in several ways (n = 8 answers to one prompt), with as little memory as is safe.

    All branches read the same tokens; each will write its own next one. So full pages are shared, and the partial last
    page, if there is one, is copied for every branch but the first, which goes on in the pages that are there.

    Args:
        allocator: like a `PageAllocator`; only its take and share are needed.
        pages: the request's page table, one reference each; it may hold pages beyond num_tokens, which the first
            branch keeps for itself.
        num_tokens, page_size: tokens so far, and tokens in a page.
        num_branches: branches, the first one included.

    Returns:
        The page table of each branch, and the copies to make, (source page, target page). None when too few pages are
        free; then no page has been taken or shared.

    >>> allocator = PageAllocator(8)
    >>> pages = allocator.take(2)
    >>> tables, copies = fork(allocator, pages, num_tokens=6, page_size=4, num_branches=2)
    >>> tables[0] == pages, tables[1][0] == pages[0], copies == [(pages[1], tables[1][1])], allocator.num_free
    (True, True, True, 5)
    """
    # YOUR CODE (25 min, medium): how many pages are full? Take what may fail first, share after it
    raise NotImplementedError("exercise 4.4")


def paged_attention(
    q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, page_table: list[int], num_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Let the last tokens of one request attend to all its tokens, causally, wherever in memory these lie.

    Memory that nobody has written may hold anything, NaN too: a page's tail, and pages of nobody.

    Args:
        q: [queries, heads, dim]: the queries of the request's last tokens.
        k_pages, v_pages: [pages, page_size, kv_heads, dim], the pool of everybody's pages. Heads 0..n-1 share KV head
            0, the next n KV head 1, and so on.
        page_table: the request's pages in order; entries beyond its tokens may be anything, -1 too.
        num_tokens: its tokens, those of q included; their keys and values are in the pages already.

    Returns:
        The output [queries, heads, dim], scores scaled by dim ** -0.5, and their log-sum-exp [queries, heads].

    >>> values = torch.tensor([[5.0], [6.0], [7.0], [torch.nan]]).view(2, 2, 1, 1)
    >>> paged_attention(torch.ones(1, 1, 1), torch.ones(2, 2, 1, 1), values, [1, 0], num_tokens=1)[0].item()
    7.0
    """
    # YOUR CODE (25 min, medium): gather the pages in the table's order, and cut the tail off before you compute
    raise NotImplementedError("exercise 4.5")


def choose_page_size(
    num_tokens: list[int], page_sizes: list[int], bytes_per_token: float, bytes_per_page: float
) -> tuple[int, float]:
    """Choose the page size that wastes least: small pages are many, of large ones the last is half empty.

    Of a request's last page, 0 to page_size - 1 tokens stay unused, each number as likely as the others.

    Args:
        num_tokens: tokens of each request that is in memory at the same time.
        page_sizes: sizes to choose from, in tokens.
        bytes_per_token: bytes of the keys and values of a token.
        bytes_per_page: what a page costs besides: its entry in page tables and counts, and the start of reading it,
            reckoned in bytes.

    Returns:
        The best page size, and the share of overhead that is to be expected with it: bytes of unused tokens and of
        pages, of all requests together, over the bytes of all their tokens.

    >>> choose_page_size([10, 20], [1, 3, 9], bytes_per_token=8.0, bytes_per_page=6.0)
    (3, 0.3333333333333333)
    """
    # YOUR CODE (15 min, medium): expect the unused tokens; used and unused ones together fill whole pages
    raise NotImplementedError("exercise 4.6")


def admit(running: list[tuple[int, int]], waiting: list[tuple[int, int]], free_pages: int, page_size: int) -> list[int]:
    """Choose whom to let in: this one is scored, and there is no best answer.

    150 requests wait, and a predictor knows how many tokens each will write. Each step gives every running request one
    token more, and a finished one gives its pages back. When pages run out, the newest is thrown out, and lost. The
    score is the share of the 150 that finish in a given number of steps, mean of several pools; oldest first whenever a
    prompt fits reaches about 0.13, and so that nobody is ever lost, 0.10.

    Args:
        running: (tokens so far, tokens still to write) of each running request, oldest first.
        waiting: (prompt tokens, tokens to write) of each waiting one, oldest first.
        free_pages: pages that nobody holds now.
        page_size: tokens that fit in a page.

    Returns:
        Positions in `waiting` of those who start now, each once. They take the pages of their prompt at once, and the
        first token's.

    >>> admit([(30, 2)], [(8, 900), (8, 4)], free_pages=3, page_size=16)
    [1]
    """
    # YOUR CODE (40 min, open): a request is a ramp of pages, not a block: do all reach their tops at once?
    raise NotImplementedError("exercise 4.7")
