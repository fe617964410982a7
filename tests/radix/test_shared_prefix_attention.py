"""Attention behind a shared prefix: the reference against a loop, on one table of cases."""

from __future__ import annotations

import pytest
import torch
from kernel_checks import NAN, bound, largest_difference
from shared_cases import CASES, Case, attended_by_a_loop, tensors_of
from torch.utils._python_dispatch import TorchDispatchMode

from minserve.errors import InvalidValue
from minserve.paging.paged_attention import paged_attention
from minserve.radix import shared_prefix_attention as reference
from minserve.radix.shared_prefix_attention import positions_read, shared_prefix_attention

cases = pytest.mark.parametrize("case", CASES, ids=str)
MERGED = [case for case in CASES if case.shared and any(case.queries)]
WHOLE_BATCH = next(case for case in CASES if case.note.startswith("decode rows, a chunk and drafts"))


def loop_error(args, num_shared_pages, paged=paged_attention) -> float:
    """How far the reference is from the loop."""
    found, wanted = shared_prefix_attention(*args, num_shared_pages, paged), attended_by_a_loop(*args)
    assert all(x.dtype == torch.float64 for x in found)
    return max(largest_difference(x, y) for x, y in zip(found, wanted, strict=True))


@cases
@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32], ids=str)
def test_the_reference_is_the_loop(case, index_dtype):  # fault K4: free pages and tails of pages hold NaN
    args = tensors_of(case, torch.float64, index_dtype)
    before = [arg.clone() for arg in args]
    assert loop_error(args, case.shared) <= 1e-12
    for arg, old in zip(args, before, strict=True):
        assert torch.equal(arg.nan_to_num(77), old.nan_to_num(77)), "an argument was changed"


@cases
def test_however_much_is_shared_it_is_paged_attention(case):
    """Whoever says that fewer pages are shared than are gets the same, and with none the same bits."""
    args = tensors_of(case)
    wanted = paged_attention(*args)
    for num_shared_pages in range(case.shared + 1):
        found = shared_prefix_attention(*args, num_shared_pages, paged_attention)
        for one, other in zip(found, wanted, strict=True):
            assert largest_difference(one, other) <= (1e-12 if num_shared_pages else 0)


@pytest.mark.parametrize("at_a_time", [1, 100, 500])
def test_how_much_is_done_at_a_time_does_not_matter(monkeypatch, at_a_time):
    monkeypatch.setattr(reference, "SCORES_AT_A_TIME", at_a_time)
    assert max(loop_error(tensors_of(case), case.shared) for case in CASES) <= 1e-12


@cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_reference_in_narrow_numbers(case, dtype):
    args = tensors_of(case, dtype)
    out, lse = shared_prefix_attention(*args, case.shared, paged_attention)
    wanted = attended_by_a_loop(*args)
    assert out.dtype == dtype and lse.dtype == torch.float32
    assert largest_difference(out, wanted[0]) <= bound(dtype, 5)
    assert largest_difference(lse, wanted[1]) <= bound(torch.float32, 10)


@pytest.mark.parametrize("factor", [-1000, 1000])
def test_scores_that_exp_cannot_hold(factor):
    q, *rest = tensors_of(WHOLE_BATCH)
    assert loop_error((q * factor, *rest), WHOLE_BATCH.shared) <= 1e-9


def plain_mean(outs, lses):
    """A wrong merge: prefix and tail count the same, however much they hold."""
    return outs.mean(0), lses.logsumexp(0)


def swapped(outs, lses):
    """A wrong merge: each part has the other's weight."""
    return (lses.flip(0).softmax(0)[..., None] * outs).sum(0), lses.logsumexp(0)


def added(outs, lses):
    """A wrong merge: right weights, and sums of exponentials that are not added."""
    return (lses.softmax(0)[..., None] * outs).sum(0), lses.amax(0)


@pytest.mark.parametrize("merge", [plain_mean, swapped, added])
@pytest.mark.parametrize("case", MERGED, ids=str)
def test_a_wrong_merge_is_seen(monkeypatch, merge, case):
    monkeypatch.setattr(reference, "merge_attention", merge)
    assert loop_error(tensors_of(case), case.shared) > 1e-3


def one_row(q, k_pages, v_pages, page_tables, row_starts, context_lens):
    """Wrong tails: all rows are one, and see the tails of those before."""
    last = context_lens[-1:]
    return paged_attention(q, k_pages, v_pages, page_tables[-1:], row_starts[[0, -1]], last.clamp(min=len(q)))


