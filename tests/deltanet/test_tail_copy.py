"""Tails kept for ragged rows: the reference against a loop, the kernel against the reference, on one table of cases."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from kernel_checks import (
    DTYPES,
    GUARD,
    MARGIN,
    MOST_ITERATIONS,
    NAN,
    check_a_compiled_kernel_wants_a_gpu,
    check_a_missing_triton_is_named,
    check_interpreted,
    largest_difference,
    needs_triton,
)

from minserve.deltanet.conv_tail import conv_tail
from minserve.deltanet.tail_copy import tail_copy
from minserve.errors import InvalidValue


@dataclass(frozen=True)
class Case:
    """One call: the length of each row, the slots that it reads and writes, and the sizes of everything."""

    note: str
    lengths: tuple[int, ...]
    read: tuple[int, ...]
    write: tuple[int, ...]
    channels: int = 5
    keep: int = 3
    num_slots: int = 6


CASES = [
    Case("one token, decode", (1,), (2,), (3,)),
    Case("a prompt that begins", (7,), (-1,), (0,)),
    Case("rows shorter than the tail", (1, 2, 3), (0, 1, 2), (3, 4, 5)),
    Case("beginning and short: zeros are remembered", (1, 2), (-1, -1), (4, 1)),
    Case("an empty row keeps its tail", (2, 0, 4), (5, 0, 3), (1, 2, 4)),
    Case("an empty row that begins", (0,), (-1,), (2,)),
    Case("nobody wants the middle one", (4, 4, 4), (0, -1, 2), (3, -1, 4)),
    Case("no row at all", (), (), ()),
    Case("nothing but rows nobody wants", (2, 1), (1, -1), (-1, -1)),
    Case("every slot is read or written, in no order", (5, 1, 2), (4, 0, 2), (1, 5, 3)),
    Case("one channel", (4, 1), (1, -1), (0, 5), channels=1),
    Case("a power of two", (2, 9), (3, 4), (5, 0), channels=16),
    Case("odd sizes", (3, 1, 6), (2, -1, 6), (0, 4, 7), channels=37, keep=2, num_slots=9),
    Case("more channels than a block has lanes", (2, 5), (1, -1), (2, 0), channels=2051, num_slots=4),
    Case("a kernel of two looks back on one", (1, 3), (1, -1), (3, 0), keep=1),
    Case("a kernel of eight", (2, 11, 7), (1, 0, -1), (4, 2, 3), channels=6, keep=7),
]
cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.note)


def tensors_of(case: Case, dtype=torch.float32, index_dtype=torch.int64) -> tuple[torch.Tensor, ...]:
    """The arguments of a call. Slots that no row reads are free memory: they hold NaN."""
    generator = torch.Generator().manual_seed(len(case.note))
    numbers = torch.randn(sum(case.lengths) + case.num_slots * case.keep, case.channels, generator=generator)
    x, tails = numbers[: sum(case.lengths)], numbers[sum(case.lengths) :].view(-1, case.keep, case.channels)
    free = [slot for slot in range(case.num_slots) if slot not in case.read]
    tails = tails.index_fill(0, torch.tensor(free, dtype=torch.long), NAN)
    row_starts = torch.tensor([0, *case.lengths]).cumsum(0)
    slots = (torch.tensor(ids, dtype=index_dtype) for ids in (case.read, case.write))
    return x.to(dtype), row_starts.to(index_dtype), tails.to(dtype), *slots


def kept_by_a_loop(x, row_starts, tails, state_read, state_write):
    """What must come out, one row after the other."""
    out, keep = tails.clone(), tails.shape[1]
    for row, (read, write) in enumerate(zip(state_read.tolist(), state_write.tolist(), strict=True)):
        inputs = list(tails[read]) if read >= 0 else [torch.zeros_like(tails[0, 0])] * keep
        inputs += list(x[row_starts[row] : row_starts[row + 1]])
        if write >= 0:
            out[write] = torch.stack(inputs[-keep:])
    return out


def errors(kernel, case: Case, dtype) -> tuple[float]:
    """How far the kernel's pool is from the loop's; slots with NaN are equal where both hold it."""
    args = tensors_of(case, dtype)
    found, wanted = kernel(*args), kept_by_a_loop(*args)
    assert torch.equal(found.isnan(), wanted.isnan())
    return (largest_difference(found.nan_to_num(GUARD), wanted.nan_to_num(GUARD)),)


def check_same(found, wanted):
    """Equal to the last bit, NaN for NaN."""
    assert found.dtype == wanted.dtype and torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.nan_to_num(GUARD), wanted.nan_to_num(GUARD))


@cases
@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32], ids=str)
def test_the_reference_is_the_loop(case, index_dtype):
    args = tensors_of(case, torch.float64, index_dtype)
    before = [arg.clone() for arg in args]
    found = tail_copy(*args)
    check_same(found, kept_by_a_loop(*args))
    for arg, old in zip(args, before, strict=True):
        assert torch.equal(arg.nan_to_num(GUARD), old.nan_to_num(GUARD)), "an argument was changed"
    written = [slot for slot in case.write if slot >= 0]
    assert found[written].isfinite().all(), "free memory got into a tail"


@cases
def test_a_row_keeps_what_conv_tail_keeps(case):
    x, row_starts, tails, read, write = tensors_of(case, torch.float64)
    found = tail_copy(x, row_starts, tails, read, write)
    weight = torch.ones(case.channels, case.keep + 1, dtype=torch.float64)
    for row, (old, new) in enumerate(zip(case.read, case.write, strict=True)):
        begin = tails[old] if old >= 0 else torch.zeros_like(tails[0])
        _, tail = conv_tail(x[None, row_starts[row] : row_starts[row + 1]], weight, begin[None])
        if new >= 0:
            assert torch.equal(found[new], tail[0])


def test_the_reference_has_a_gradient():
    x, row_starts, tails, read, write = tensors_of(CASES[2], torch.float64)
    x.requires_grad_()
    tail_copy(x, row_starts, tails, read, write)[list(CASES[2].write)].sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))  # every token of a short row is kept, once


# --- the kernel, interpreted


@pytest.fixture(scope="module")
def kernel():
    """The wrapper of the kernel, in the interpreter."""
    from minserve.deltanet import tail_copy_triton

    check_interpreted(tail_copy_triton.tail_copy_kernel)
    return tail_copy_triton.tail_copy


@needs_triton
@cases
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernel_is_the_reference(kernel, case, dtype):
    args = tensors_of(case, dtype)
    assert len(case.lengths) * case.keep <= MOST_ITERATIONS
    check_same(kernel(*args), tail_copy(*args))


@needs_triton
@cases
def test_the_kernel_stays_inside(kernel, case):
    """Inputs and pool lie between guards; only the written slots change, and no guard is read or overwritten."""
    x, row_starts, tails, read, write = tensors_of(case, index_dtype=torch.int32)
    memory = torch.full((3, 2 * MARGIN + max(x.numel(), tails.numel())), GUARD)
    memory[:2] = NAN  # what is read lies in poison: one lane too many would bring it in
    inside = [
        line[MARGIN : MARGIN + part.numel()].view_as(part) for line, part in zip(memory, (x, tails, tails), strict=True)
    ]
    for view, part in zip(inside, (x, tails, torch.full_like(tails, GUARD)), strict=True):
        view.copy_(part)
    before = memory.clone()
    found = kernel(inside[0], row_starts, inside[1], read, write, out=inside[2])
    assert found.data_ptr() == inside[2].data_ptr()
    written = torch.tensor([slot for slot in case.write if slot >= 0], dtype=torch.long)
    wanted = torch.full_like(tails, GUARD).index_copy(0, written, tail_copy(x, row_starts, tails, read, write)[written])
    assert torch.equal(inside[2], wanted)
    inside[2].fill_(GUARD)
    assert torch.equal(memory[2], before[2]) and torch.equal(memory[:2].nan_to_num(1), before[:2].nan_to_num(1))


@needs_triton
def test_the_pool_may_be_its_own_output(kernel):
    """No row writes what a row reads, so the order of the programs does not matter."""
    for case in CASES:
        x, row_starts, tails, read, write = tensors_of(case)
        wanted = tail_copy(x, row_starts, tails, read, write)
        pool = tails.clone()
        assert kernel(x, row_starts, pool, read, write, out=pool) is pool
        check_same(pool, wanted)


@needs_triton
@pytest.mark.parametrize("slot", [2**31 // 15 - 1, 2**31 // 15, 2**31 // 15 + 1, 2**33])
def test_offsets_are_64_bits_wide(kernel, slot):  # fault K1
    """A kernel of its own stores the offsets that this one computes; no tensor of that size is needed."""
    from far_offsets import offsets_of

    found = offsets_of(torch.tensor([slot]), column=2, channels=5, keep=3)
    assert found.tolist() == [slot * 5, (slot * 3 + 2) * 5]
    if slot < 2**31:  # slots and tokens may come as 32-bit numbers; offsets must not
        assert offsets_of(torch.tensor([slot], dtype=torch.int32), column=2, channels=5, keep=3).equal(found)


@needs_triton
def test_what_the_kernel_refuses(kernel):
    x, row_starts, tails, read, write = tensors_of(CASES[2])
    with pytest.raises(InvalidValue, match="tails.dtype"):
        kernel(x, row_starts, tails.double(), read, write)
    with pytest.raises(InvalidValue, match="contiguous"):
        kernel(x.T.contiguous().T, row_starts, tails, read, write)


@needs_triton
def test_a_compiled_kernel_wants_a_gpu(kernel, monkeypatch):
    from minserve.deltanet import tail_copy_triton as module

    args = tensors_of(CASES[0])
    check_a_compiled_kernel_wants_a_gpu(monkeypatch, module, "tail_copy_kernel", lambda: kernel(*args))


def test_a_missing_triton_is_named(monkeypatch):
    check_a_missing_triton_is_named(monkeypatch, "minserve/deltanet/tail_copy_triton.py")
