"""Pages: taken and given back exactly, shared and copied at a split, wherever in the pool they lie."""

from itertools import pairwise

import pytest

from minserve.errors import InvalidValue
from minserve.paging.page_table import PageAllocator, PageError, PageTable, check_references, pages_needed

PAGE_SIZES = pytest.mark.parametrize("page_size", [1, 2, 3, 4, 5])


def state_of(allocator):
    """What can be seen of an allocator."""
    return allocator.num_free, [allocator.ref_count(page) for page in range(allocator.num_pages)]


def held(allocator, references):
    """Hold pages 0, 1, ... with these counts of references, and no others."""
    allocator.release([page for page in allocator.take(allocator.num_pages) if page >= len(references)])
    for page, count in enumerate(references):
        allocator.share([page] * (count - 1))


def test_all_pages_or_none_are_taken():
    allocator = PageAllocator(5)
    first = allocator.take(3)
    assert len(set(first)) == 3 and allocator.num_free == 2
    before = state_of(allocator)
    for impossible in (3, 6, -1):
        assert allocator.take(impossible) is None and state_of(allocator) == before
    assert allocator.take(0) == [] and state_of(allocator) == before
    rest = allocator.take(2)
    assert sorted(first + rest) == [0, 1, 2, 3, 4] and allocator.take(1) is None
    allocator.release(first)
    assert sorted(allocator.take(3)) == sorted(first)
    allocator.check()


@pytest.mark.parametrize("num_pages", [0, -1])
def test_a_pool_has_a_page(num_pages):
    with pytest.raises(InvalidValue, match="num_pages.*EngineConfig.num_pages"):
        PageAllocator(num_pages)


@pytest.mark.parametrize("pages", [[0, 0], [0, 1, 0], [1, 0, 0], [0, 0, 1, 1], [0, 0, 0]], ids=str)
@pytest.mark.parametrize("references", [(1, 1), (2, 1), (3, 1), (1, 2), (2, 2), (3, 3)], ids=str)
@pytest.mark.parametrize("at_once", [True, False], ids=["one list", "one by one"])
def test_a_page_is_free_once_and_only_when_nobody_refers_to_it(pages, references, at_once):  # fault B1
    allocator = PageAllocator(4)
    held(allocator, references)
    too_many = any(pages.count(page) > references[page] for page in (0, 1))
    if too_many and at_once:
        before = state_of(allocator)
        with pytest.raises(PageError, match="is released"):
            allocator.release(pages)
        assert state_of(allocator) == before
    elif too_many:
        with pytest.raises(PageError, match="is released"):
            for page in pages:
                allocator.release([page])
    else:
        for some in [pages] if at_once else [[page] for page in pages]:
            allocator.release(some)
        left = [references[page] - pages.count(page) for page in (0, 1)]
        assert state_of(allocator) == (2 + left.count(0), [*left, 0, 0])
        assert sorted(allocator.take(allocator.num_free)) == [page for page in range(4) if not [*left, 0, 0][page]]
    allocator.check()


@pytest.mark.parametrize("page", [3, 4, -1, 100])
@pytest.mark.parametrize("change", ["release", "share"])
def test_a_page_that_nobody_holds_is_refused_before_anything_changes(change, page):  # fault B1
    allocator = PageAllocator(4)
    held(allocator, (1, 2, 1) if page != -1 else (1, 2, 1, 1))  # -1 must not be taken for the last page
    before = state_of(allocator)
    for pages in ([page], [0, page], [page, 0], [1, 1, page]):
        with pytest.raises(PageError, match=str(page)):
            getattr(allocator, change)(pages)
        assert state_of(allocator) == before
        allocator.check()


