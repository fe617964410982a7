"""The convolution of ragged rows: reference and kernel against a loop, on one table of cases."""

from __future__ import annotations

import pytest
import torch
from conv_cases import CASES, Case, convolved_by_a_loop, errors, tensors_of
from kernel_checks import (
    DTYPES,
    bound,
    check_a_compiled_kernel_wants_a_gpu,
    check_a_missing_triton_is_named,
    check_interpreted,
    needs_triton,
)

from minserve.deltanet.conv_tail import conv_tail, conv_tail_ragged
from minserve.errors import InvalidValue

cases = pytest.mark.parametrize("case", CASES, ids=str)


def check_the_loop(found, wanted):
    """Outputs agree, and tails to the last bit: they are copies."""
    torch.testing.assert_close(found[0], wanted[0], rtol=0, atol=1e-13)
    assert torch.equal(found[1], wanted[1])


@cases
def test_the_reference_is_the_loop(case):
    args = tensors_of(case)
    before = [x.clone() for x in args]
    out, last, after = convolved_by_a_loop(*args)
    check_the_loop(conv_tail_ragged(*args), (out, last))
    check_the_loop(conv_tail_ragged(*args, every_tail=True), (out, after))
    assert all(torch.equal(x, y) for x, y in zip(args, before, strict=True)), "an argument was changed"


@pytest.mark.parametrize("sizes", [(8, 8, 4), (1,) * 20, (2,) * 10, (1, 2, 1, 2, 14), (0, 5, 0, 15)], ids=str)
def test_parts_go_on_from_the_tail_before(sizes):  # fault A11: parts of one token and two, shorter than the tail
    x, weight, tails, row_starts = tensors_of(Case("", (20,)))
    whole, tail, outs, begin = conv_tail_ragged(x, weight, tails, row_starts), tails, [], 0
    for size in sizes:
        out, tail = conv_tail_ragged(x[begin : begin + size], weight, tail, torch.tensor([0, size]))
        begin += size
        outs.append(out)
    check_the_loop((torch.cat(outs), tail), whole)


@pytest.mark.parametrize("lengths", [(4, 1, 0, 3, 1), (1, 1, 1), (0, 0), ()], ids=str)
def test_every_tail_is_that_of_a_run_which_ends_there(lengths):  # fault E4, of the convolution
    x, weight, tails, row_starts = tensors_of(Case("", lengths))
    _, found = conv_tail_ragged(x, weight, tails, row_starts, every_tail=True)
    assert found.shape == (sum(lengths), 3, 5)
    starts = row_starts.tolist()
    for row, (start, stop) in enumerate(zip(starts[:-1], starts[1:], strict=True)):
        for token in range(start, stop):
            _, tail = conv_tail(x[None, start : token + 1], weight, tails[row : row + 1])
            assert torch.equal(found[token], tail[0])


# --- the kernel, interpreted


@pytest.fixture(scope="module")
def kernel():
    """The wrapper of the kernel, in the interpreter."""
    from minserve.deltanet import conv_tail_triton

    check_interpreted(conv_tail_triton.conv_tail_kernel)
    return conv_tail_triton.conv_tail_ragged


@needs_triton
@cases
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernel_is_the_loop(kernel, case, dtype):  # faults K2, K4: inputs lie in NaN, results between guards
    out_error, tail_error = errors(kernel, case, dtype)
    assert out_error <= bound(dtype, 10) and tail_error == 0


@needs_triton
def test_what_else_is_in_the_batch_changes_no_bit(kernel):  # fault J4
    x, weight, tails, row_starts = tensors_of(Case("", (1, 9, 0, 2)), torch.float32)
    together = kernel(x, weight, tails, row_starts)
    for row in range(4):
        start, stop = row_starts[row : row + 2].tolist()
        out, tail = kernel(x[start:stop], weight, tails[row : row + 1], torch.tensor([0, stop - start]))
        assert torch.equal(out, together[0][start:stop]) and torch.equal(tail[0], together[1][row])


@needs_triton
@pytest.mark.parametrize("row", [2**31 // 15 - 1, 2**31 // 15, 2**31 // 15 + 1, 2**30])
def test_offsets_are_64_bits_wide(kernel, row):  # fault K1
    from far_offsets import convolution_offsets_of

    for dtype in (torch.int64, torch.int32):
        found = convolution_offsets_of(torch.tensor([row], dtype=dtype), column=2, channels=5, keep=3)
        assert found == [row * 5, (row * 3 + 2) * 5]


@needs_triton
def test_what_the_kernel_refuses(kernel):
    x, weight, tails, row_starts = tensors_of(Case("", (2, 1)), torch.float32)
    with pytest.raises(InvalidValue, match="out.dtype"):
        kernel(x, weight, tails, row_starts, out=x.double())
    with pytest.raises(InvalidValue, match="new_tails.dtype"):
        kernel(x, weight, tails, row_starts, new_tails=tails.double())
    with pytest.raises(InvalidValue, match=r"tails.stride\(\)"):
        kernel(x, weight, tails.mT.contiguous().mT, row_starts)


@needs_triton
def test_a_compiled_kernel_wants_a_gpu(kernel, monkeypatch):
    from minserve.deltanet import conv_tail_triton as module

    args = tensors_of(CASES[0], torch.float32)
    check_a_compiled_kernel_wants_a_gpu(monkeypatch, module, "conv_tail_kernel", lambda: kernel(*args))


def test_a_missing_triton_is_named(monkeypatch):
    check_a_missing_triton_is_named(monkeypatch, "minserve/deltanet/conv_tail_triton.py")
