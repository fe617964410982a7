"""Ragged rows of a step: each equals the row alone, whatever its neighbours, its length and its chunks."""

import pytest
import torch

from minserve.deltanet.conv_tail import conv_tail, conv_tail_ragged
from minserve.deltanet.gated_delta import gated_delta_ragged, gated_delta_recurrent

LENGTHS = [
    (1,), (5,), (1, 1, 1), (0, 1), (3, 0, 1, 7), (2, 2), (9, 1, 17, 1, 8, 0, 3), (16, 15, 17), (1, 40, 2, 33), (0, 0),
    (),
]  # fmt: skip
lengths_of_rows = pytest.mark.parametrize("lengths", LENGTHS, ids=str)


def starts_of(lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


def delta_inputs(lengths, key_heads=2, value_heads=4, key_dim=6, value_dim=5, dtype=torch.float64):
    generator = torch.Generator().manual_seed(sum(lengths) + len(lengths))

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=dtype)

    num = sum(lengths)
    q, k = draw(num, key_heads, key_dim), torch.nn.functional.normalize(draw(num, key_heads, key_dim), dim=-1)
    g = torch.log(0.8 + 0.19 * torch.rand(num, value_heads, generator=generator, dtype=dtype))
    beta = 0.2 + 0.6 * torch.rand(num, value_heads, generator=generator, dtype=dtype)
    return (q, k, draw(num, value_heads, value_dim), g, beta), draw(len(lengths), value_heads, key_dim, value_dim)


@lengths_of_rows
@pytest.mark.parametrize("chunk", [1, 7, 8, 64])
def test_delta_rows_equal_each_row_alone(lengths, chunk):  # faults A10, A11, J4
    tokens, state = delta_inputs(lengths)
    before, starts = state.clone(), starts_of(lengths)
    out, new_state = gated_delta_ragged(*tokens, state, starts, chunk)
    assert torch.equal(state, before)
    assert out.shape == tokens[2].shape and new_state.shape == state.shape
    for row, (start, stop) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)):
        alone, state_alone = gated_delta_recurrent(*(x[None, start:stop] for x in tokens), state[row : row + 1])
        torch.testing.assert_close(out[start:stop], alone[0], rtol=0, atol=1e-12)
        torch.testing.assert_close(new_state[row], state_alone[0], rtol=0, atol=1e-12)


def test_every_length_beside_every_neighbour():
    for length in range(1, 20):
        lengths = (length, 1, 20 - length, 0, 8)
        tokens, state = delta_inputs(lengths)
        out, new_state = gated_delta_ragged(*tokens, state, starts_of(lengths), 8)
        alone, state_alone = gated_delta_recurrent(*(x[None, :length] for x in tokens), state[:1])
        torch.testing.assert_close(out[:length], alone[0], rtol=0, atol=1e-12)
        torch.testing.assert_close(new_state[0], state_alone[0], rtol=0, atol=1e-12)


def test_delta_rows_keep_their_dtypes():
    tokens, state = delta_inputs((3, 1), dtype=torch.float32)
    half = [x.to(torch.float16) for x in tokens]
    out, new_state = gated_delta_ragged(*half, state, starts_of((3, 1)))
    assert out.dtype == torch.float16 and new_state.dtype == torch.float32


@lengths_of_rows
@pytest.mark.parametrize("kernel", [2, 4])
def test_convolved_rows_equal_each_row_alone(lengths, kernel):
    torch.manual_seed(0)
    x, weight = torch.randn(sum(lengths), 3).double(), torch.randn(3, kernel).double()
    tails, starts = torch.randn(len(lengths), kernel - 1, 3).double(), starts_of(lengths)
    out, new_tails = conv_tail_ragged(x, weight, tails, starts)
    assert out.shape == x.shape and new_tails.shape == tails.shape
    for row, (start, stop) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)):
        alone, tail = conv_tail(x[None, start:stop], weight, tails[row : row + 1])
        torch.testing.assert_close(out[start:stop], alone[0], rtol=0, atol=1e-14)
        assert torch.equal(new_tails[row], tail[0])
