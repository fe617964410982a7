"""Attention through page tables: reference and kernel against a loop, on one table of cases."""

from __future__ import annotations

import pytest
import torch
from kernel_checks import (
    DTYPES,
    MOST_ITERATIONS,
    NAN,
    bound,
    check_a_compiled_kernel_wants_a_gpu,
    check_a_missing_triton_is_named,
    check_interpreted,
    largest_difference,
    needs_triton,
)
from paged_cases import CASES, KEYS, Case, attended_by_a_loop, errors, results_in_poison, tensors_of

from minserve.batching.ragged_attention import ragged_attention
from minserve.errors import InvalidValue
from minserve.paging import paged_attention as reference
from minserve.paging.paged_attention import paged_attention

cases = pytest.mark.parametrize("case", CASES, ids=str)
WHOLE_BATCH = next(case for case in CASES if case.note.startswith("decode rows, a chunk and drafts"))
SPLIT = next(case for case in CASES if case.note.startswith("a chunk stays whole"))


def check_the_loop(args, tolerance=1e-12):
    """The reference's results are those of the loop."""
    for found, wanted in zip(paged_attention(*args), attended_by_a_loop(*args), strict=True):
        assert found.dtype == torch.float64 and largest_difference(found, wanted) <= tolerance


@cases
@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32], ids=str)
def test_the_reference_is_the_loop(case, index_dtype):  # fault K4: free pages and tails of pages hold NaN
    args = tensors_of(case, torch.float64, index_dtype)
    before = [arg.clone() for arg in args]
    check_the_loop(args)
    for arg, old in zip(args, before, strict=True):
        assert torch.equal(arg.nan_to_num(77), old.nan_to_num(77)), "an argument was changed"


@pytest.mark.parametrize("at_a_time", [1, 20, 100])
def test_how_much_is_done_at_a_time_does_not_matter(monkeypatch, at_a_time):
    monkeypatch.setattr(reference, "TOKENS_AT_A_TIME", at_a_time)
    monkeypatch.setattr(reference, "SCORES_AT_A_TIME", at_a_time)
    for case in CASES:
        check_the_loop(tensors_of(case))


@cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_reference_in_narrow_numbers(case, dtype):
    args = tensors_of(case, dtype)
    out, lse = paged_attention(*args)
    wanted = attended_by_a_loop(*args)
    assert out.dtype == dtype and lse.dtype == torch.float32
    assert largest_difference(out, wanted[0]) <= bound(dtype, 5)
    assert largest_difference(lse, wanted[1]) <= bound(torch.float32, 10)


def cut_up(args, row: int, sizes: list[int]):
    """The calls that compute one row's queries in chunks, which the pages already hold."""
    q, k_pages, v_pages, page_tables, row_starts, context_lens = args
    start, stop = row_starts[row : row + 2].tolist()
    assert sum(sizes) == stop - start
    for size in sizes:
        stop_context = context_lens[row : row + 1] - (stop - start - size)
        yield q[start : start + size], k_pages, v_pages, page_tables[[row]], torch.tensor([0, size]), stop_context
        start += size


def test_scores_that_exp_cannot_hold():
    q, *rest = tensors_of(WHOLE_BATCH)
    check_the_loop((q * 1000, *rest), tolerance=1e-9)


@pytest.mark.parametrize("sizes", [[6], [1] * 6, [4, 2], [1, 5], [0, 3, 0, 3]], ids=str)
def test_chunks_of_a_row_are_the_row(sizes):
    args = tensors_of(WHOLE_BATCH)
    wanted = [x[1:7] for x in paged_attention(*args)]
    parts = [paged_attention(*call) for call in cut_up(args, 1, sizes)]
    for found, whole in zip(zip(*parts, strict=True), wanted, strict=True):
        assert largest_difference(torch.cat(found), whole) <= 1e-12


@pytest.mark.parametrize("row", range(4))
def test_a_row_alone_is_the_row_in_the_batch(row):  # fault J4
    args = tensors_of(WHOLE_BATCH)
    start, stop = args[4][row : row + 2].tolist()
    (alone,) = (paged_attention(*call) for call in cut_up(args, row, [stop - start]))
    for found, batch in zip(alone, paged_attention(*args), strict=True):
        assert largest_difference(found, batch[start:stop]) <= 1e-12


