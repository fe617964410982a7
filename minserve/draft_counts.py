"""What became of drafts, read from the log: how often those of each depth were kept, and what a step gave.

A row is one request in one step.

    verified    rows    draft 1    draft 2    draft 3
    3 drafts       6    kept 5     kept 4     kept 4
    1 draft        2    kept 2
    none           2

    acceptance of draft 2     4 of 6: of the rows that verified one       given draft 1    4 of 5: of those that kept it
    tokens per step           1 + (7 + 4 + 4) / 10: the kept drafts, and one more for each row
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from minserve.events import Event, EventKind


@dataclass(frozen=True)
class DraftCounts:
    """The drafts of a run, counted by depth; the first entry is each row's first draft.

    Fields:
        num_rows: rows that were there to get tokens, with drafts or without.
        num_tokens: what they got.
        drafted: by depth, rows that verified a draft so deep.
        reached: of these, rows that kept all drafts before it.
        accepted: of these, rows that kept it too.
    """

    num_rows: int
    num_tokens: int
    drafted: tuple[int, ...]
    reached: tuple[int, ...]
    accepted: tuple[int, ...]

    @property
    def num_drafted(self) -> int:
        """All drafts that were verified."""
        return sum(self.drafted)

    @property
    def num_accepted(self) -> int:
        """All drafts that were kept."""
        return sum(self.accepted)

    @property
    def acceptance(self) -> list[float]:
        """By depth, how often a draft was kept, of all that were verified: it never is where one before it was not."""
        return [accepted / drafted for accepted, drafted in zip(self.accepted, self.drafted, strict=True)]

    @property
    def conditional_acceptance(self) -> list[float | None]:
        """By depth, how often a draft was kept where those before it were; None where they never were."""
        return [
            accepted / reached if reached else None
            for accepted, reached in zip(self.accepted, self.reached, strict=True)
        ]

    @property
    def rate(self) -> float | None:
        """One rate for all depths: drafts kept, of those whose turn came; None where there were none."""
        return self.num_accepted / sum(self.reached) if self.drafted else None

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a row got from a step, on average; 0 of none."""
        return self.num_tokens / self.num_rows if self.num_rows else 0.0

    def tokens_at(self, rate: float) -> float:
        """Tokens per row and step if each draft, at any depth, were kept at one rate, independently of all others.

        For rows of d drafts that is 1 + rate + ... + rate^d; here the rows' own numbers of drafts are taken.

        Arguments:
            rate: 0 to 1, of drafts whose turn comes.

        >>> DraftCounts(2, 5, drafted=(2, 1), reached=(2, 1), accepted=(2, 1)).tokens_at(0.5)
        1.625
        """
        if not self.num_rows:
            return 0.0
        return 1 + sum(drafted * rate**depth for depth, drafted in enumerate(self.drafted, 1)) / self.num_rows

    @property
    def iid_tokens_per_step(self) -> float:
        """What `tokens_at` foretells from the one rate of all depths; the difference to the truth is its assumption."""
        return self.tokens_at(self.rate or 0.0)

    def rate_for(self, tokens_per_step: float) -> float | None:
        """The rate at which `tokens_at` gives so many tokens; None where not even all drafts kept would give them.

        >>> counts = DraftCounts(1, 2, drafted=(1, 1), reached=(1, 1), accepted=(1, 0))
        >>> round(counts.rate_for(1.75), 9), counts.rate_for(1.0), counts.rate_for(3.5)
        (0.5, 0.0, None)
        """
        if self.tokens_at(1.0) < tokens_per_step:
            return None
        low, high = 0.0, 1.0
        for _ in range(60):  # halves: then they are as near to each other as two numbers can be
            middle = (low + high) / 2
            low, high = (middle, high) if self.tokens_at(middle) < tokens_per_step else (low, middle)
        return low


def count_drafts(rows: Mapping[tuple[int, int], int], num_tokens: int) -> DraftCounts:
    """Count by depth.

    Arguments:
        rows: (drafts, drafts kept) -> how many rows.
        num_tokens: that these got.
    """
    depths = range(1, max((drafted for drafted, _ in rows), default=0) + 1)

    def num(depth: int, kept: int) -> int:
        """Rows with so many drafts and so many kept, or more of either."""
        return sum(n for (drafted, accepted), n in rows.items() if drafted >= depth and accepted >= kept)

    return DraftCounts(
        num_rows=sum(rows.values()),
        num_tokens=num_tokens,
        drafted=tuple(num(depth, 0) for depth in depths),
        reached=tuple(num(depth, depth - 1) for depth in depths),
        accepted=tuple(num(depth, depth) for depth in depths),
    )


def draft_counts(log: Iterable[Event]) -> DraftCounts:
    """Count the decode rows of a run, and what became of their drafts.

    A row that reads a prompt has no drafts; its token is not counted, nor are rows that never got one. Where an output
    ends among the drafts that were kept, those behind its end count as turned down.

    Arguments:
        log: an `EventLog`, or some events in the order of one.
    """
    decodes, drafted, rows, num_tokens = set(), {}, Counter(), 0
    for event in log:
        if event.kind is EventKind.SLICE:
            drafted[event.request_id] = (0, 0)
            is_decode = event.data["phase"] == "decode"
            (decodes.add if is_decode else decodes.discard)(event.request_id)
        elif event.kind is EventKind.DRAFTS:
            drafted[event.request_id] = (event.data["drafted"], event.data["accepted"])
        elif event.kind is EventKind.TOKENS and event.request_id in decodes:
            rows[drafted[event.request_id]] += 1
            num_tokens += event.data["count"]
    return count_drafts(rows, num_tokens)
