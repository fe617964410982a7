"""The forms of the gated delta rule against one another, at every length and with gates that hide nothing."""

from __future__ import annotations

import pytest
import torch
from delta_cases import CASES, Case, run_by_a_loop, tensors_of

from minserve.deltanet.gated_delta import gated_delta_chunked, gated_delta_ragged, gated_delta_recurrent

MOST = 200
SIZES = {"key_heads": 2, "value_heads": 4, "key_dim": 6, "value_dim": 5}
gates = pytest.mark.parametrize("fierce", [False, True], ids=["mild", "beyond e^88"])
cases = pytest.mark.parametrize("case", CASES, ids=str)


def sequence(num_tokens: int, fierce: bool = False, dtype=torch.float64) -> tuple[torch.Tensor, ...]:
    """One sequence, as a batch of one, and the state before it."""
    *tokens, state, _ = tensors_of(Case("", (num_tokens,), **SIZES, fierce=fierce), dtype)
    return *(x[None] for x in tokens), state


def part(args, start, stop, state=None):
    """The arguments that run tokens start..stop on from a state."""
    return *(x[:, start:stop] for x in args[:5]), args[5] if state is None else state


def check_close(found, wanted, tolerance=1e-12):
    """Outputs and states agree."""
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=tolerance)


@cases
def test_the_rule_is_the_loop(case):
    args = tensors_of(case)
    before = [x.clone() for x in args]
    out, last, after = run_by_a_loop(*args)
    check_close(gated_delta_ragged(*args, case.chunk), (out, last))
    check_close(gated_delta_ragged(*args, case.chunk, every_state=True), (out, after))
    assert all(torch.equal(x, y) for x, y in zip(args, before, strict=True)), "an argument was changed"


@gates
@pytest.mark.parametrize("chunk", [1, 7, 32, 64])
def test_chunks_are_token_by_token_at_every_length(chunk, fierce):  # fault A10
    """One run token by token gives what every shorter run must end with."""
    args = sequence(MOST, fierce)
    out, states = gated_delta_recurrent(*args, every_state=True)
    for length in range(1, MOST + 1):
        found = gated_delta_chunked(*part(args, 0, length), chunk)
        check_close(found, (out[:, :length], states[:, length - 1]))


@gates
@pytest.mark.parametrize("chunk", [7, 32])
def test_rows_of_every_length_in_one_batch(chunk, fierce):  # faults A10, J4
    args = sequence(MOST, fierce)
    out, states = gated_delta_recurrent(*args, every_state=True)
    lengths = [0, *torch.randperm(60, generator=torch.Generator().manual_seed(0)).tolist(), 1, 0, MOST]
    tokens = [torch.cat([x[0, :length] for length in lengths]) for x in args[:5]]
    starts = torch.tensor([0, *lengths]).cumsum(0)
    found, last = gated_delta_ragged(*tokens, args[5].repeat(len(lengths), 1, 1, 1), starts, chunk)
    before = torch.cat([args[5][:, None], states], dim=1)[0]
    check_close((found, last), (torch.cat([out[0, :length] for length in lengths]), before[lengths]))


@gates
@pytest.mark.parametrize("length", range(1, 25))
def test_a_prompt_less_its_last_token_then_decode(length, fierce):  # fault A10: three chunks of 8, every T mod C
    args = sequence(length, fierce)
    whole = gated_delta_chunked(*args, 8)
    head, state = gated_delta_chunked(*part(args, 0, length - 1), 8)
    tail, state = gated_delta_recurrent(*part(args, length - 1, length, state))
    check_close((torch.cat([head, tail], dim=1), state), whole)


@pytest.mark.parametrize("sizes", [(8, 8, 4), (1,) * 20, (2,) * 10, (1, 2, 1, 2, 14), (0, 5, 0, 15), (19, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_parts_go_on_from_the_state_before(sizes, dtype):  # faults A11, J4
    """Token by token, a sequence in parts is the sequence to the last bit; so nothing depends on where it was cut.

    In chunks a cut changes which products are summed, and so the last bits, unless it falls between two chunks.
    """
    args, starts = sequence(20, dtype=dtype), torch.tensor([0, *sizes]).cumsum(0).tolist()
    for rule, exact in ((gated_delta_recurrent, True), (gated_delta_chunked, False)):
        state, outs = args[5], []
        for start, stop in zip(starts[:-1], starts[1:], strict=True):
            out, state = rule(*part(args, start, stop, state))
            outs.append(out)
        found, whole = (torch.cat(outs, dim=1), state), rule(*args)
        check_close(found, whole, 1e-12 if dtype == torch.float64 else 1e-5)
        assert not exact or all(torch.equal(x, y) for x, y in zip(found, whole, strict=True))


@gates
def test_the_state_after_every_token_is_that_of_a_run_which_ends_there(fierce):  # fault E4
    args = sequence(9, fierce, torch.float32)
    out, states = gated_delta_recurrent(*args, every_state=True)
    for length in range(1, 10):
        alone, state = gated_delta_recurrent(*part(args, 0, length))
        assert torch.equal(states[:, length - 1], state) and torch.equal(out[:, :length], alone)
    assert gated_delta_recurrent(*part(args, 0, 0), every_state=True)[1].shape == (1, 0, 4, 6, 5)


@pytest.mark.parametrize("lengths", [(4, 1, 0, 3, 1), (1, 1, 1), (2,), (0, 0), ()], ids=str)
def test_every_state_of_drafts_of_any_count(lengths):  # fault E4
    """Rows of a verify step: whichever token is the last that is accepted, its state is there, under its own number."""
    args = tensors_of(Case("", lengths, **SIZES))
    out, states = gated_delta_ragged(*args, every_state=True)
    assert states.shape == (sum(lengths), 4, 6, 5) and out.shape == args[2].shape
    starts = args[6].tolist()
    for row, (start, stop) in enumerate(zip(starts[:-1], starts[1:], strict=True)):
        for token in range(start, stop):
            accepted = [x[None, start : token + 1] for x in args[:5]]
            _, state = gated_delta_recurrent(*accepted, args[5][row : row + 1])
            torch.testing.assert_close(states[token], state[0], rtol=0, atol=1e-12)


def test_a_sequence_that_begins_does_so_from_zeros():  # fault J4: there is no other way to begin
    args = sequence(20)
    zeros = torch.zeros_like(args[5])
    check_close(gated_delta_chunked(*part(args, 0, 20, zeros), 8), gated_delta_recurrent(*part(args, 0, 20, zeros)))


@pytest.mark.parametrize("chunk", [7, 32])
def test_chunks_have_the_gradient_of_token_by_token(chunk):
    gradients = []
    for rule in (gated_delta_recurrent, lambda *args: gated_delta_chunked(*args, chunk)):
        args = [x.clone().requires_grad_() for x in sequence(20)]
        out, state = rule(*args)
        (out.square().sum() + state.square().sum()).backward()
        gradients.append([x.grad for x in args])
    check_close(*gradients, tolerance=1e-10)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_results_keep_their_dtypes(dtype):
    """Outputs are as wide as the values; a state, which sums up a whole sequence, is as wide as it came."""
    args = sequence(20, dtype=dtype)
    out, last, _ = run_by_a_loop(*(x[0] for x in args[:5]), args[5], torch.tensor([0, 20]))
    for rule in (gated_delta_recurrent, gated_delta_chunked):
        found, state = rule(*args)
        assert found.dtype == dtype and state.dtype == torch.float32
        assert (found[0].double() - out).abs().max() <= 4 * torch.finfo(dtype).eps * out.abs().max() + 1e-5
        assert (state.double() - last).abs().max() <= 1e-5
