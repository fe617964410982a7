"""Workloads: arrival processes, lengths, prompts, and what describe() says of them."""

import math

import numpy as np
import pytest

from minserve.errors import InvalidValue
from minserve.tuning.load_shape import describe, shared_blocks
from minserve.tuning.workload import (
    Arrival,
    Workload,
    all_at_once,
    fixed_times,
    gamma_times,
    lognormal_lengths,
    make_workload,
    poisson_times,
    quantile_lengths,
    standard_library_text,
    with_prompts,
)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def of_times(times) -> Workload:
    """A workload with these times and lengths that do not matter."""
    return make_workload("w", times, [8] * len(times), [4] * len(times))


def test_poisson_arrivals_have_rate_cv_and_dispersion_of_one():
    shape = describe(of_times(poisson_times(20_000, 5.0, rng())), window_s=1.0)
    assert shape.rate == pytest.approx(5.0, rel=0.03)
    assert shape.cv == pytest.approx(1.0, abs=0.03)
    assert shape.dispersion == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize("cv", [0.3, 1.0, 4.0])
def test_gamma_arrivals_have_the_cv_asked_for(cv):
    shape = describe(of_times(gamma_times(50_000, 2.0, cv, rng(1))))
    assert shape.cv == pytest.approx(cv, rel=0.05)
    assert shape.rate == pytest.approx(2.0, rel=0.05)


def test_regular_and_simultaneous_arrivals():
    assert np.array_equal(gamma_times(4, 2.0, 0, rng()), [0, 0.5, 1.0, 1.5])
    assert np.array_equal(fixed_times(3, 4.0), [0, 0.25, 0.5])
    together = describe(of_times(all_at_once(5)))
    assert together.duration_s == 0 and together.rate == math.inf and math.isnan(together.cv)


def test_the_same_seed_gives_the_same_workload():
    assert np.array_equal(gamma_times(9, 1.0, 3.0, rng(7)), gamma_times(9, 1.0, 3.0, rng(7)))
    assert not np.array_equal(gamma_times(9, 1.0, 3.0, rng(7)), gamma_times(9, 1.0, 3.0, rng(8)))


def test_lognormal_lengths_have_median_and_tail():
    lengths = lognormal_lengths(40_000, median=100, p95=1000, rng=rng(), high=5000)
    assert np.median(lengths) == pytest.approx(100, rel=0.03)
    assert np.percentile(lengths, 95) == pytest.approx(1000, rel=0.05)
    assert lengths.min() >= 1 and lengths.max() == 5000


def test_quantile_lengths_reproduce_the_table():
    table = {0: 3, 10: 147, 50: 1469, 90: 5187, 100: 7437}
    lengths = quantile_lengths(40_000, table, rng())
    for percent in (10, 50, 90):
        assert 100 * np.mean(lengths <= table[percent]) == pytest.approx(percent, abs=1)
    assert lengths.min() >= 3 and lengths.max() <= 7437
    assert quantile_lengths(100, table, rng(), low=50, high=60).tolist() == [
        min(max(n, 50), 60) for n in quantile_lengths(100, table, rng())
    ]


def test_describe_by_hand():
    workload = make_workload("w", [0, 1, 2, 12, 25], [10, 20, 30, 40, 50], [5, 4, 3, 2, 1])
    shape = describe(workload)
    gaps, counts = np.array([1, 1, 10, 13]), np.array([3, 1, 1])
    assert shape.cv == pytest.approx(gaps.std() / gaps.mean())
    assert shape.dispersion == pytest.approx(counts.var() / counts.mean())
    assert shape.peak == pytest.approx(3 / (5 / 3))
    assert shape.correlation == pytest.approx(-1)
    assert (shape.prompt_tokens.quantiles[50], shape.output_tokens.mean) == (30, 3)
    assert shape.shared_blocks is None
    assert describe(workload, window_s=100).peak == 1


