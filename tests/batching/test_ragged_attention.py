"""Attention over ragged rows: reference and kernel against a loop, on one table of cases."""

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
from ragged_cases import BLOCKS, CASES, Case, attended_by_a_loop, errors, results_in_poison, tensors_of

from minserve.batching.ragged_attention import QUERIES_AT_A_TIME, ragged_attention
from minserve.errors import InvalidValue

cases = pytest.mark.parametrize("case", CASES, ids=str)
LONG = Case("more queries than are done at a time", (3, QUERIES_AT_A_TIME + 5, 2 * QUERIES_AT_A_TIME), heads=2)


@pytest.mark.parametrize("case", [*CASES, LONG], ids=str)
@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32], ids=str)
def test_the_reference_is_the_loop(case, index_dtype):
    args = tensors_of(case, torch.float64, index_dtype)
    out, lse = ragged_attention(*args)
    wanted = attended_by_a_loop(*args)
    assert out.dtype == lse.dtype == torch.float64
    assert largest_difference(out, wanted[0]) <= 1e-12 and largest_difference(lse, wanted[1]) <= 1e-12


@cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_reference_in_narrow_numbers(case, dtype):
    args = tensors_of(case, dtype)
    out, lse = ragged_attention(*args)
    wanted = attended_by_a_loop(*args)
    assert out.dtype == dtype and lse.dtype == torch.float32
    assert largest_difference(out, wanted[0]) <= bound(dtype, 5)
    assert largest_difference(lse, wanted[1]) <= bound(torch.float32, 10)


def test_scores_that_exp_cannot_hold():
    q, *rest = tensors_of(CASES[9])
    for found, wanted in zip(ragged_attention(q * 1000, *rest), attended_by_a_loop(q * 1000, *rest), strict=True):
        assert largest_difference(found, wanted) <= 1e-9


def test_the_reference_has_a_gradient():
    q, k, v, row_starts = tensors_of(Case("", (3, 0, 2), heads=4, kv_heads=2, head_dim=2))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    assert torch.autograd.gradcheck(lambda q, k, v: ragged_attention(q, k, v, row_starts), inputs)


def test_a_row_does_not_see_the_others():
    """Not even NaN goes from one row to another."""
    q, k, v, row_starts = tensors_of(CASES[10])
    wanted = ragged_attention(q, k, v, row_starts)
    start, stop = row_starts[1:3].tolist()
    for x in (q, k, v):
        x[start:stop] = NAN
    others = [*range(start), *range(stop, len(q))]
    for found, clean in zip(ragged_attention(q, k, v, row_starts), wanted, strict=True):
        assert torch.equal(found[others], clean[others]) and found[start:stop].isnan().all()


def test_views_will_do():
    """Keys and values may be slices of one projection's output."""
    q, k, v, row_starts = tensors_of(CASES[2])
    joined = torch.cat([q, k, v], dim=1)
    views = joined.split([q.shape[1], k.shape[1], v.shape[1]], dim=1)
    for found, wanted in zip(ragged_attention(*views, row_starts), ragged_attention(q, k, v, row_starts), strict=True):
        assert largest_difference(found, wanted) <= 1e-12


@pytest.mark.parametrize("row_starts", [[0, 3], [1, 4], [], [0, 5]])
def test_rows_that_leave_tokens_out_are_refused(row_starts):
    q, k, v, _ = tensors_of(Case("", (4,)))
    with pytest.raises(InvalidValue, match="row_starts"):
        ragged_attention(q, k, v, torch.tensor(row_starts, dtype=torch.long))


# --- the kernel, interpreted


@pytest.fixture(scope="module")
def kernel():
    """The wrapper of the kernel, in the interpreter."""
    from minserve.batching import ragged_attention_triton

    check_interpreted(ragged_attention_triton.ragged_attention_kernel)
    return ragged_attention_triton.ragged_attention


@needs_triton
@cases
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernel_is_the_loop(kernel, case, dtype):  # faults K2, K4: all inputs lie in NaN, results between guards
    assert case.iterations <= MOST_ITERATIONS
    out_error, lse_error = errors(kernel, case, dtype)
    assert out_error <= bound(dtype, 5)
    assert lse_error <= bound(torch.promote_types(dtype, torch.float32), 10)


@needs_triton
def test_scores_that_exp_cannot_hold_in_the_kernel(kernel):
    q, *rest = tensors_of(CASES[9])
    for found, wanted in zip(kernel(q * 1000, *rest, **BLOCKS), attended_by_a_loop(q * 1000, *rest), strict=True):
        assert largest_difference(found, wanted) <= 1e-9


@needs_triton
@pytest.mark.parametrize("case", [CASES[2], CASES[10]], ids=str)
def test_what_else_is_in_the_batch_changes_no_bit(kernel, case):  # fault J4
    q, k, v, row_starts = tensors_of(case, torch.float32)
    together = kernel(q, k, v, row_starts, **BLOCKS)
    for start, stop in zip(row_starts[:-1].tolist(), row_starts[1:].tolist(), strict=True):
        alone = kernel(*(x[start:stop] for x in (q, k, v)), torch.tensor([0, stop - start]), **BLOCKS)
        for one, all_rows in zip(alone, together, strict=True):
            assert torch.equal(one, all_rows[start:stop])


@needs_triton
@pytest.mark.parametrize("blocks", [(16, 32), (32, 16), (64, 32), (None, None)])
def test_the_size_of_a_tile_does_not_matter(kernel, blocks):
    case = CASES[9]
    out, lse = results_in_poison(kernel, case, torch.float64, block_queries=blocks[0], block_keys=blocks[1])
    wanted = ragged_attention(*tensors_of(case))
    assert largest_difference(out, wanted[0]) <= 1e-12 and largest_difference(lse, wanted[1]) <= 1e-12


@needs_triton
@pytest.mark.parametrize("token", [2**31 // 96 - 1, 2**31 // 96, 2**31 // 96 + 1, 2**30])
def test_offsets_are_64_bits_wide(kernel, token):  # fault K1
    """A kernel of its own stores the offsets that this one computes; no tensor of that size is needed."""
    from far_tokens import offset_of

    for dtype in (torch.int64, torch.int32):  # tokens are counted in 32 bits; offsets must not be
        assert offset_of(torch.tensor([token], dtype=dtype), head=3, heads=4, size=24) == (token * 4 + 3) * 24


@needs_triton
def test_what_the_kernel_refuses(kernel):
    q, k, v, row_starts = tensors_of(CASES[2], torch.float32)
    with pytest.raises(InvalidValue, match="k.dtype"):
        kernel(q, k.double(), v, row_starts)
    with pytest.raises(InvalidValue, match="lse.dtype"):
        kernel(q, k, v, row_starts, lse=q.new_empty(q.shape[:2], dtype=torch.float64))
    with pytest.raises(InvalidValue, match="out.stride"):
        kernel(q, k, v, row_starts, out=q.new_empty(q.shape[::-1]).permute(2, 1, 0))
    for size in (8, 24, -16):
        with pytest.raises(InvalidValue, match="block_keys"):
            kernel(q, k, v, row_starts, block_keys=size)


@needs_triton
def test_a_compiled_kernel_wants_a_gpu(kernel, monkeypatch):
    from minserve.batching import ragged_attention_triton as module

    args = tensors_of(CASES[0], torch.float32)
    check_a_compiled_kernel_wants_a_gpu(monkeypatch, module, "ragged_attention_kernel", lambda: kernel(*args))


def test_a_missing_triton_is_named(monkeypatch):
    check_a_missing_triton_is_named(monkeypatch, "minserve/batching/ragged_attention_triton.py")