def test_pages_may_be_shared():  # fault B4
    """Two rows whose tables begin with the same page read the same tokens."""
    q, k_pages, v_pages, page_tables, row_starts, context_lens = tensors_of(Case("", (1, 1), (8, 7)))
    page_tables[1, 0] = page_tables[0, 0]
    check_the_loop((q, k_pages, v_pages, page_tables, row_starts, context_lens))


def test_a_row_does_not_see_the_others():
    """Not even NaN goes from one row's pages to another row."""
    q, k_pages, v_pages, page_tables, row_starts, context_lens = args = tensors_of(WHOLE_BATCH)
    wanted = paged_attention(*args)
    for pool in (k_pages, v_pages):
        pool[page_tables[2, :2]] = NAN  # the one-token row of context 5, which is computed together with another
    (broken,) = row_starts[2:3].tolist()
    for found, clean in zip(paged_attention(*args), wanted, strict=True):
        others = [token for token in range(len(q)) if token != broken]
        assert torch.equal(found[others], clean[others]) and found[broken].isnan().all()


@pytest.mark.parametrize("length", range(1, 14))
def test_paged_is_ragged_without_pages(length):
    """Rows that bring their whole context along, at every length modulo the page size."""
    case = Case("", (length, 3), (length, 3))
    q, k_pages, v_pages, page_tables, row_starts, context_lens = args = tensors_of(case)
    slots = [
        page_tables[row, t // 4].item() * 4 + t % 4
        for row, context in enumerate(context_lens.tolist())
        for t in range(context)
    ]
    packed = ragged_attention(q, k_pages.flatten(0, 1)[slots], v_pages.flatten(0, 1)[slots], row_starts)
    for found, wanted in zip(paged_attention(*args), packed, strict=True):
        assert largest_difference(found, wanted) <= 1e-12


@pytest.mark.parametrize("context", [-1, 4, 25])
def test_a_context_that_cannot_be_is_refused(context):
    args = tensors_of(Case("", (1, 5), (3, 20)))
    with pytest.raises(InvalidValue, match=r"context_lens\[1\]"):
        paged_attention(*args[:5], torch.tensor([3, context]))


def test_a_page_that_is_missing_is_refused():
    args = tensors_of(WHOLE_BATCH)
    args[3][1, 2] = -1  # the third page of a context of nine
    with pytest.raises(IndexError):
        paged_attention(*args)


# --- the kernel, interpreted


@pytest.fixture(scope="module")
def kernel():
    """The wrapper of the kernel, in the interpreter."""
    from minserve.paging import paged_attention_triton

    check_interpreted(paged_attention_triton.paged_attention_kernel)
    return paged_attention_triton.paged_attention


@needs_triton
@cases
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernel_is_the_loop(kernel, case, dtype):  # faults K2, K4: all inputs lie in NaN, results between guards
    assert case.iterations <= MOST_ITERATIONS
    out_error, lse_error = errors(kernel, case, dtype)
    assert out_error <= bound(dtype, 5)
    assert lse_error <= bound(torch.promote_types(dtype, torch.float32), 10)


@needs_triton
@pytest.mark.parametrize("part_tokens", [5, 512])
def test_scores_that_exp_cannot_hold_in_the_kernel(kernel, part_tokens):
    q, *rest = tensors_of(Case("", (1, 3), (18, 9), heads=2, kv_heads=1))
    found = kernel(q * 1000, *rest, part_tokens=part_tokens)
    for result, wanted in zip(found, attended_by_a_loop(q * 1000, *rest), strict=True):
        assert largest_difference(result, wanted) <= 1e-9


@needs_triton
@pytest.mark.parametrize("case", [WHOLE_BATCH, SPLIT], ids=str)
def test_what_else_is_in_the_batch_changes_no_bit(kernel, case):  # fault J4
    args = tensors_of(case, torch.float32)
    options = {"part_tokens": case.part_tokens, "block_keys": KEYS}
    together = kernel(*args, **options)
    for row, num_queries in enumerate(case.queries):
        start, stop = args[4][row : row + 2].tolist()
        (alone,) = (kernel(*call, **options) for call in cut_up(args, row, [num_queries]))
        for one, all_rows in zip(alone, together, strict=True):
            assert torch.equal(one, all_rows[start:stop])


@needs_triton
@pytest.mark.parametrize("part_tokens", [1, 4, 5, 16, 20, 21, 512])
def test_where_a_context_is_split_does_not_matter(kernel, part_tokens):
    case = Case("", (1, 2), (20, 3), heads=2, kv_heads=1, head_dim=5, spare_pages=0)
    found = results_in_poison(kernel, case, torch.float64, part_tokens=part_tokens)
    for result, wanted in zip(found, paged_attention(*tensors_of(case)), strict=True):
        assert largest_difference(result, wanted) <= 1e-12


class FewerPrograms:
    """A kernel of which only the first tiles run, and which keeps the arguments of its launch."""

    def __init__(self, kernel, tiles):
        self.kernel, self.tiles = kernel, tiles

    def __getitem__(self, grid):
        def launch(*args, **options):
            self.args = args
            self.kernel[(min(self.tiles, grid[0]), *grid[1:])](*args, **options)

        return launch


@needs_triton
def test_a_tile_writes_its_own_queries_only(kernel, monkeypatch):  # fault K6
    """Programs that write one cell are a race, which the interpreter's order would hide."""
    from minserve.paging import paged_attention_triton as module

    monkeypatch.setattr(module, "paged_attention_kernel", FewerPrograms(module.paged_attention_kernel, 1))
    args = tensors_of(Case("", (11,), (14,), heads=6, kv_heads=2), torch.float32)
    out, lse = kernel(*args)
    assert (lse[5:] == -torch.inf).all() and (out[5:] == 0).all(), "a tile has 16 lanes: five queries of three heads"
    assert lse[:5].isfinite().all()


@needs_triton
def test_decode_is_split_and_a_chunk_is_not(kernel, monkeypatch):
    from minserve.paging import paged_attention_triton as module

    watched = FewerPrograms(module.paged_attention_kernel, 100)
    monkeypatch.setattr(module, "paged_attention_kernel", watched)
    kernel(*tensors_of(SPLIT, torch.float32), part_tokens=16)
    lses = watched.args[9]
    seen = lses.isfinite().all(2).T.tolist()  # of each token, the parts that somebody computed
    assert seen == [[True, True, True], *[[True, False, False]] * 10]


@needs_triton
@pytest.mark.parametrize("page", [2**31 // 768 - 1, 2**31 // 768, 2**31 // 768 + 1, 2**30])
def test_offsets_are_64_bits_wide(kernel, page):  # fault K1
    """A kernel of its own stores the offsets that these compute; no pool of that size is needed."""
    from far_slots import offsets_of

    slot = page * 16 + 5
    for dtype in (torch.int64, torch.int32):  # a page table may hold 32-bit numbers; offsets must not be such
        found = offsets_of(37, torch.tensor([page], dtype=dtype), page_size=16, head=1, heads=2, size=24)
        assert found == [slot, (slot * 2 + 1) * 24]


@needs_triton
def test_what_the_kernel_refuses(kernel):
    q, k_pages, v_pages, *where = tensors_of(WHOLE_BATCH, torch.float32)
    with pytest.raises(InvalidValue, match="k_pages.dtype"):
        kernel(q, k_pages.double(), v_pages, *where)
    with pytest.raises(InvalidValue, match="lse.dtype"):
        kernel(q, k_pages, v_pages, *where, lse=q.new_empty(q.shape[:2], dtype=torch.float64))
    with pytest.raises(InvalidValue, match="v_pages.stride"):
        kernel(q, k_pages, v_pages.transpose(0, 1).contiguous().transpose(0, 1), *where)
    with pytest.raises(InvalidValue, match="part_tokens"):
        kernel(q, k_pages, v_pages, *where, part_tokens=0)
    for size in (8, 24):
        with pytest.raises(InvalidValue, match="block_keys"):
            kernel(q, k_pages, v_pages, *where, block_keys=size)


@needs_triton
def test_a_compiled_kernel_wants_a_gpu(kernel, monkeypatch):
    from minserve.paging import paged_attention_triton as module

    args = tensors_of(CASES[0], torch.float32)
    check_a_compiled_kernel_wants_a_gpu(monkeypatch, module, "paged_attention_kernel", lambda: kernel(*args))


def test_a_missing_triton_is_named(monkeypatch):
    check_a_missing_triton_is_named(monkeypatch, "minserve/paging/paged_attention_triton.py")
