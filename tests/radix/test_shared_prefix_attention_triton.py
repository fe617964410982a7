"""The kernels of attention behind a shared prefix, interpreted, against a loop, on the reference's table of cases."""

from __future__ import annotations

from functools import partial

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
from shared_cases import CASES, Case, attended_by_a_loop, errors, results_in_poison, tensors_of

from minserve.errors import InvalidValue
from minserve.paging.paged_attention import paged_attention

WHOLE_BATCH = next(case for case in CASES if case.note.startswith("decode rows, a chunk and drafts"))
LONG = Case("", (1, 3, 2), (60, 58, 57), page_size=8, shared=6)


@pytest.fixture(scope="module")
def module():
    """The kernels' module, in the interpreter."""
    from minserve.radix import shared_prefix_attention_triton

    check_interpreted(shared_prefix_attention_triton.prefix_attention_kernel)
    return shared_prefix_attention_triton


@pytest.fixture(scope="module")
def kernel(module):
    """The wrapper of the kernels, beside that of paged attention's."""
    from minserve.paging import paged_attention_triton

    return partial(module.shared_prefix_attention, paged_attention=paged_attention_triton.paged_attention)


@needs_triton
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernel_is_the_loop(kernel, case, dtype):  # faults K2, K4: all inputs lie in NaN, results between guards
    assert case.iterations <= MOST_ITERATIONS
    out_error, lse_error = errors(kernel, case, dtype)
    assert out_error <= bound(dtype, 5)
    assert lse_error <= bound(torch.promote_types(dtype, torch.float32), 10)


@needs_triton
@pytest.mark.parametrize("factor, part_tokens", [(1000, 5), (1000, 512), (-1000, 5)])
def test_scores_that_exp_cannot_hold_in_the_kernel(kernel, factor, part_tokens):
    q, *rest = tensors_of(Case("", (1, 3), (18, 15), heads=2, kv_heads=1, shared=3))
    found = kernel(q * factor, *rest, 3, part_tokens=part_tokens)
    for result, wanted in zip(found, attended_by_a_loop(q * factor, *rest), strict=True):
        assert largest_difference(result, wanted) <= 1e-9


@needs_triton
@pytest.mark.parametrize("part_tokens", [1, 4, 5, 16, 20, 21, 512])
def test_where_a_prefix_is_split_does_not_matter(kernel, part_tokens):
    case = Case("", (1, 2), (23, 22), heads=2, kv_heads=1, head_dim=5, shared=5)
    for result, wanted in zip(
        results_in_poison(kernel, case, torch.float64, part_tokens=part_tokens),
        paged_attention(*tensors_of(case)),
        strict=True,
    ):
        assert largest_difference(result, wanted) <= 1e-12


@needs_triton
@pytest.mark.parametrize("strided", range(6))
def test_arguments_may_be_views(kernel, strided):
    """Of queries and tables, every second number of something wider; a pool must lie as it is."""
    args, case = list(tensors_of(WHOLE_BATCH, torch.float32)), WHOLE_BATCH
    wanted = kernel(*args, case.shared)
    if strided in (1, 2):
        return check_a_strided_pool_is_refused(kernel, args, case, strided)
    wide = torch.stack([args[strided]] * 2, -1)
    args[strided] = wide[..., 0]
    for found, other in zip(kernel(*args, case.shared), wanted, strict=True):
        assert torch.equal(found, other)


def check_a_strided_pool_is_refused(kernel, args, case, strided):
    """The kernel names the pool."""
    args[strided] = args[strided].transpose(0, 1).contiguous().transpose(0, 1)
    with pytest.raises(InvalidValue, match=f"{'.kv'[strided]}_pages.stride"):
        kernel(*args, case.shared)


@needs_triton
@pytest.mark.parametrize("case", [case for case in CASES if "empty row" in case.note], ids=str)
def test_any_paged_attention_will_do(module, case):
    """The reference's too, which refuses a context that is less than none, of an empty row as well."""
    args = tensors_of(case)
    found = module.shared_prefix_attention(*args, case.shared, paged_attention)
    assert max(largest_difference(x, y) for x, y in zip(found, attended_by_a_loop(*args), strict=True)) <= 1e-12


