"""The shape of a load in a few numbers: how bursty, how skewed, how much prompts share.

    CV          standard deviation of the gaps between arrivals / their mean       1 for Poisson
    dispersion  variance / mean of the arrivals per window                         1 for Poisson
    peak        arrivals in the busiest window / mean per window

CV looks from one arrival to the next, dispersion at the scale of the window: a load that rises and falls over minutes
has a CV near 1 and a dispersion well above it; one whose clock ticks in seconds has it the other way round.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from minserve.errors import InvalidValue
from minserve.tuning.workload import Workload

PERCENTS = (0, 1, 5, 10, 25, 50, 75, 90, 95, 99, 100)


@dataclass(frozen=True)
class LengthShape:
    """How lengths are spread, in tokens: {percent: length} from 0 (the shortest) to 100 (the longest), and the mean."""

    quantiles: Mapping[float, float]
    mean: float


@dataclass(frozen=True)
class LoadShape:
    """A load in numbers; see the module for CV, dispersion and peak, which are NaN where they mean nothing.

    `rate` is arrivals per second, `correlation` that of prompt and output length, `shared_blocks` the share of prompt
    blocks that an endless prefix cache would have had (None where nothing is known of the prompts' content).
    """

    num_requests: int
    duration_s: float
    rate: float
    cv: float
    dispersion: float
    peak: float
    correlation: float
    prompt_tokens: LengthShape
    output_tokens: LengthShape
    shared_blocks: float | None = None


def describe(workload: Workload, window_s: float = 10.0) -> LoadShape:
    """The shape of a workload.

    Arguments:
        window_s: length of the windows that dispersion and peak count arrivals in; the last may be cut short.

    Raises:
        InvalidValue: an empty workload, or a window that is not above 0.

    >>> from minserve.tuning.workload import fixed_times, make_workload
    >>> shape = describe(make_workload("w", fixed_times(100, rate=1.0), [5] * 100, [2] * 100))
    >>> shape.cv, shape.dispersion, shape.peak, shape.prompt_tokens.mean
    (0.0, 0.0, 1.0, 5.0)
    """
    if not len(workload):
        raise InvalidValue("workload", workload, "not empty")
    if not window_s > 0:
        raise InvalidValue("window_s", window_s, "above 0 seconds")
    times = np.array([arrival.time_s for arrival in workload])
    prompts = np.array([arrival.prompt_tokens for arrival in workload])
    outputs = np.array([arrival.output_tokens for arrival in workload])
    gaps, in_window = np.diff(times), np.bincount(((times - times[0]) // window_s).astype(int))
    varied = len(workload) > 1 and prompts.std() > 0 and outputs.std() > 0
    return LoadShape(
        num_requests=len(workload),
        duration_s=workload.duration_s,
        rate=workload.rate,
        cv=float(gaps.std() / gaps.mean()) if workload.duration_s else math.nan,
        dispersion=float(in_window.var() / in_window.mean()),
        peak=float(in_window.max() / in_window.mean()),
        correlation=float(np.corrcoef(prompts, outputs)[0, 1]) if varied else math.nan,
        prompt_tokens=_length_shape(prompts),
        output_tokens=_length_shape(outputs),
        shared_blocks=shared_blocks([arrival.block_ids for arrival in workload]) if workload.block_tokens else None,
    )


def shared_blocks(prompts: Sequence[Sequence[int]]) -> float:
    """The share of blocks that lie in a prefix seen before: what a prefix cache without limit would save.

    A block counts only if all blocks before it in its prompt were seen too.

    >>> shared_blocks([[1, 2, 3], [1, 2, 4], [5, 2]])
    0.25
    """
    seen: set[int] = set()
    num_hits = 0
    for prompt in prompts:
        num_hits += next((i for i, block in enumerate(prompt) if block not in seen), len(prompt))
        seen.update(prompt)
    return num_hits / max(1, sum(map(len, prompts)))


def _length_shape(lengths: np.ndarray) -> LengthShape:
    """Quantiles and mean of some lengths."""
    quantiles = np.percentile(lengths, PERCENTS).tolist()
    return LengthShape(dict(zip(PERCENTS, quantiles, strict=True)), float(lengths.mean()))
