"""Penalties and the filter: from logits to the distribution that a token is drawn from."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minserve.errors import InvalidValue
from minserve.request import SamplingParams
from minserve.sampling import (
    apply_penalties,
    filter_probs,
    usable_rows,
)

INF = float("inf")
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def support(logits, **params):
    return (filter_probs(logits, SamplingParams(temperature=1, **params)) > 0).nonzero().flatten().tolist()


# ---- the filter ----


def plain_filter(logits, params):
    """The documented order on Python numbers; also the smallest distance of a comparison from its limit."""
    if params.is_greedy:
        return [float(i == logits.index(max(logits))) for i in range(len(logits))], 1.0
    weights = [math.exp((x - max(logits)) / params.temperature) for x in logits]
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[: params.top_k or None]
    total, ahead, kept, margin = sum(weights[i] for i in order), 0.0, [], 1.0
    for i in order:
        if params.top_p < 1 and ahead >= params.top_p * total:
            margin = min(margin, abs(ahead / total - params.top_p))
            break
        margin = min(margin, abs(ahead / total - params.top_p)) if params.top_p < 1 else margin
        kept.append(i)
        ahead += weights[i]
    margin = min([margin, *(abs(weights[i] - params.min_p) for i in kept)])
    kept = [i for i in kept if weights[i] >= params.min_p]
    mass = sum(weights[i] for i in kept)
    return [weights[i] / mass if i in kept else 0.0 for i in range(len(logits))], margin


any_logits = st.lists(st.integers(-12, 12).map(lambda x: x / 4) | st.just(-INF), min_size=1, max_size=12).filter(
    lambda row: max(row) > -INF
)
any_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0, 1e-6, 0.3, 0.8, 1, 3]),
    top_k=st.integers(0, 14),
    top_p=st.floats(0.01, 1),
    min_p=st.sampled_from([0, 0.013, 0.21, 0.9, 1]),
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(any_logits, any_params)
def test_filter_equals_its_definition(row, params):
    expected, margin = plain_filter(row, params)
    probs = filter_probs(torch.tensor(row, dtype=torch.float64), params)
    if margin > 1e-9:  # else rounding decides which side of a limit a token falls on
        assert probs.tolist() == pytest.approx(expected, abs=1e-12)
    assert float(probs.sum()) == pytest.approx(1) and probs[row.index(max(row))] > 0
    assert all(p == 0 for p, x in zip(probs.tolist(), row, strict=True) if x == -INF)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.data(), st.integers(1, 6), st.sampled_from([torch.float32, torch.float64]))
def test_a_row_does_not_depend_on_its_neighbours(data, num_rows, dtype):  # fault I3
    vocab = data.draw(st.sampled_from([3, 17, 264]))
    logits = torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(vocab)).to(dtype)
    params = [data.draw(any_params) for _ in range(num_rows)]
    together = filter_probs(logits, params)
    assert together.dtype == dtype
    for row in range(num_rows):
        assert torch.equal(together[row], filter_probs(logits[row], params[row]))


def test_top_p_is_of_what_top_k_left():  # fault E15
    logits = torch.tensor([0.35, 0.25, 0.20, 0.05, 0.03, 0.12]).double().log()
    # The four likeliest hold .92; .82 of that is .754: .60 is ahead of the third token, .80 of the fourth.
    assert support(logits, top_k=4, top_p=0.82) == [0, 1, 2]
    assert support(logits, top_p=0.82) == [0, 1, 2, 5]  # without top_k the crossing token is another one
    kept = filter_probs(logits, SamplingParams(temperature=1, top_k=4, top_p=0.82))[:3]
    assert kept.tolist() == pytest.approx([0.35 / 0.8, 0.25 / 0.8, 0.20 / 0.8])


def test_the_crossing_token_is_kept_and_one_always_stays():
    logits = torch.tensor([0.5, 0.3, 0.2]).double().log()
    assert support(logits, top_p=0.51) == [0, 1]
    assert support(logits, top_p=0.49) == [0]
    assert support(logits, top_p=1e-300) == support(torch.zeros(10), top_k=2, top_p=5e-324) == [0]
    assert support(logits, top_k=1) == [0] and support(logits, top_k=99) == support(logits, top_k=10**30) == [0, 1, 2]
    assert support(logits, top_k=10**30, top_p=0.51) == [0, 1]
    assert support(torch.tensor([0.0, -40.0, -50.0]).double(), top_k=2) == [
        0,
        1,
    ]  # top_p of 1 drops nothing, however rare
    assert support(logits, min_p=0.5) == [0, 1] and support(logits, min_p=1) == [0]


def test_temperature_comes_before_the_filters():
    logits = torch.tensor([0.5, 0.3, 0.2]).double().log()
    params = SamplingParams(temperature=0.25, top_p=0.85)
    assert (filter_probs(logits, params) > 0).tolist() == [True, False, False]  # .5**4 is 87 % of the sum


@pytest.mark.parametrize("params", [{"top_k": 2}, {"top_p": 0.3}, {"temperature": 0}, {"temperature": 1e-9}])
@pytest.mark.parametrize("vocab", [4, 65, 1000])
def test_of_equal_logits_the_lower_ids_come_first(params, vocab):
    num = {"top_k": 2, "top_p": math.ceil(0.3 * vocab), "temperature": 1}[next(iter(params))]
    probs = filter_probs(torch.zeros(vocab), SamplingParams(**{"temperature": 1, **params}))
    assert (probs > 0).nonzero().flatten().tolist() == list(range(num))


def test_close_logits_keep_their_order_when_the_probabilities_round_to_one():
    logits = torch.tensor([1.0, 1.0 + 2**-20, 0.5])
    assert (filter_probs(logits, SamplingParams(temperature=50, top_k=1)) > 0).tolist() == [False, True, False]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("exponent", range(3, 13))
def test_tiny_temperatures_are_finite_and_greedy_in_the_end(dtype, exponent):  # fault I6
    largest = torch.finfo(dtype).max
    rows = [[largest, -largest, 0.0, -INF], [3.0, 1.0, 3.0, -INF], [-INF, -INF, -5.0, -INF]]
    logits = torch.tensor(rows, dtype=dtype)
    params = [SamplingParams(temperature=10.0**-exponent), SamplingParams(), SamplingParams(temperature=1, top_p=0.5)]
    probs = filter_probs(logits, params)
    assert probs.dtype == torch.promote_types(dtype, torch.float32)
    assert probs.tolist() == [[1, 0, 0, 0], [1, 0, 0, 0], [0, 0, 1, 0]]
    mixed = filter_probs(logits.flip(0), [params[1], params[0], params[1]])  # tied logits meet the tiny temperature
    assert mixed.tolist() == [[0, 0, 1, 0], [1, 0, 0, 0] if exponent > 5 else [0.5, 0, 0.5, 0], [1, 0, 0, 0]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_huge_temperature_is_uniform_and_masks_stay(dtype):
    logits = torch.tensor([5.0, -5.0, -INF], dtype=dtype)
    assert filter_probs(logits, SamplingParams(temperature=1e300)).tolist() == [0.5, 0.5, 0.0]


@pytest.mark.parametrize("bad", [[-INF] * 3, [math.nan, 0.0, 1.0], [INF, 0.0, 1.0]])
@pytest.mark.parametrize("temperature", [0, 1])
def test_a_row_without_a_choice_is_a_named_error(bad, temperature):
    logits = torch.tensor([[0.0, 1.0, 2.0], bad, bad])
    with pytest.raises(InvalidValue, match=r"logits\[1\]"):
        filter_probs(logits, SamplingParams(temperature=temperature))
    assert usable_rows(logits).tolist() == [True, False, False]


def test_one_set_of_params_per_row():
    with pytest.raises(InvalidValue, match="params"):
        filter_probs(torch.zeros(3, 4), [SamplingParams()] * 2)
    assert filter_probs(torch.zeros(0, 4), []).shape == (0, 4)
    assert filter_probs(torch.zeros(2, 3, 4), SamplingParams(temperature=1)).shape == (2, 3, 4)


# ---- penalties ----


def test_penalties_by_hand():
    params = SamplingParams(
        presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=2.0, logit_bias={3: 10, 0: -1}
    )
    logits = torch.tensor([2.0, -1.0, 4.0, 0.0, 1.0], dtype=torch.float64)
    adjusted = apply_penalties(logits, prompt_ids=[0, 0, 1], output_ids=[2, 2, 1], params=params)
    # 0: prompt only: 2/2, bias -1.  1: both: -1*2 - .5 - .25.  2: 4/2 - .5 - 2*.25.  3: bias.  4: untouched.
    assert adjusted.tolist() == [0.0, -2.75, 1.0, 10.0, 1.0]
    assert logits.tolist() == [2.0, -1.0, 4.0, 0.0, 1.0]


def test_penalties_are_exact_in_float64():
    params = SamplingParams(presence_penalty=0.1, frequency_penalty=0.3, repetition_penalty=1.1, logit_bias={0: 0.7})
    adjusted = apply_penalties(torch.tensor([1 / 3, 0.0], dtype=torch.float64), [], [0, 0, 0], params)
    assert abs(adjusted[0].item() - (1 / 3 / 1.1 - 0.1 - 0.9 + 0.7)) < 1e-15


@pytest.mark.parametrize("dtype", DTYPES)
def test_penalties_leave_masks_and_their_argument_alone(dtype):
    logits = torch.tensor([-INF, 1.0], dtype=dtype)
    params = SamplingParams(presence_penalty=-2, frequency_penalty=-2, repetition_penalty=0.01, logit_bias={0: 1e6})
    adjusted = apply_penalties(logits, [0], [0, 1], params)
    assert adjusted[0] == -INF and adjusted[1].isfinite() and logits[1] == 1
    assert torch.equal(apply_penalties(logits, [0], [1], SamplingParams()), logits.to(adjusted.dtype))
