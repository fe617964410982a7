"""Random numbers, and the choice of a token from a distribution."""


import numpy as np
import torch
from distributions import chi_square
from hypothesis import given, settings
from hypothesis import strategies as st

from minserve.request import Request, SamplingParams
from minserve.sampling import (
    Stream,
    choose,
    filter_probs,
    request_seed,
    sample,
    token_logprobs,
    uniform,
)

INF = float("inf")
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


# ---- random numbers ----


def thirds(draws):
    return (np.asarray(draws) * 3).astype(int)


def test_draws_are_in_range_and_depend_on_all_three_numbers():
    draws = {uniform(s, p, k) for s in (0, 1, 2**64 - 1) for p in (0, 1, 8191) for k in Stream}
    assert len(draws) == 9 * len(Stream) and all(0 <= u < 1 for u in draws)
    assert uniform(42, 7) == uniform(42, 7, Stream.SAMPLE)


def test_draws_never_change():
    """Seeded output must repeat on other machines and in later versions."""
    assert [uniform(0, 0), uniform(42, 7, Stream.ACCEPT)] == [0.011546754286331562, 0.2909136653161434]


def test_draws_are_even_across_positions_seeds_and_streams():  # fault I5
    by_position = [uniform(5, position) for position in range(20_000)]
    by_seed = [uniform(seed, 5) for seed in range(20_000)]
    block = np.array([[uniform(seed, position) for position in range(200)] for seed in range(100)])
    for draws in (by_position, by_seed, block):
        assert chi_square(np.bincount((np.ravel(draws) * 20).astype(int), minlength=20), np.ones(20)) < 1
    other = thirds([uniform(5, position, Stream.ACCEPT) for position in range(20_000)])
    third, block = thirds(by_position), thirds(block)
    pairs = [
        (third[:-1], third[1:]),  # consecutive steps
        (third, other),  # two streams at one step
        (thirds(by_seed)[:-1], thirds(by_seed)[1:]),  # consecutive seeds
        (block[:-1].ravel(), block[1:].ravel()),
        (block[:-1, 1:].ravel(), block[1:, :-1].ravel()),  # the next seed, one step back: seed + step would repeat
    ]
    for first, second in pairs:
        assert chi_square(np.bincount(3 * first + second, minlength=9), np.ones(9)) < 1


def test_every_short_stretch_of_steps_varies():  # fault I5
    logits = torch.tensor([1.0, 1.001, 0.999])
    probs = filter_probs(logits, SamplingParams(temperature=1))
    for seed in range(5):
        draws = torch.tensor([uniform(seed, position) for position in range(200)], dtype=torch.float64)
        counts = torch.bincount(choose(probs.expand(200, 3), draws), minlength=3)
        assert chi_square(counts, probs) < 1


def test_unseeded_requests_get_seeds_of_their_own():
    seeds = [request_seed(engine, number) for engine in (0, 1) for number in range(500)]
    assert len(set(seeds)) == 1000 and all(0 <= seed < 2**64 for seed in seeds)
    assert seeds[3] == request_seed(0, 3)
    assert chi_square(np.bincount([seed >> 60 for seed in seeds], minlength=16), np.ones(16)) < 1


# ---- the choice ----


def test_choice_follows_the_distribution():
    """DIST: 20,000 draws against the exact distribution, filtered and with a mask."""
    logits = torch.tensor([1.0, 0.0, -INF, 2.0, 1.5, -3.0], dtype=torch.float64)
    params = SamplingParams(temperature=0.8, top_k=4, min_p=0.05)
    probs = filter_probs(logits, params)
    draws = torch.tensor([uniform(11, position) for position in range(20_000)], dtype=torch.float64)
    counts = torch.bincount(choose(probs.expand(20_000, 6), draws), minlength=6)
    assert chi_square(counts, probs) < 1
    assert chi_square(counts, filter_probs(logits, SamplingParams(temperature=1, top_k=4))) > 1  # it can fail


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.lists(st.sampled_from([0.0, 1e-300, 1e-30, 0.1, 1 / 3, 1.0]), min_size=1, max_size=9).filter(any),
    st.sampled_from([0.0, 5e-324, 0.5, 1 / 3, 1 - 2**-53]) | st.floats(0, 1, exclude_max=True),
    st.sampled_from(DTYPES),
)
def test_a_choice_is_always_possible(weights, u, dtype):
    probs = torch.tensor(weights, dtype=dtype)
    if probs.sum() > 0:
        assert probs[choose(probs, u)] > 0