class Watched:
    """A kernel of which only the first programs run, and which keeps the grid and the arguments of its launch."""

    def __init__(self, kernel, tiles):
        self.kernel, self.tiles = kernel, tiles

    def __getitem__(self, grid):
        def launch(*args, **options):
            self.grid, self.args = grid, args
            args[4].fill_(NAN)
            args[5].fill_(NAN)
            self.kernel[(min(self.tiles, grid[0]), *grid[1:])](*args, **options)

        return launch


@needs_triton
def test_a_tile_writes_its_own_queries_only(kernel, module, monkeypatch):  # fault K6
    """Programs that write one cell are a race, which the interpreter's order would hide."""
    watched = Watched(module.prefix_attention_kernel, 1)
    monkeypatch.setattr(module, "prefix_attention_kernel", watched)
    kernel(*tensors_of(Case("", (20, 5), (30, 12), heads=6, kv_heads=2), torch.float32), 1)
    (outs,), (lses,) = watched.args[4:6]
    assert watched.grid == (2, 2, 1) and lses[:21].isfinite().all() and outs[:21].isfinite().all()
    own = torch.tensor([True, False, False] * 2)  # a tile has 64 lanes: 21 queries of three heads, and one head more
    assert torch.equal(lses[21].isfinite(), own) and torch.equal(outs[21].isfinite().all(-1), own)
    assert lses[22:].isnan().all() and outs[22:].isnan().all()


@needs_triton
@pytest.mark.parametrize("enough, parts, lengths", [(512, 10, 5), (6, 3, 16), (4, 2, 24), (1, 1, 48)])
def test_only_few_queries_split_a_prefix(kernel, module, monkeypatch, enough, parts, lengths):
    watched = Watched(module.prefix_attention_kernel, 100)
    monkeypatch.setattr(module, "prefix_attention_kernel", watched)
    monkeypatch.setattr(module, "ENOUGH_PROGRAMS", enough)
    args = tensors_of(LONG)
    found = kernel(*args, LONG.shared, part_tokens=5)
    assert watched.grid == (1, 2, parts) and watched.args[9] == lengths
    assert max(largest_difference(x, y) for x, y in zip(found, attended_by_a_loop(*args), strict=True)) <= 1e-12


@needs_triton
@pytest.mark.parametrize("page", [2**31 // 768 - 1, 2**31 // 768, 2**31 // 768 + 1, 2**30])
def test_offsets_are_64_bits_wide(module, page):  # fault K1
    """A kernel of its own stores the offsets that these compute; no pool of that size is needed."""
    from far_prefix_slots import offsets_of

    slot, query = page * 16 + 5, 2**27 + 5
    for dtype in (torch.int64, torch.int32):  # a page table may hold 32-bit numbers; offsets must not be such
        found = offsets_of(query, torch.tensor([page], dtype=dtype), page_size=16, head=1, heads=2, size=24)
        assert found == [slot, (slot * 2 + 1) * 24, (query * 2 + 1) * 24]


@needs_triton
def test_what_the_kernel_refuses(kernel):
    q, k_pages, v_pages, *where = tensors_of(WHOLE_BATCH, torch.float32)
    with pytest.raises(InvalidValue, match="k_pages.dtype"):
        kernel(q, k_pages.double(), v_pages, *where, 2)
    with pytest.raises(InvalidValue, match="lse.dtype"):
        kernel(q, k_pages, v_pages, *where, 2, lse=q.new_empty(q.shape[:2], dtype=torch.float64))
    with pytest.raises(InvalidValue, match="part_tokens"):
        kernel(q, k_pages, v_pages, *where, 2, part_tokens=0)
    for size in (8, 24):
        with pytest.raises(InvalidValue, match="block_keys"):
            kernel(q, k_pages, v_pages, *where, 2, block_keys=size)
    for num_shared_pages in (-1, where[0].shape[1] + 1):
        with pytest.raises(InvalidValue, match="num_shared_pages"):
            kernel(q, k_pages, v_pages, *where, num_shared_pages)


@needs_triton
def test_a_compiled_kernel_wants_a_gpu(kernel, module, monkeypatch):
    args = tensors_of(CASES[0], torch.float32)
    check_a_compiled_kernel_wants_a_gpu(monkeypatch, module, "prefix_attention_kernel", lambda: kernel(*args, 1))


def test_a_missing_triton_is_named(monkeypatch):
    check_a_missing_triton_is_named(monkeypatch, "minserve/radix/shared_prefix_attention_triton.py")