@pytest.mark.parametrize("kept", [(0, 2, 4, 6), (1, 3, 5, 7), (0, 1, 6, 7), (3,)], ids=str)
@pytest.mark.parametrize("by", ["take", "grow"])
def test_scattered_pages_are_as_good_as_neighbours(kept, by):  # fault B11
    allocator = PageAllocator(8)
    allocator.release(set(allocator.take(8)) - set(kept))
    num = 8 - len(kept)
    table = PageTable(allocator, 4)
    if by == "take":
        table.pages = allocator.take(num)
    else:
        assert table.grow(4 * num)
    assert sorted([*table.pages, *kept]) == list(range(8)) and allocator.num_free == 0
    slots = table.slots(0, 4 * num)
    assert len(set(slots)) == 4 * num and {slot // 4 for slot in slots} == set(table.pages)


@PAGE_SIZES
def test_a_table_grows_by_whole_pages_and_never_past_the_last_token(page_size):  # fault B7
    allocator = PageAllocator(12)
    allocator.take(1)
    table = PageTable(allocator, page_size)
    for max_tokens in range(1, 11):
        for stop in range(1, max_tokens + 1):
            assert table.grow(stop)
            assert len(table.pages) == -(-stop // page_size) and table.capacity == len(table.pages) * page_size
        assert len(table.pages) == pages_needed(max_tokens, page_size)
        assert table.grow(0) and len(table.pages) == pages_needed(max_tokens, page_size)
        for stop in range(max_tokens, -1, -1):
            table.shrink(stop)
            assert len(table.pages) == -(-stop // page_size)
        assert allocator.num_free == 11


@PAGE_SIZES
def test_a_table_that_cannot_grow_stays_as_it_is(page_size):
    allocator = PageAllocator(4)
    table = PageTable(allocator, page_size)
    assert table.grow(2 * page_size)
    pages, before = list(table.pages), state_of(allocator)
    assert not table.grow(4 * page_size + 1)
    assert table.pages == pages and state_of(allocator) == before
    assert table.grow(4 * page_size) and table.pages[:2] == pages


@PAGE_SIZES
def test_slots_follow_the_pages_whatever_their_order(page_size):
    table = PageTable(PageAllocator(8), page_size)
    table.pages = [5, 0, 7, 2]
    wanted = [page * page_size + offset for page in table.pages for offset in range(page_size)]
    for start in range(4 * page_size + 1):
        for stop in range(start, 4 * page_size + 1):
            assert table.slots(start, stop) == wanted[start:stop]


@PAGE_SIZES
@pytest.mark.parametrize("num_branches", [2, 3])
def test_branches_read_their_own_tokens_and_the_common_ones(page_size, num_branches):  # fault B4; B6: one position each
    for num_tokens in range(14):
        allocator, pool = PageAllocator(24), {}
        tables = [PageTable(allocator, page_size)]
        assert tables[0].grow(num_tokens)
        pool.update(zip(tables[0].slots(0, num_tokens), range(num_tokens), strict=True))
        for _ in range(num_branches - 1):
            fork, copies = tables[0].fork(num_tokens)
            assert len(copies) == (num_tokens % page_size > 0)
            for source, target in copies:
                for offset in range(page_size):
                    pool[target * page_size + offset] = pool.get(source * page_size + offset)
            tables.append(fork)
        num_full = num_tokens // page_size
        assert len({tuple(table.pages[:num_full]) for table in tables}) == 1
        assert all(allocator.ref_count(page) == num_branches for page in tables[0].pages[:num_full])
        for step in range(2 * page_size):  # the branches take turns, as they do in a batch
            for branch, table in enumerate(tables):
                assert table.grow(num_tokens + step + 1)
                (slot,) = table.slots(num_tokens + step, num_tokens + step + 1)
                pool[slot] = (branch, step)
        for branch, table in enumerate(tables):
            own = [(branch, step) for step in range(2 * page_size)]
            assert [pool[slot] for slot in table.slots(0, num_tokens + 2 * page_size)] == [*range(num_tokens), *own]
        check_references(allocator, tables)
        for some, fewer in pairwise([tables[i:] for i in range(num_branches + 1)]):
            some[0].release()
            check_references(allocator, fewer)
        assert allocator.num_free == 24


@PAGE_SIZES
def test_a_fork_needs_a_page_for_a_partly_filled_one_only(page_size):  # fault B4
    for num_tokens in range(3 * page_size + 1):
        allocator = PageAllocator(3)
        table = PageTable(allocator, page_size)
        assert table.grow(3 * page_size)  # more than the fork is to know
        before = state_of(allocator)
        forked = table.fork(num_tokens)
        if num_tokens % page_size:
            assert forked is None and state_of(allocator) == before
        else:
            fork, copies = forked
            assert fork.pages == table.pages[: num_tokens // page_size] and copies == []
            assert fork.capacity == num_tokens


def test_what_is_shared_stays_until_the_last_one_lets_go():  # faults B1, B4
    allocator = PageAllocator(6)
    table = PageTable(allocator, 4)
    table.grow(8)
    first, second = table.fork(8)[0], table.fork(8)[0]
    shared = list(table.pages)
    for one in (table, second):
        one.release()
        assert one.pages == [] and not set(allocator.take(4)) & set(shared)
        allocator.release({*range(6)} - set(shared))
    one.release()  # holds nothing any more: no reference of anybody else's goes
    check_references(allocator, [first])
    first.release()
    assert allocator.num_free == 6


BREAK = {
    "a page is lost": lambda allocator, a, b: a.pages.pop(),
    "a page is in a table, and free": lambda allocator, a, b: allocator.release([a.pages[-1]]),
    "a page is in two tables, counted once": lambda allocator, a, b: b.pages.append(a.pages[-1]),
    "a page is in one table, counted twice": lambda allocator, a, b: allocator.share([b.pages[-1]]),
    "a page is twice in one table": lambda allocator, a, b: a.pages.append(a.pages[0]),
    "a shared page was taken from one": lambda allocator, a, b: b.pages.remove(a.pages[0]),
}


@pytest.mark.parametrize("fault", BREAK)
def test_references_that_are_not_those_of_the_tables_are_found(fault):
    allocator = PageAllocator(8)
    table = PageTable(allocator, 4)
    table.grow(10)
    fork, _ = table.fork(10)
    check_references(allocator, [table, fork])
    BREAK[fault](allocator, table, fork)
    with pytest.raises(PageError):
        check_references(allocator, [table, fork])


@pytest.mark.parametrize("free", [[2, 3, 3], [1, 2, 3], [2], []], ids=str)
def test_an_allocator_that_contradicts_itself_is_found(free):
    allocator = PageAllocator(4)
    held(allocator, (1, 2))
    allocator.check()
    allocator._free = free
    with pytest.raises(PageError):
        allocator.check()
