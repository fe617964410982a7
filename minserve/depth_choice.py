"""How many drafts a step asks for, while prices and acceptance are only being found out.

    best depth = argmax of tokens per second, by the latest prices and acceptance; see `minserve.speculation.depth`

Whoever only ever drafts does not learn what a plain step costs, and whoever never does not learn what he misses. So
now and then a step is a plain one; and where drafts do not pay for some steps in a row, none are made for a while, and
then it is tried again, each time after twice as long:

    steps   |- drafts -|-- none pays --|---------- rest ----------|- drafts -|-- none pays --|----- rest, twice as long
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from minserve.speculation.depth import Acceptance, best_depth
from minserve.step_costs import Costs, MeasuredCosts, like_size

PLAIN_EVERY = 4  # steps from one plain step to the next, where its price is not known
SURE_STEPS = 8  # so often in a row drafts must not have paid: prices and rates waver
FIRST_REST_STEPS, LONGEST_REST_STEPS = 64, 2048
NO_REST = (0, FIRST_REST_STEPS // 2)  # until which step; and how long, half of the next one


class DepthChoice:
    """Chooses how many drafts each row of a step may have.

    Arguments:
        most: the most that are ever asked for.
        costs: what steps and drafts cost.
    Attributes:
        acceptance: how often drafts were accepted, by depth.
        costs: as given.
        is_resting: whether nothing is drafted for a while, since it has not paid.
    """

    def __init__(self, most: int, costs: Costs):
        self.acceptance, self.costs, self.is_resting = Acceptance(most), costs, False
        self._most, self._num_steps = most, 0
        self._num_idle: Counter[int] = Counter()  # steps in a row in which drafts did not pay, by size of the batch
        self._rests: dict[int, tuple[int, int]] = {}  # by size of the batch

    def begin_step(self, num_rows: int) -> bool:
        """Let a step go by, with so many decoding rows; whether it is not to draft at all. Changes: `is_resting`."""
        self._num_steps += 1
        until, _ = self._rests.get(like_size(num_rows), NO_REST) if num_rows else NO_REST
        self.is_resting = self._num_steps < until
        return self.is_resting

    def choose(self, num_drafts: Sequence[int]) -> int:
        """How many drafts pay. Changes: this choice.

        Arguments:
            num_drafts: for each decoding row, how many drafts there are for it, at most.
        """
        if not any(num_drafts):
            return 0
        size = like_size(len(num_drafts))
        depth = best_depth(
            self.acceptance.rates(),
            [self.costs.step_s(len(num_drafts), _num_tokens(num_drafts, depth)) for depth in range(self._most + 1)],
            self.costs.draft_s(sum(count > 0 for count in num_drafts)),
            num_drafts,
        )
        until, length = self._rests.get(size, NO_REST)
        self._num_idle[size] = 0 if depth else self._num_idle[size] + 1
        if self._num_idle[size] >= SURE_STEPS:
            length = min(2 * length, LONGEST_REST_STEPS)
            self._rests[size], self._num_idle[size] = (self._num_steps + length, length), 0
        elif depth and self._num_steps > until + length:
            self._rests.pop(size, None)  # it has paid for as long as it rested
        return depth

    def wants_plain_step(self, num_rows: int) -> bool:
        """Whether the price of a plain step with so many rows is to be measured in this one.

        Now and then only: where each step reads a prompt as well, nothing can be measured, and drafts may pay.
        """
        is_time = self._num_steps % PLAIN_EVERY == 0
        return is_time and isinstance(self.costs, MeasuredCosts) and self.costs.is_unknown(num_rows)


def _num_tokens(num_drafts: Sequence[int], depth: int) -> int:
    """The tokens of a step in which each row has at most `depth` drafts, and as many as there are for it."""
    return sum(1 + min(depth, count) for count in num_drafts)
