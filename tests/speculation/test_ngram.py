"""Drafts that are looked up: what a plain search finds, at a cost that does not grow with the request."""

from __future__ import annotations

import random

import numpy as np
import pytest

from minserve.errors import InvalidValue
from minserve.speculation import drafters
from minserve.speculation.drafters import Drafter, NGramDrafter


def looked_up(tokens: list[int], most: int, longest: int, shortest: int) -> list[int]:
    """The same by a search of every place, the longest agreement first and the latest place first."""
    for length in range(longest, shortest - 1, -1):
        for start in range(len(tokens) - length - 1, -1, -1):
            if tokens[start : start + length] == tokens[len(tokens) - length :]:
                return tokens[start + length : start + length + most]
    return []


@pytest.mark.parametrize("alphabet", [1, 2, 3, 8])
@pytest.mark.parametrize("longest, shortest", [(1, 1), (2, 1), (3, 3), (4, 2), (6, 1)])
def test_it_finds_what_a_search_of_every_place_finds(alphabet, longest, shortest):
    draw = random.Random(alphabet * 100 + longest)
    drafter, num_found = NGramDrafter(longest=longest, shortest=shortest, window=50), 0
    for length in [*range(12), *range(20, 50, 3)] * 4:
        tokens = [draw.randrange(alphabet) for _ in range(length)]
        for most in (0, 1, 3, 100):
            wanted = looked_up(tokens, most, longest, shortest)
            assert drafter.propose(tokens, most) == wanted
            num_found += bool(wanted)
    assert num_found > 10


@pytest.mark.parametrize(
    "tokens, drafts",
    [
        ([], []),
        ([5], []),
        ([5, 6], []),
        ([5, 6, 5, 6], [5, 6]),  # it does not find the end itself, and stops where the tokens do
        ([7, 7], []),  # the one before agrees over one token alone, and one is not enough
        ([7, 7, 7], [7]),
        ([1, 2, 8, 1, 2, 9, 1, 2], [9, 1, 2]),  # the latest of equals
        ([3, 1, 2, 8, 4, 1, 2, 9, 3, 1, 2], [8, 4, 1, 2, 9]),  # the longest, though it is older
        ([1, 2, 3, 4, 5, 6, 2, 3], [4, 5, 6, 2, 3]),
        ([1, 2, 3, 4, 5, 6, 9, 3], []),
    ],
)
def test_what_it_proposes(tokens, drafts):
    drafter = NGramDrafter(longest=3, shortest=2)
    assert drafter.propose(tokens, 5) == drafts
    assert drafter.propose(tuple(tokens), 5) == drafts
    for most in range(5):
        assert drafter.propose(tokens, most) == drafts[:most]
    assert all(type(token) is int for token in drafter.propose(tokens, 5))


def test_it_draws_nothing_and_remembers_nothing():
    drafter, tokens = NGramDrafter(shortest=1), [4, 1, 4, 2, 4]
    first = drafter.propose(tokens, 3)
    drafter.propose([4, 9, 4], 3)
    assert drafter.propose(tokens, 3) == first == [2, 4] and tokens == [4, 1, 4, 2, 4]


@pytest.mark.parametrize("distance", range(1, 9))
def test_no_more_than_the_window_is_looked_at(distance):
    """An occurrence counts if all of it lies among the latest eight tokens."""
    between = list(range(100, 100 + distance))
    drafts = NGramDrafter(longest=2, shortest=2, window=8).propose([1, 2, *between, 1, 2], 1)
    assert drafts == ([100] if 2 + distance + 2 <= 8 else [])


class CountedTokens:
    """The tokens of a long request, which count how many of them are asked for."""

    def __init__(self, tokens):
        self.tokens, self.num_read = tokens, 0

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, item):
        found = self.tokens[item]
        self.num_read += len(found) if isinstance(item, slice) else 1
        return found


class CountedNumpy:
    """NumPy, as the drafter uses it, with a count of the positions that it starts a call with."""

    def __init__(self):
        self.num_positions = 0

    def __getattr__(self, name):
        return getattr(np, name)

    def arange(self, num):
        self.num_positions += num
        return np.arange(num)


@pytest.mark.parametrize("length", [100, 1000, 100_000])
@pytest.mark.parametrize("repeats", [1, 3, 1000])
def test_the_cost_does_not_grow_with_the_request(monkeypatch, length, repeats):
    counted = CountedNumpy()
    monkeypatch.setattr(drafters, "np", counted)
    tokens = CountedTokens([i % repeats for i in range(length)])
    NGramDrafter(window=64).propose(tokens, 8)
    assert tokens.num_read == 64 and counted.num_positions == 63
    assert NGramDrafter(window=64).propose(tokens, 0) == [] and tokens.num_read == 64, "none wanted, nothing read"


def test_it_is_a_drafter():
    assert isinstance(NGramDrafter(), Drafter) and not isinstance(object(), Drafter)


@pytest.mark.parametrize(
    "fields, said",
    [({"longest": 0}, "^longest"), ({"shortest": 0}, "^shortest"), ({"longest": 2, "shortest": 3}, "^shortest"),
     ({"longest": 4, "window": 4}, "^window")],
)  # fmt: skip
def test_what_it_refuses(fields, said):
    with pytest.raises(InvalidValue, match=said):
        NGramDrafter(**fields)
    NGramDrafter(longest=4, shortest=4, window=5)
