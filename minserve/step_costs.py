"""What a step costs with more or fewer tokens in it, and a draft: measured as the engine goes, or given.

How many drafts pay is a question of prices: those of the machine, the model and the batch. On a sparse model a step
with four tokens reads up to four times as many experts as one with one; measured times have that in them, and a table
for a machine that nobody here owns must count it (`minserve.tuning.draft_costs`).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Protocol

ENOUGH = 3  # measurements of a size before it is relied on
LATEST = 5  # measurements of a size that are remembered
STALE_AFTER = 64  # steps after which a size that has not been seen is to be measured again: machines have moods
LEAST_S = 1e-9  # what a step takes at least: a virtual clock may stand still


class Costs(Protocol):
    """Prices, in seconds or in any unit that is the same for both."""

    def step_s(self, num_rows: int, num_tokens: int) -> float:
        """What a step of the model costs: so many decoding rows, and so many tokens, their drafts among them."""

    def draft_s(self, num_rows: int) -> float:
        """What one more draft costs, for each of so many rows together."""


@dataclass(frozen=True)
class CostTable:
    """Prices that are given.

    Fields:
        step_s: (rows, tokens) -> seconds of a step of the model; tokens are those of the rows, their drafts included.
        draft_s: number of rows -> seconds of one more draft for each of them.
    """

    step_s: Callable[[int, int], float]
    draft_s: Callable[[int], float]


class MeasuredCosts:
    """Prices as they were seen on the engine's clock.

    Sizes that are nearly the same count as one, see `like_size`: with drafts each step has another. One that was seen
    often enough has the median of the latest times; between two sizes lies a straight line; beyond the outermost ones
    nothing is known, and their price is taken. `is_unknown` says where one is missing.

    >>> costs = MeasuredCosts()
    >>> for _ in range(ENOUGH):
    ...     costs.observe_step(1, 0.004)
    ...     costs.observe_step(5, 0.006)
    >>> round(costs.step_s(1, 3), 6), costs.step_s(1, 8), costs.is_unknown(5), costs.is_unknown(8)
    (0.005, 0.006, False, True)
    """

    def __init__(self) -> None:
        self._steps: dict[int, _Latest] = {}
        self._drafts: dict[int, _Latest] = {}
        self._num_steps = 0

    def observe_step(self, num_tokens: int, seconds: float) -> None:
        """Take in a step's time. Changes: these prices."""
        self._num_steps += 1
        self._steps.setdefault(like_size(num_tokens), _Latest()).add(max(seconds, LEAST_S), self._num_steps)

    def observe_drafts(self, num_rows: int, seconds: float) -> None:
        """Take in the time of one draft for each of so many rows. Changes: these prices."""
        self._drafts.setdefault(like_size(num_rows), _Latest()).add(seconds, self._num_steps)

    def is_unknown(self, num_tokens: int) -> bool:
        """Whether nothing near this size, within a quarter, has been seen often enough and lately."""
        return not any(0.8 * num_tokens <= size <= 1.25 * num_tokens for size in self._known())

    def step_s(self, num_rows: int, num_tokens: int) -> float:
        """See Costs.step_s; tokens alone decide. 1.0 where nothing has been measured yet."""
        sizes = self._known()
        if not sizes:
            return 1.0
        at = bisect_left(sizes, num_tokens)
        low, high = sizes[max(0, at - 1)], sizes[min(at, len(sizes) - 1)]
        share = 0.0 if high == low else min(1.0, max(0.0, (num_tokens - low) / (high - low)))
        return (1 - share) * self._steps[low].value + share * self._steps[high].value

    def draft_s(self, num_rows: int) -> float:
        """See Costs.draft_s: that of the number of rows nearest to this one; 0.0 where none was measured often enough.

        A first draft may cost more than others: a small model reads the whole prompt before it.
        """
        known = [size for size, latest in self._drafts.items() if latest.count >= ENOUGH]
        if not known:
            return 0.0
        return self._drafts[min(known, key=lambda size: abs(math.log(size / num_rows)))].value

    def _known(self) -> list[int]:
        """The sizes whose price is known, in order: seen often enough, and lately."""
        oldest = self._num_steps - STALE_AFTER
        return sorted(size for size, x in self._steps.items() if x.count >= ENOUGH and x.last_step >= oldest)


def like_size(num: int) -> int:
    """The size that stands for all like it, which are a few per cent larger or smaller.

    >>> [like_size(num) for num in (1, 2, 3, 7, 31, 32, 33, 100)]
    [1, 2, 3, 7, 32, 32, 32, 99]
    """
    return round(2 ** (round(8 * math.log2(num)) / 8))


class _Latest:
    """The median of the latest values: one that came between two waits of the machine says nothing."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=LATEST)
        self.value, self.count, self.last_step = 0.0, 0, 0

    def add(self, value: float, step: int) -> None:
        """Take in one value. Changes: this median; what is older than STALE_AFTER steps is forgotten."""
        if step - self.last_step > STALE_AFTER:
            self._values.clear()
            self.count = 0
        self._values.append(value)
        self.value, self.count, self.last_step = median(self._values), self.count + 1, step