def test_choice_at_the_edges():
    probs = torch.tensor([0.0, 0.5, 0.0, 0.5, 0.0])
    assert [int(choose(probs, u)) for u in (0.0, 0.4999999, 0.5, 1 - 2**-53)] == [1, 1, 3, 3]
    assert int(choose(torch.full((10,), 0.1), 1 - 2**-53)) == 9
    assert int(choose(probs, 1.0)) == 3  # a draw that float32 rounded up


def test_a_rare_token_in_float32_can_still_be_chosen():
    probs = torch.tensor([0.9, *[1e-9] * 8])
    total = float(probs.double().sum())
    assert int(choose(probs, (total - 3.5e-9) / total)) == 5


# ---- logprobs ----


def test_logprobs_hold_the_likeliest_and_the_chosen():
    logits = torch.tensor([1.0, 3.0, 2.0, 3.0, 0.0], dtype=torch.float64)
    expected = torch.log_softmax(logits, -1).tolist()
    for num, ids in [(0, [4]), (1, [1, 4]), (2, [1, 3, 4]), (3, [1, 3, 2, 4]), (5, [1, 3, 2, 0, 4])]:
        found = token_logprobs(logits, token_id=4, num=num)
        assert list(found) == ids and all(found[i] == expected[i] for i in ids)
    assert list(token_logprobs(logits, token_id=3, num=1)) == [1, 3]
    assert token_logprobs(torch.tensor([7.0]).half(), 0, 1) == {0: 0.0}


# ---- whole rows ----


def request(tokens=(1, 2, 3), **params):
    params.setdefault("seed", 42)
    return Request("r", tokens, SamplingParams(**params))


def draw_many(batches):
    return [[sampled.token_id for sampled in sample(logits, requests)] for logits, requests in batches]


def test_a_seeded_request_draws_the_same_in_any_company():  # fault I3
    torch.manual_seed(0)
    logits = torch.randn(30, 264)
    others = [request(seed=7, temperature=1), request(), request(temperature=2, top_k=3), request(min_p=0.1, n=2)]
    mine = [request(range(n), temperature=1.5, top_p=0.9, repetition_penalty=1.1) for n in range(1, 31)]
    alone = [sample(row[None], [one])[0].token_id for row, one in zip(logits, mine, strict=True)]
    assert len(set(alone)) > 15
    for first, last in ((0, 4), (4, 0), (2, 2), (1, 3)):
        for row, one, expected in zip(logits, mine, alone, strict=True):
            before, after = others[:first], others[4 - last :]
            rows = torch.cat([torch.randn(len(before), 264), row[None], torch.randn(len(after), 264)])
            assert sample(rows, [*before, one, *after])[len(before)].token_id == expected


def test_a_preempted_request_draws_the_same_again():  # fault I3
    logits = torch.zeros(1, 264)
    one = request(temperature=1)
    one.commit(3, [5])
    before = sample(logits, [one])
    one.restart()
    assert sample(logits, [one]) == before


def test_greedy_and_sampled_rows_side_by_side():
    logits = torch.tensor([[0.0, 2.0, 1.0], [0.0, 2.0, 1.0], [0.0, 2.0, 1.0]])
    rows = [request((1,)), request((1,), logprobs=1), request((1,), logit_bias={2: 5.0}, logprobs=2)]
    chosen = sample(logits, rows)
    assert [one.token_id for one in chosen] == [1, 1, 2]
    raw = torch.log_softmax(logits[0], -1).tolist()
    assert chosen[0].logprobs is None
    assert chosen[1].logprobs == {1: raw[1]}
    assert chosen[2].logprobs == {1: raw[1], 2: raw[2]}  # of the model, not of the biased logits
    assert sample(torch.zeros(0, 3), []) == []


def test_samples_of_one_prompt_differ_and_equal_single_requests():  # fault B4
    logits = torch.zeros(3, 264)
    three = [Request("r", [1], SamplingParams(seed=5, n=3, temperature=1), index=i) for i in range(3)]
    single = [request([1], seed=seed, temperature=1) for seed in (5, 6, 7)]
    ids = [one.token_id for one in sample(logits, three)]
    assert ids == [sample(logits[:1], [one])[0].token_id for one in single] and len(set(ids)) == 3


def test_float64_stays_float64():
    logits = torch.randn(2, 9, dtype=torch.float64)
    params = SamplingParams(temperature=0.7, top_p=0.9, top_k=5, min_p=0.01)
    assert filter_probs(logits, params).dtype == torch.float64
    exact = torch.softmax((logits[0] - logits[0].max()) / 0.7, -1)
    plain = filter_probs(logits[0], SamplingParams(temperature=0.7))
    assert (plain - exact).abs().max() < 1e-15
