"""Who comes when, with how much: the load that a server is measured under, drawn from a seeded generator.

A workload is a tuple of arrivals: a time, a prompt (its length, or its token ids) and a wanted output length. Three
choices make one, each a function here:

- times: `poisson_times`, `gamma_times` (burstiness as CV, the standard deviation of the gaps over their mean; 1 is
  Poisson), `fixed_times`, `all_at_once`;
- lengths: `lognormal_lengths`, `quantile_lengths`;
- text: `with_prompts`, which cuts prompts out of any text and keeps the prefixes that a trace says are shared.

`minserve.tuning.traces` reads public traces and draws workloads of their shape, `minserve.tuning.sessions` draws chats.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist

import numpy as np

from minserve.errors import InvalidValue
from minserve.model.tokenizer import ByteTokenizer, Tokenizer

_CORPUS_MODULES = (
    "argparse", "ast", "asyncio.base_events", "csv", "dataclasses", "datetime", "difflib", "email.message", "enum",
    "functools", "heapq", "inspect", "json.decoder", "logging", "pathlib", "random", "statistics", "tarfile",
    "textwrap", "threading", "typing", "unittest.case", "urllib.parse", "zipfile",
)  # fmt: skip


@dataclass(frozen=True)
class Arrival:
    """One request that will come.

    Arguments:
        time_s: seconds since the workload's start, >= 0.
        prompt_tokens: length of its prompt, >= 1.
        output_tokens: how many tokens it wants, >= 1.
        prompt: its token ids, or None where only the length is known.
        session: which conversation it belongs to, or None.
        turn: which turn of it, from 0.
        block_ids: one id per block of the prompt; two prompts that begin with the same ids begin with the same tokens.
    """

    time_s: float
    prompt_tokens: int
    output_tokens: int
    prompt: tuple[int, ...] | None = None
    session: int | None = None
    turn: int = 0
    block_ids: tuple[int, ...] = ()

    def __post_init__(self):
        _require("time_s", self.time_s, 0 <= self.time_s < math.inf, "a finite time at or after 0")
        _require("prompt_tokens", self.prompt_tokens, self.prompt_tokens >= 1, "at least 1")
        _require("output_tokens", self.output_tokens, self.output_tokens >= 1, "at least 1")
        length = self.prompt_tokens if self.prompt is None else len(self.prompt)
        _require("prompt_tokens", self.prompt_tokens, length == self.prompt_tokens, f"the prompt's length, {length}")


@dataclass(frozen=True)
class Workload:
    """Arrivals in order of time, with a name and, where they come from a trace, its attribution.

    `block_tokens` is how many tokens each of the arrivals' block ids stands for; 0 where they have none.
    """

    name: str
    arrivals: tuple[Arrival, ...]
    source: str = ""
    block_tokens: int = 0

    def __post_init__(self):
        times = [arrival.time_s for arrival in self.arrivals]
        _require("arrivals", times, times == sorted(times), "in order of time")

    def __len__(self) -> int:
        return len(self.arrivals)

    def __iter__(self):
        return iter(self.arrivals)

    @property
    def duration_s(self) -> float:
        """Seconds from the first arrival to the last."""
        return self.arrivals[-1].time_s - self.arrivals[0].time_s if self.arrivals else 0.0

    @property
    def rate(self) -> float:
        """Arrivals per second: one over the mean gap, of which n arrivals have n - 1; infinite if all come at once."""
        return (len(self) - 1) / self.duration_s if self.duration_s else math.inf

    def first(self, num_requests: int) -> Workload:
        """The first requests alone."""
        return replace(self, arrivals=self.arrivals[:num_requests])

    def at_rate(self, rate: float) -> Workload:
        """The same arrivals, time stretched until they come at `rate` per second; the burstiness stays.

        >>> make_workload("w", fixed_times(5, rate=1), [8] * 5, [4] * 5).at_rate(10).duration_s
        0.4
        """
        _require("rate", rate, 0 < rate < math.inf, "above 0")
        _require("duration_s", self.duration_s, self.duration_s > 0, "above 0 to be stretched")
        factor = self.rate / rate
        return replace(self, arrivals=tuple(replace(a, time_s=a.time_s * factor) for a in self.arrivals))

    def shrunk(self, factor: int) -> Workload:
        """The same load for a smaller model: lengths and blocks divided by `factor`, at least 1 token each.

        Arguments:
            factor: a divisor of `block_tokens`, so that shared prefixes stay shared.

        Raises:
            InvalidValue: the factor does not divide the block size, or the prompts have token ids already.
        """
        _require("factor", factor, factor >= 1 and self.block_tokens % factor == 0, f"a divisor of {self.block_tokens}")
        _require("prompt", "token ids", all(a.prompt is None for a in self.arrivals), "unset while lengths change")
        arrivals = tuple(
            replace(a, prompt_tokens=-(-a.prompt_tokens // factor), output_tokens=-(-a.output_tokens // factor))
            for a in self.arrivals
        )
        return replace(self, arrivals=arrivals, block_tokens=self.block_tokens // factor)

    def clipped(self, max_prompt_tokens: int, max_output_tokens: int) -> Workload:
        """The same arrivals with no prompt and no output longer than these; a prompt loses its end."""
        arrivals = []
        for arrival in self.arrivals:
            length = min(arrival.prompt_tokens, max_prompt_tokens)
            blocks = arrival.block_ids[: -(-length // self.block_tokens)] if self.block_tokens else ()
            prompt = None if arrival.prompt is None else arrival.prompt[:length]
            output = min(arrival.output_tokens, max_output_tokens)
            clipped = replace(arrival, prompt_tokens=length, output_tokens=output, prompt=prompt, block_ids=blocks)
            arrivals.append(clipped)
        return replace(self, arrivals=tuple(arrivals))


def poisson_times(num_requests: int, rate: float, rng: np.random.Generator) -> np.ndarray:
    """Arrival times of independent users: exponential gaps, `rate` per second on average."""
    return gamma_times(num_requests, rate, 1.0, rng)


def gamma_times(num_requests: int, rate: float, cv: float, rng: np.random.Generator) -> np.ndarray:
    """Arrival times with gamma-distributed gaps, as bursty as wanted.

    Arguments:
        rate: arrivals per second, above 0.
        cv: standard deviation of the gaps over their mean; 0 is a fixed rate, 1 Poisson, above 1 bursts and lulls.

    Gaps are independent, so one number sets everything: a real trace may have the same CV and rise and fall slower.

    >>> gaps = np.diff(gamma_times(20_000, rate=4.0, cv=3.0, rng=np.random.default_rng(0)))
    >>> bool(abs(gaps.mean() - 0.25) < 0.02), bool(abs(gaps.std() / gaps.mean() - 3) < 0.2)
    (True, True)
    """
    _require("rate", rate, rate > 0, "above 0 per second")
    _require("cv", cv, 0 <= cv < math.inf, "at least 0")
    if cv == 0:
        return fixed_times(num_requests, rate)
    shape = 1 / cv**2
    return np.cumsum(rng.gamma(shape, 1 / (rate * shape), num_requests))


def fixed_times(num_requests: int, rate: float) -> np.ndarray:
    """Arrival times at equal gaps, the first at 0."""
    _require("rate", rate, rate > 0, "above 0 per second")
    return np.arange(num_requests) / rate


def all_at_once(num_requests: int) -> np.ndarray:
    """Everybody at time 0: the load of an offline batch."""
    return np.zeros(num_requests)


def lognormal_lengths(
    num_requests: int, median: float, p95: float, rng: np.random.Generator, low: int = 1, high: int | None = None
) -> np.ndarray:
    """Lengths with a long tail, given their median and the length that 5 % exceed, clipped to [low, high]."""
    _require("p95", p95, p95 >= median > 0, "at least the median, and both above 0")
    sigma = math.log(p95 / median) / NormalDist().inv_cdf(0.95)
    drawn = median * np.exp(sigma * rng.standard_normal(num_requests))
    return np.clip(np.rint(drawn), low, high).astype(int)


def quantile_lengths(
    num_requests: int,
    quantiles: Mapping[float, float],
    rng: np.random.Generator,
    low: int = 1,
    high: int | None = None,
) -> np.ndarray:
    """Lengths distributed as a table of quantiles says, on a logarithmic scale between its entries.

    Arguments:
        quantiles: {percent: length} from 0 to 100, both included, rising.
        low, high: clip to these.

    >>> lengths = quantile_lengths(10_001, {0: 1, 50: 100, 100: 1000}, np.random.default_rng(0))
    >>> bool(90 < np.median(lengths) < 110)
    True
    """
    percents, values = zip(*sorted(quantiles.items()), strict=True)
    spans = percents[0] == 0 and percents[-1] == 100 and list(values) == sorted(values) and values[0] > 0
    _require("quantiles", dict(quantiles), spans, "rising lengths above 0, for percents from 0 to 100")
    drawn = np.exp(np.interp(100 * rng.random(num_requests), percents, np.log(values)))
    return np.clip(np.rint(drawn), low, high).astype(int)


def make_workload(
    name: str, times: Sequence[float], prompt_lengths: Sequence[int], output_lengths: Sequence[int]
) -> Workload:
    """A workload from times and lengths, one each per request."""
    rows = zip(times, prompt_lengths, output_lengths, strict=True)
    return Workload(name, tuple(Arrival(float(time), int(prompt), int(output)) for time, prompt, output in rows))


def with_prompts(workload: Workload, text: str, seed: int = 0, tokenizer: Tokenizer | None = None) -> Workload:
    """The workload with token ids for prompts: pieces of `text`, equal where block ids say that prompts are equal.

    Arguments:
        text: what to cut from; it is taken as a ring, so prompts may be longer.
        seed: which pieces.
        tokenizer: the byte tokenizer unless given.

    >>> w = with_prompts(make_workload("w", all_at_once(2), [5, 9], [1, 1]), "def area(r): return r * r")
    >>> [len(arrival.prompt) for arrival in w]
    [5, 9]
    """
    corpus = np.array((tokenizer or ByteTokenizer()).encode(text))
    _require("text", text, len(corpus) > 0, "not empty")

    @functools.cache
    def piece(length: int, *key: int) -> list[int]:
        start = int(np.random.default_rng([seed, *key]).integers(len(corpus)))
        return corpus[(start + np.arange(length)) % len(corpus)].tolist()

    arrivals = []
    for i, arrival in enumerate(workload):
        ids = arrival.prompt
        if ids is None and arrival.block_ids:
            blocks = [piece(workload.block_tokens, 1, block_id) for block_id in arrival.block_ids]
            ids = [token_id for block in blocks for token_id in block][: arrival.prompt_tokens]
        elif ids is None:
            ids = piece(arrival.prompt_tokens, 0, i)
        arrivals.append(replace(arrival, prompt=tuple(ids)))
    return replace(workload, arrivals=tuple(arrivals))


def standard_library_text(num_chars: int = 500_000) -> str:
    """Python source from the standard library, which every reader has: text that the shipped model can go on with.

    Only ASCII, so that any piece of it is text by itself. At most about a million characters; the same Python version
    gives the same text.
    """
    files = (importlib.util.find_spec(name).origin for name in _CORPUS_MODULES)
    sources = (Path(file).read_bytes().decode("ascii", "ignore") for file in files)
    return "\n".join(sources)[:num_chars]


def _require(field: str, value: object, fine: bool, limit: str) -> None:
    """Raise InvalidValue unless `fine`."""
    if not fine:
        raise InvalidValue(field, value, limit)
