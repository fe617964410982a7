"""How much of the prompts was cached: as it was, read from the log, and as it could have been."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minserve.events import EventKind, EventLog
from minserve.radix.node import num_common


@dataclass(frozen=True)
class CacheHits:
    """What became of the prompt tokens of a run.

    Fields: `prompt_tokens` of all requests that were let in; `cached_tokens` of these, reused at their first admission;
    `prefill_tokens` computed in prefill slices, what a preemption or a lost cache made necessary again included. The
    forks of a prompt (n > 1) are left out: it is one prompt, and their share of it is no find.
    """

    prompt_tokens: int
    cached_tokens: int
    prefill_tokens: int

    @property
    def hit_rate(self) -> float:
        """The share of prompt tokens that were cached; 0 of none."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def cache_hits(log: EventLog) -> CacheHits:
    """Count what a run reused; see `CacheHits`."""
    prompt_tokens, cached, seen, prefill = {}, 0, set(), 0
    for event in log:
        if event.kind is EventKind.ARRIVED:
            prompt_tokens[event.request_id] = event.data["prompt_tokens"]
        elif event.kind is EventKind.ADMITTED and event.request_id not in seen:
            if event.data["cached_tokens"] < prompt_tokens[event.request_id]:  # a hit leaves one token, a fork none
                seen.add(event.request_id)
                cached += event.data["cached_tokens"]
        elif event.kind is EventKind.SLICE and event.data["phase"] == "prefill":
            prefill += event.data["stop"] - event.data["start"]
    return CacheHits(sum(prompt_tokens[request_id] for request_id in seen), cached, prefill)


def best_cached_tokens(prompts: Sequence[Sequence[int]], known: Sequence[Sequence[int]]) -> list[int]:
    """How many tokens of each prompt a cache that forgets nothing could give it, one token always left to run.

    Arguments:
        prompts: in the order in which they are let in.
        known: by prompt, all that it leaves behind: itself and its output, but for the last token, which is not run.

    >>> best_cached_tokens([(1, 2, 3), (1, 2, 4), (1, 2, 3)], [(1, 2, 3, 9), (1, 2, 4), (1, 2, 3)])
    [0, 2, 2]
    """
    best = []
    for number, prompt in enumerate(prompts):
        longest = max((num_common(prompt, other) for other in known[:number]), default=0)
        best.append(min(longest, len(prompt) - 1))
    return best