def neighbours(q, k_pages, v_pages, page_tables, row_starts, context_lens):
    """Wrong tails: each row sees that of another."""
    return paged_attention(q, k_pages, v_pages, page_tables.roll(1, 0), row_starts, context_lens.roll(1, 0))


@pytest.mark.parametrize("tails", [one_row, neighbours])
def test_tails_of_other_rows_are_seen(tails):
    case = Case("", (2, 2, 2), (15, 15, 15), shared=2)
    assert loop_error(tensors_of(case), case.shared, tails) > 1e-3


def test_a_row_does_not_see_the_others():
    """Not even NaN goes from one row's tail to another row; what is shared all rows see."""
    q, k_pages, v_pages, page_tables, row_starts, _ = args = tensors_of(WHOLE_BATCH)
    wanted = shared_prefix_attention(*args, 2, paged_attention)
    for pool in (k_pages, v_pages):
        pool[page_tables[2, 2]] = NAN  # the tail of the one-token row of context 9
    (broken,) = row_starts[2:3].tolist()
    others = [token for token in range(len(q)) if token != broken]
    for found, clean in zip(shared_prefix_attention(*args, 2, paged_attention), wanted, strict=True):
        assert torch.equal(found[others], clean[others]) and found[broken].isnan().all()
    for pool in (k_pages, v_pages):
        pool[page_tables[0, 1]] = NAN
    assert all(found.isnan().all() for found in shared_prefix_attention(*args, 2, paged_attention))


class PagesRead(TorchDispatchMode):
    """Counts how many pages of one pool are gathered."""

    def __init__(self, pool):
        super().__init__()
        self.pool, self.num = pool.data_ptr(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "index" in func.__name__ and args[0].data_ptr() == self.pool:
            self.num += args[2].numel()
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("queries", [(1, 1, 1, 1), (1, 0, 3, 0), (0, 0, 0, 2), (0, 0, 0, 0), (5, 3, 0, 1)], ids=str)
@pytest.mark.parametrize("shared", [0, 1, 7, 9])
@pytest.mark.parametrize("pool", [1, 2], ids=["keys", "values"])
def test_positions_are_read_as_often_as_counted(queries, shared, pool):
    """The prefix once for all rows, and each row's own tail. Here the reference gathers no more than it needs: pages
    hold one token, and rows that it computes together have equal contexts.
    """
    case = Case("", queries, (16,) * 4, page_size=1, shared=9)
    args = tensors_of(case)
    with PagesRead(args[pool]) as read:
        shared_prefix_attention(*args, shared, paged_attention)
    asking = sum(num > 0 for num in queries)
    wanted = asking * (16 - shared) + (shared if asking else 0)
    assert read.num == wanted and positions_read(*args[4:], num_shared=shared) == wanted


def test_tables_that_differ_are_refused():
    for row, page in ((1, 0), (2, 1), (3, 1)):
        args = tensors_of(WHOLE_BATCH)
        args[3][row, page] = args[3][0, 2]
        with pytest.raises(InvalidValue, match=rf"page_tables\[{row}, {page}\]"):
            shared_prefix_attention(*args, 2, paged_attention)
        if page:
            assert loop_error(args, page) <= 1e-12  # what is the same may be shared


@pytest.mark.parametrize("context", [-1, 0, 6, 8, 13, 21, 100])
def test_queries_inside_the_shared_pages_are_refused(context):
    """Six queries behind eight tokens are fourteen; the page table holds twenty."""
    *args, context_lens = tensors_of(Case("", (1, 6, 3), (16, 14, 20), shared=2, spare_pages=0))
    context_lens[1] = context
    with pytest.raises(InvalidValue, match=r"context_lens\[1\] is .* 14, .* to 20"):
        shared_prefix_attention(*args, context_lens, 2, paged_attention)


@pytest.mark.parametrize("num_shared_pages", [-1, 6, 100])
def test_more_pages_than_a_table_has_are_refused(num_shared_pages):
    args = tensors_of(Case("", (1, 6), (16, 17), spare_pages=0))
    with pytest.raises(InvalidValue, match="num_shared_pages"):
        shared_prefix_attention(*args, num_shared_pages, paged_attention)


def test_a_page_that_is_missing_is_refused():
    args = tensors_of(WHOLE_BATCH)
    args[3][:, 1] = -1
    with pytest.raises(IndexError):
        shared_prefix_attention(*args, 2, paged_attention)
