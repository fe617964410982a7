"""The kernels of the gated delta rule, interpreted, against a loop, on one table of cases."""

from __future__ import annotations

import pytest
import torch
from delta_cases import CASES, Case, errors, run_by_a_loop, tensors_of
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

from minserve.errors import InvalidValue
from minserve.model.implementations import choose_implementation

LONG, SHORT = Case("", (35,)), Case("", (7,))


@pytest.fixture(scope="module")
def kernel():
    """The wrapper of the kernels, in the interpreter."""
    from minserve.deltanet import gated_delta_triton

    check_interpreted(gated_delta_triton.across_chunks_kernel)
    return gated_delta_triton.gated_delta_ragged


@needs_triton
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernel_is_the_loop(kernel, case, dtype):  # faults A10, K2, K4: inputs lie in NaN, results between guards
    assert case.iterations <= MOST_ITERATIONS
    out_error, state_error = errors(kernel, case, dtype)
    assert out_error <= bound(dtype, 5)
    assert state_error <= bound(torch.promote_types(dtype, torch.float32), 5)


@needs_triton
def test_what_nobody_wrote_is_not_read(kernel, monkeypatch):  # fault K4, of the scratch memory between the kernels
    args, made, new_empty = tensors_of(Case("", (1, 20, 0, 17))), [], torch.Tensor.new_empty

    def poisoned(self, *args, **kwargs):
        new = new_empty(self, *args, **kwargs)
        if new.is_floating_point():
            made.append(new.fill_(NAN))
        return new

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    found = kernel(*args, 16)
    assert (4, 1, 16, 16) in [x.shape for x in made], "there is no scratch memory of four chunks"
    for result, wanted in zip(found, run_by_a_loop(*args), strict=False):
        assert largest_difference(result, wanted) <= 1e-12


def part(args, start, stop, state):
    """The arguments that run tokens start..stop of a single row on from a state."""
    return *(x[start:stop] for x in args[:5]), state, torch.tensor([0, stop - start])


@needs_triton
@pytest.mark.parametrize("case, cuts", [(SHORT, (1, 3, 6)), (LONG, (17,))], ids=["short", "long"])
def test_a_row_in_parts_is_the_row(kernel, case, cuts):  # faults A11, J4
    """Token by token every part is the same to the last bit; a long row's parts may be computed in another way."""
    args = tensors_of(case, torch.float32)
    whole, state, outs = kernel(*args, case.chunk), args[5], []
    for start, stop in zip((0, *cuts), (*cuts, sum(case.lengths)), strict=True):
        before = state.clone()
        out, new_state = kernel(*part(args, start, stop, state), case.chunk)
        assert torch.equal(state, before), "the state that was read has changed"
        state = new_state
        outs.append(out)
    for found, wanted in zip((torch.cat(outs), state), whole, strict=True):
        if case is SHORT:
            assert torch.equal(found, wanted)
        assert largest_difference(found, wanted) <= bound(torch.float32, 5)


@needs_triton
def test_a_row_cut_between_chunks_is_the_row_to_the_last_bit(kernel):  # fault J4
    args = tensors_of(Case("", (64,)), torch.float32)
    out, state = kernel(*part(args, 0, 32, args[5]), 16)
    rest, state = kernel(*part(args, 32, 64, state), 16)
    whole, last = kernel(*args, 16)
    assert torch.equal(torch.cat([out, rest]), whole) and torch.equal(state, last)


@needs_triton
def test_what_else_is_in_the_batch_changes_no_bit(kernel):  # fault J4
    args = tensors_of(Case("", (1, 18, 0, 5)), torch.float32)
    together = kernel(*args, 16)
    for row in (0, 1, 3):
        start, stop = args[6][row : row + 2].tolist()
        out, state = kernel(*part(args, start, stop, args[5][row : row + 1]), 16)
        assert torch.equal(out, together[0][start:stop]) and torch.equal(state[0], together[1][row])


