"""Who is let in next, where that depends on what the cache holds: the request with the most cached tokens.

What is cached now may be evicted while others run, so whoever can use it goes first; the requests of one prefix then
follow one another, and it is computed once. Taken by itself the rule starves those that share nothing; so nobody is
overtaken more often than a fixed number of times. Zheng et al., SGLang (arXiv 2312.07104), section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

Waiting = TypeVar("Waiting")

NUM_COMPARED = 128  # the first of the queue: asking the tree for each of thousands would take longer than a step
MOST_OVERTAKEN = 32


def by_longest_prefix(
    waiting: Sequence[Waiting], cached_tokens: Callable[[Waiting], int], overtaken: Callable[[Waiting], int]
) -> list[Waiting]:
    """The order of admission.

    Arguments:
        waiting: requests in order of arrival.
        cached_tokens: how many tokens of one are cached.
        overtaken: how many that arrived after it were let in before it.

    >>> by_longest_prefix(["a", "b", "c"], {"a": 0, "b": 16, "c": 64}.get, {"a": 0, "b": 0, "c": 0}.get)
    ['c', 'b', 'a']
    >>> by_longest_prefix(["a", "b", "c"], {"a": 0, "b": 16, "c": 64}.get, {"a": 32, "b": 1, "c": 0}.get)
    ['a', 'c', 'b']
    """
    compared = waiting[:NUM_COMPARED]
    overdue = [request for request in compared if overtaken(request) >= MOST_OVERTAKEN]
    others = [request for request in compared if overtaken(request) < MOST_OVERTAKEN]
    return [*overdue, *sorted(others, key=lambda request: -cached_tokens(request)), *waiting[NUM_COMPARED:]]
