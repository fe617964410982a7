"""Every pair of levels, in as few rows as a greedy search finds: what a matrix of many factors is thinned out to.

A fault of a serving engine is mostly one of two things that do not go together: chunks and pages, forks and preemption.
A set of rows in which every two levels of different factors meet goes to all such places, and is far smaller than the
product of all factors. Kuhn, Wallace, Gallo: Software Fault Interactions and Implications for Software Testing
(IEEE TSE 30(6), 2004).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import combinations, product

Factors = Mapping[str, Sequence[Hashable]]
Row = dict[str, Hashable]


def pairs_of(row: Mapping[str, Hashable]) -> set[frozenset]:
    """The pairs of levels that meet in a row, complete or not."""
    return {frozenset(pair) for pair in combinations(row.items(), 2)}


def all_pairs(factors: Factors, is_possible: Callable[[Row], bool]) -> dict[frozenset, Row]:
    """Every possible pair of levels of two factors, each with the row that holds it alone, in a fixed order."""
    rows = ({a: left, b: right} for a, b in combinations(factors, 2) for left, right in product(factors[a], factors[b]))
    return {frozenset(row.items()): row for row in rows if is_possible(row)}


def covering_rows(factors: Factors, is_possible: Callable[[Row], bool] = lambda row: True) -> list[Row]:
    """Rows of one level per factor in which every possible pair of levels meets; the same rows every time.

    Arguments:
        factors: the levels of each.
        is_possible: whether a row, complete or not, may stand; adding levels never makes an impossible one possible.
    """
    rows, open_pairs = [], all_pairs(factors, is_possible)
    num_met = Counter()

    def gain(row: Row) -> tuple[int, int]:
        """New pairs, and of equally many the less those in it have met: else rows repeat when few pairs are open."""
        return len(pairs_of(row) & open_pairs.keys()), -sum(num_met[pair] for pair in pairs_of(row))

    while open_pairs:
        row = dict(next(iter(open_pairs.values())))
        for name in sorted(factors.keys() - row.keys(), key=list(factors).index):
            extended = [{**row, name: level} for level in factors[name]]
            row = max(filter(is_possible, extended), key=gain)
        rows.append({name: row[name] for name in factors})
        num_met.update(pairs_of(row))
        open_pairs = {pair: alone for pair, alone in open_pairs.items() if pair not in num_met}
    return rows


def spread(rows: Sequence[Row], values: Sequence[int], per_row: int) -> list[tuple[int, ...]]:
    """Some of the values for each row, so that every value meets every level of every factor in some row.

    Arguments:
        rows: from `covering_rows`.
        values: all of one more factor, so many that a row has several at once; of equally useful ones the first go.
        per_row: about how many.
    """
    open_pairs = {(value, item) for row in rows for item in row.items() for value in values}
    chosen = [[] for _ in rows]

    def put(value: int, at: int) -> None:
        chosen[at].append(value)
        open_pairs.difference_update((value, item) for item in rows[at].items())

    for at, row in enumerate(rows):
        news = {value: sum((value, item) in open_pairs for item in row.items()) for value in values}
        for value in sorted(values, key=lambda value: -news[value])[:per_row]:
            put(value, at)
    for value, item in sorted(open_pairs, key=repr):
        if (value, item) in open_pairs:
            at = min((at for at, row in enumerate(rows) if item in row.items()), key=lambda at: len(chosen[at]))
            put(value, at)
    return [tuple(values) for values in chosen]