def test_rate_and_lengths_can_be_changed():
    workload = of_times(gamma_times(500, 3.0, 2.0, rng()))
    slower = workload.at_rate(0.5)
    assert slower.rate == pytest.approx(0.5)
    assert describe(slower).cv == pytest.approx(describe(workload).cv)
    assert {(a.prompt_tokens, a.output_tokens) for a in workload.clipped(5, 100)} == {(5, 4)}
    assert len(workload.first(3)) == 3


def traced() -> Workload:
    """Three prompts of a trace with blocks of 8; the first two share 16 tokens."""
    arrivals = (Arrival(0, 20, 5, block_ids=(1, 2, 3)), Arrival(1, 23, 5, block_ids=(1, 2, 4)),
                Arrival(2, 9, 5, block_ids=(5, 2)))  # fmt: skip
    return Workload("traced", arrivals, block_tokens=8)


def test_prompts_share_what_their_blocks_share():
    text = "".join(map(chr, rng().integers(33, 127, 5000)))
    first, second, third = (arrival.prompt for arrival in with_prompts(traced(), text))
    assert (len(first), len(second), len(third)) == (20, 23, 9)
    assert first[:16] == second[:16] and first[:8] != third[:8] and first[16:20] != second[16:20]
    assert describe(traced()).shared_blocks == 2 / 8
    assert shared_blocks([]) == 0


def test_shrinking_keeps_the_sharing():
    small = traced().shrunk(4)
    assert [(a.prompt_tokens, a.output_tokens) for a in small] == [(5, 2), (6, 2), (3, 2)]
    first, second, _ = (arrival.prompt for arrival in with_prompts(small, standard_library_text(50_000)))
    assert first[:4] == second[:4]
    assert describe(small).shared_blocks == describe(traced()).shared_blocks
    clipped = traced().clipped(16, 1)
    assert [a.block_ids for a in clipped] == [(1, 2), (1, 2), (5, 2)]
    with pytest.raises(InvalidValue, match="factor"):
        traced().shrunk(3)


def test_prompts_are_text_of_the_length_asked_for():
    text = standard_library_text(20_000)
    assert len(text) == 20_000 and text.isascii() and "def " in text
    workload = make_workload("w", all_at_once(3), [5, 7000, 30_000], [1, 1, 1])
    prompts = [arrival.prompt for arrival in with_prompts(workload, text, seed=3)]
    assert [len(prompt) for prompt in prompts] == [5, 7000, 30_000]
    assert bytes(prompts[0]).decode() in text + text[:5]
    assert prompts == [arrival.prompt for arrival in with_prompts(workload, text, seed=3)]
    assert prompts != [arrival.prompt for arrival in with_prompts(workload, text, seed=4)]


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: gamma_times(3, 0, 1, rng()), "rate"),
        (lambda: gamma_times(3, 1, -1, rng()), "cv"),
        (lambda: gamma_times(3, 1, math.nan, rng()), "cv"),
        (lambda: lognormal_lengths(3, 10, 5, rng()), "p95"),
        (lambda: quantile_lengths(3, {0: 1, 99: 5}, rng()), "quantiles"),
        (lambda: quantile_lengths(3, {0: 9, 100: 5}, rng()), "quantiles"),
        (lambda: Arrival(-1, 5, 5), "time_s"),
        (lambda: Arrival(0, 0, 5), "prompt_tokens"),
        (lambda: Arrival(0, 3, 5, prompt=(1, 2)), "prompt_tokens"),
        (lambda: Workload("w", (Arrival(2, 1, 1), Arrival(1, 1, 1))), "arrivals"),
        (lambda: describe(Workload("w", ())), "workload"),
        (lambda: of_times(all_at_once(3)).at_rate(2), "duration_s"),
        (lambda: with_prompts(of_times([0.0]), ""), "text"),
    ],
)
def test_bad_values_are_named(make, field):
    with pytest.raises(InvalidValue) as error:
        make()
    assert error.value.field == field
