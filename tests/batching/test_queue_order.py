"""The order of admission by cached tokens: the most first, nobody overtaken for ever, and few looked up."""

from collections import Counter

import pytest

from minserve.batching.queue_order import MOST_OVERTAKEN, NUM_COMPARED, by_longest_prefix


def ordered(cached, overtaken=()):
    """The numbers of requests with so many cached tokens, which were overtaken so often, in their order."""
    overtaken = [*overtaken] + [0] * (len(cached) - len(overtaken))
    return by_longest_prefix(range(len(cached)), cached.__getitem__, overtaken.__getitem__)


@pytest.mark.parametrize(
    "cached, wanted",
    [([], []), ([3], [0]), ([0, 0, 0], [0, 1, 2]), ([1, 2, 3], [2, 1, 0]), ([2, 5, 2, 5, 0], [1, 3, 0, 2, 4])],
)
def test_the_most_cached_first_and_of_equals_who_came_first(cached, wanted):
    assert ordered(cached) == wanted


@pytest.mark.parametrize("times", [MOST_OVERTAKEN - 1, MOST_OVERTAKEN, MOST_OVERTAKEN + 9])
def test_who_was_overtaken_too_often_is_first(times):
    is_overdue = times >= MOST_OVERTAKEN
    assert ordered([0, 5, 9], [times, 0, 0]) == ([0, 2, 1] if is_overdue else [2, 1, 0])
    assert ordered([0, 5, 9], [0, times, 0]) == ([1, 2, 0] if is_overdue else [2, 1, 0])


def test_of_those_overtaken_too_often_the_first_that_came_is_first():
    assert ordered([0, 7, 3, 9], [MOST_OVERTAKEN, 40, MOST_OVERTAKEN - 1, MOST_OVERTAKEN]) == [0, 1, 3, 2]


@pytest.mark.parametrize("num", [NUM_COMPARED - 1, NUM_COMPARED, NUM_COMPARED + 1, 3 * NUM_COMPARED])
def test_of_a_long_queue_only_the_first_are_looked_up_and_once_each(num):
    asked = Counter()

    def cached_tokens(number):
        asked[number] += 1
        return number

    order = by_longest_prefix([*range(num)], cached_tokens, lambda number: 0)
    compared = min(num, NUM_COMPARED)
    assert asked == Counter(range(compared))
    assert order == [*reversed(range(compared)), *range(compared, num)]
