"""Keys and values written to their slots: reference and kernel against a loop, on one table of cases."""

from __future__ import annotations

import pytest
import torch
from kernel_checks import (
    DTYPES,
    MOST_ITERATIONS,
    check_a_compiled_kernel_wants_a_gpu,
    check_interpreted,
    needs_triton,
)
from write_cases import CASES, Case, errors, tensors_of, written_by_a_loop

from minserve.errors import InvalidValue
from minserve.paging.paged_attention import write_pages

cases = pytest.mark.parametrize("case", CASES, ids=str)


@cases
@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16], ids=str)
def test_the_reference_is_the_loop(case, dtype):
    assert errors(write_pages, case, dtype) == (0, 0)


def test_views_will_do():
    """Keys and values may be slices of one projection's output."""
    k, v, k_pages, v_pages, slots = tensors_of(CASES[1])
    wanted = written_by_a_loop(k, v, k_pages, v_pages, slots)
    write_pages(*torch.cat([k, v], dim=1).chunk(2, dim=1), k_pages, v_pages, slots)
    assert torch.equal(k_pages, wanted[0]) and torch.equal(v_pages, wanted[1])


def test_a_copy_of_the_pool_is_not_written_in_its_place():
    """A pool whose slots do not lie in order cannot be seen as slots: that is an error, and no lost write."""
    k, v, k_pages, v_pages, slots = tensors_of(CASES[1])
    with pytest.raises(RuntimeError, match="view"):
        write_pages(k, v, k_pages.transpose(0, 1).contiguous().transpose(0, 1), v_pages, slots)


@pytest.mark.parametrize("slot", [20, 2**40])
def test_a_slot_beyond_the_pool_is_refused(slot):
    k, v, k_pages, v_pages, _ = tensors_of(Case("", (0,)))
    with pytest.raises(IndexError):
        write_pages(k, v, k_pages, v_pages, torch.tensor([slot]))


# --- the kernel, interpreted


@pytest.fixture(scope="module")
def kernel():
    """The wrapper of the kernel, in the interpreter."""
    from minserve.paging import paged_attention_triton

    check_interpreted(paged_attention_triton.write_pages_kernel)
    return paged_attention_triton.write_pages


@needs_triton
@cases
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernel_is_the_loop(kernel, case, dtype):  # faults K2, K4: what is read lies in NaN, pools between guards
    assert case.iterations <= MOST_ITERATIONS
    assert errors(kernel, case, dtype) == (0, 0)


@needs_triton
@pytest.mark.parametrize("slot", [2**31 // 48 - 1, 2**31 // 48, 2**31 // 48 + 1, 2**33])
def test_offsets_are_64_bits_wide(kernel, slot):  # fault K1
    """A slot is a page's first slot and a place; its offset counts all its numbers as one head's."""
    from far_slots import offsets_of

    page = torch.tensor([slot // 4])
    assert offsets_of(slot % 4, page, page_size=4, head=0, heads=48, size=1) == [slot, slot * 48]


@needs_triton
def test_what_the_kernel_refuses(kernel):
    k, v, k_pages, v_pages, slots = tensors_of(CASES[1], torch.float32)
    with pytest.raises(InvalidValue, match="v_pages.dtype"):
        kernel(k, v, k_pages, v_pages.double(), slots)
    with pytest.raises(InvalidValue, match="k_pages.stride"):
        kernel(k, v, k_pages.transpose(0, 1).contiguous().transpose(0, 1), v_pages, slots)


@needs_triton
def test_a_compiled_kernel_wants_a_gpu(kernel, monkeypatch):
    from minserve.paging import paged_attention_triton as module

    args = tensors_of(CASES[0], torch.float32)
    check_a_compiled_kernel_wants_a_gpu(monkeypatch, module, "paged_attention_kernel", lambda: kernel(*args))