@needs_triton
def test_strided_inputs_are_taken(kernel):
    """The layers hand over views of their projections."""
    args = tensors_of(Case("", (1, 3), value_heads=2))
    strided = [torch.stack([x, x], dim=1)[:, 1] for x in args[:5]]
    for found, wanted in zip(kernel(*strided, *args[5:]), kernel(*args), strict=True):
        assert torch.equal(found, wanted)


@needs_triton
@pytest.mark.parametrize("row", [2**31 // 1920 - 1, 2**31 // 1920, 2**31 // 1920 + 1, 2**30])
def test_offsets_are_64_bits_wide(kernel, row):  # fault K1
    from far_offsets import delta_offsets_of

    for dtype in (torch.int64, torch.int32):
        found = delta_offsets_of(torch.tensor([row], dtype=dtype), head=1, heads=2, key_dim=24, value_dim=40)
        assert found == [(row * 2 + 1) * 24, (row * 2 + 1) * 24 * 40]


@needs_triton
def test_what_the_kernel_refuses(kernel):
    *numbers, state, row_starts = tensors_of(Case("", (2, 1)), torch.float32)
    for chunk in (1, 8, 24, 128):
        with pytest.raises(InvalidValue, match="chunk"):
            kernel(*numbers, state, row_starts, chunk)
    with pytest.raises(InvalidValue, match="state.dtype"):
        kernel(*numbers, state.half(), row_starts)
    with pytest.raises(InvalidValue, match="new_state.dtype"):
        kernel(*numbers, state, row_starts, new_state=state.double())
    with pytest.raises(InvalidValue, match=r"state.stride\(\)"):
        kernel(*numbers, state.mT.contiguous().mT, row_starts)


@needs_triton
def test_a_compiled_kernel_wants_a_gpu(kernel, monkeypatch):
    from minserve.deltanet import gated_delta_triton as module

    args = tensors_of(CASES[0], torch.float32)
    check_a_compiled_kernel_wants_a_gpu(monkeypatch, module, "delta_tokens_kernel", lambda: kernel(*args))


def test_a_missing_triton_is_named(monkeypatch):
    check_a_missing_triton_is_named(monkeypatch, "minserve/deltanet/gated_delta_triton.py")


class RowMemory:
    """A memory of two rows in one layer, which has an implementation do its work."""

    def __init__(self, implementation, config):
        generator = torch.Generator().manual_seed(0)
        heads, dims = config.linear_num_value_heads, (config.linear_key_head_dim, config.linear_value_head_dim)
        shapes = ((2, config.linear_conv_kernel_dim - 1, config.conv_channels), (2, heads, *dims))
        self.tails, self.states = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
        self.run, self.row_starts = implementation, torch.tensor([0, 1, 4])

    def attend(self, layer, q, k, v):
        raise NotImplementedError

    def convolve(self, layer, x, weight):
        out, self.tails = self.run.conv_tail_ragged(x, weight, self.tails, self.row_starts)
        return out

    def recur(self, layer, *tokens):
        out, self.states = self.run.gated_delta_ragged(*tokens, self.states, self.row_starts)
        return out


@needs_triton
def test_a_layer_runs_on_the_kernels(kernel):
    """`impl="triton"` is these functions, and a DeltaNet layer gets from them what the reference would give it."""
    from minserve.deltanet import conv_tail_triton
    from minserve.llm import shipped_checkpoint
    from minserve.model.hybrid_lm import HybridLM

    chosen, model = choose_implementation("triton"), HybridLM.from_checkpoint(shipped_checkpoint(), torch.float64)
    assert chosen.gated_delta_ragged is kernel and chosen.conv_tail_ragged is conv_tail_triton.conv_tail_ragged
    layer = model.model.layers[0].linear_attn
    x = torch.randn(4, model.config.hidden_size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    results = []
    for implementation in (choose_implementation("torch"), chosen):
        memory = RowMemory(implementation, model.config)
        results.append((layer(x, memory), memory.tails, memory.states))
    for found, wanted in zip(*results, strict=True):
        assert largest_difference(found, wanted) <= 1e-12
