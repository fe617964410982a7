"""How many drafts are worth their price: the depth with the most tokens per second, from what has been accepted so far.

    tokens of a step with d drafts = 1 + a_1 + a_1 a_2 + ... + a_1 ... a_d
    a_k = P(draft k is accepted | the drafts before it were)
    best depth = argmax over d of  tokens(d) / (step cost(d) + d x draft cost)

Leviathan et al. (arXiv 2211.17192, section 3) take all a_k to be one number, independent of each other; in real text
they are neither. Depth 0 is plain decoding, and often wins: in a large batch, where more tokens to verify cost more
time, and with a drafter that is seldom right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from minserve.errors import InvalidValue


def expected_tokens(conditional_acceptance: Sequence[float]) -> float:
    """How many tokens a step is expected to give that verifies one draft for each of these rates.

    Arguments:
        conditional_acceptance: of each depth, how often its draft is accepted where those before it were; 0 to 1.

    >>> expected_tokens([]), expected_tokens([0.5, 0.5]), expected_tokens([1.0, 1.0])
    (1.0, 1.75, 3.0)
    """
    return 1.0 + sum(math.prod(conditional_acceptance[: d + 1]) for d in range(len(conditional_acceptance)))


def best_depth(
    conditional_acceptance: Sequence[float],
    step_cost: Callable[[int], float] | Sequence[float],
    draft_cost: float,
    num_drafts: Sequence[int] | None = None,
) -> int:
    """The number of drafts that gives the most tokens per second; the smallest of equals, 0 where none pays.

    For a batch: the same question, with the cost of the whole step, and of a draft for each of its rows.

    Arguments:
        conditional_acceptance: as in `expected_tokens`; its length is the greatest depth considered.
        step_cost: seconds (or any unit, the same for both) of a step that verifies so many drafts, from 0, a plain
            step, to the greatest depth. It may have steps of its own: every depth is looked at.
        draft_cost: what one draft costs before that; 0 for one that is looked up.
        num_drafts: for each row of a batch, how many drafts there are for it at most; every depth unless given. The
            costs are then those of a step in which each row has as many as the depth allows and it has.
    Errors: InvalidValue for a rate outside 0 to 1, a step that costs nothing, or a missing cost.

    >>> best_depth([0.8, 0.8, 0.8], [1.0, 1.05, 1.1, 1.15], draft_cost=0.1)
    3
    >>> best_depth([0.2, 0.2, 0.2], [1.0, 1.05, 1.1, 1.15], draft_cost=0.2)
    0
    """
    most = len(conditional_acceptance)
    for depth, rate in enumerate(conditional_acceptance):
        if not 0 <= rate <= 1:
            raise InvalidValue(f"conditional_acceptance[{depth}]", rate, "from 0 to 1")
    if not 0 <= draft_cost < math.inf:
        raise InvalidValue("draft_cost", draft_cost, "finite and at least 0")
    if not callable(step_cost) and len(step_cost) <= most:
        raise InvalidValue("len(step_cost)", len(step_cost), f"at least {most + 1}: a cost for each depth from 0 on")
    costs = [step_cost(d) if callable(step_cost) else step_cost[d] for d in range(most + 1)]
    for depth, cost in enumerate(costs):
        if not 0 < cost < math.inf:
            raise InvalidValue(f"step_cost of depth {depth}", cost, "finite and above 0")
    expected = [expected_tokens(conditional_acceptance[:depth]) for depth in range(most + 1)]
    counts = [most] if num_drafts is None else num_drafts
    rates = [
        sum(expected[min(depth, count)] for count in counts) / (cost + depth * draft_cost)
        for depth, cost in enumerate(costs)
    ]
    return rates.index(max(rates))


class Acceptance:
    """How often drafts are accepted, depth by depth, with more weight on what happened lately.

    Draft k counts only where all before it were accepted: otherwise nobody knows what would have become of it. At each
    step that shows something of a depth, its older counts shrink by 1 - 1 / memory. The prior counts as
    `prior_weight` drafts more, so that a single rejection at the start decides nothing.

    A depth that is not tried teaches nothing, so that a drafter once given up would never come back. The rule: a
    depth that has shown nothing for `retry_after` steps is judged by the prior again, if that is higher, until it
    shows something. So where the prior pays, every `retry_after` steps some step drafts again, and pays for it.

    It knows no clock and draws no numbers: the same outcomes give the same rates.

    Arguments:
        most: the greatest depth.
        prior: the rate of a depth that nothing is known about; 0 to 1.
        prior_weight: how many drafts the prior counts for; > 0.
        memory: steps after which an outcome's weight has fallen to about a third; >= 1.
        retry_after: see the rule; >= 1.
    Errors: InvalidValue for an argument out of range.

    >>> acceptance = Acceptance(most=2, prior=0.5, prior_weight=2)
    >>> acceptance.observe([(2, 0), (2, 2)])  # two rows of a step: one lost its first draft, one kept both
    >>> [round(rate, 3) for rate in acceptance.rates()]
    [0.5, 0.667]
    """

    def __init__(
        self, most: int, *, prior: float = 0.75, prior_weight: float = 4.0, memory: float = 64.0, retry_after: int = 64
    ):
        in_range = {
            "most": (most, most >= 0, "at least 0"),
            "prior": (prior, 0 <= prior <= 1, "from 0 to 1"),
            "prior_weight": (prior_weight, 0 < prior_weight < math.inf, "finite and above 0"),
            "memory": (memory, memory >= 1, "at least 1"),
            "retry_after": (retry_after, retry_after >= 1, "at least 1"),
        }
        for name, (value, is_good, limit) in in_range.items():
            if not is_good:
                raise InvalidValue(name, value, limit)
        self.most, self.prior, self.prior_weight, self.retry_after = most, prior, prior_weight, retry_after
        self.keep = 1 - 1 / memory
        self.proposed, self.accepted = [0.0] * most, [0.0] * most
        self.num_steps_since = [0] * most  # since a depth last showed something

    def observe(self, outcomes: Iterable[tuple[int, int]]) -> None:
        """Take in what became of one step's drafts.

        Arguments:
            outcomes: (drafts, accepted) of each row. Of a step without drafts too: that is how time passes.
        Changes: the counts.
        Errors: InvalidValue for more accepted than drafted, or more drafted than `most`; then nothing is counted.
        """
        outcomes = list(outcomes)
        for num_drafts, num_accepted in outcomes:
            if not 0 <= num_accepted <= num_drafts <= self.most:
                limit = f"0 <= accepted <= drafts <= {self.most}"
                raise InvalidValue("(drafts, accepted)", (num_drafts, num_accepted), limit)
        for depth in range(self.most):
            # A row shows something of this depth where it drafted so far, and kept all before.
            shown = [accepted > depth for drafts, accepted in outcomes if drafts > depth and accepted >= depth]
            self.num_steps_since[depth] += 1
            if shown:
                self.proposed[depth] = self.keep * self.proposed[depth] + len(shown)
                self.accepted[depth] = self.keep * self.accepted[depth] + sum(shown)
                self.num_steps_since[depth] = 0

    def rates(self) -> list[float]:
        """The conditional acceptance of each depth, as `best_depth` wants it."""
        rates = []
        for accepted, proposed, since in zip(self.accepted, self.proposed, self.num_steps_since, strict=True):
            rate = (accepted + self.prior_weight * self.prior) / (proposed + self.prior_weight)
            rates.append(max(rate, self.prior) if since >= self.retry_after else rate)
        return rates
