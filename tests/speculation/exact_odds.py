"""What verification emits, integrated over its random numbers exactly, in fractions.

Probabilities are whole numbers of n-ths. So whatever a random number decides, it decides at a fraction that a grid of
equal cells has among its borders; and a sum over the cells' midpoints is the integral.
"""

from __future__ import annotations

from collections import defaultdict
from fractions import Fraction
from itertools import product
from math import prod

import torch

from minserve.speculation.verify import verify


def walk(table, tokens) -> int:
    """The product of the probabilities, in n-ths, of tokens one after the other; a table has a row per token before."""
    return prod(table[before][token] for before, token in zip((0, *tokens), tokens, strict=False))


def emitted(p, drawn, told, depth: int, accept_cells: int, sample_cells: int) -> dict[tuple, Fraction]:
    """The probability of everything that a row may emit, drafts kept and the token that follows.

    Arguments:
        p: a table of whole numbers: row i holds the probabilities after token i, in n-ths; token 0 comes before all.
        drawn: the table that drafts are drawn from. told: the one that verify is told of, or None.
    """
    vocab, size, tables = len(p), sum(p[0]), [torch.tensor(t, dtype=torch.float64) for t in (p, told or p)]
    odds = defaultdict(Fraction)
    cells = product(*[range(accept_cells)] * depth, range(sample_cells))
    u = (torch.tensor(list(cells), dtype=torch.float64) + 0.5) / torch.tensor([accept_cells] * depth + [sample_cells])
    num = len(u)
    for drafts in product(range(vocab), repeat=depth):
        if not (share := walk(drawn, drafts)):
            continue
        before = torch.tensor([0, *drafts])
        num_accepted, next_ids = verify(
            (tables[0][before] / size).repeat(num, 1),
            torch.tensor(drafts, dtype=torch.int64).repeat(num),
            (tables[1][before[:-1]] / size).repeat(num, 1) if told else None,
            torch.arange(num + 1) * (depth + 1), u[:, :depth].flatten(), u[:, depth],
        )  # fmt: skip
        for kept, token in zip(num_accepted.tolist(), next_ids.tolist(), strict=True):
            odds[(*drafts[:kept], token)] += Fraction(share, size**depth * num)
    return odds


def first_tokens(odds: dict[tuple, Fraction], p, num: int) -> dict[tuple, Fraction]:
    """The joint distribution of the first tokens, where whatever is not emitted yet comes from plain steps."""
    joint, size = defaultdict(Fraction), sum(p[0])
    for tokens, odd in odds.items():
        for more in product(range(len(p)), repeat=max(0, num - len(tokens))):
            path = (*tokens, *more)
            plain = prod(Fraction(p[path[i - 1]][path[i]], size) for i in range(len(tokens), len(path)))
            joint[path[:num]] += odd * plain
    return {path: odd for path, odd in joint.items() if odd}


def plain(p, num: int) -> dict[tuple, Fraction]:
    """The same without speculation."""
    paths = product(range(len(p)), repeat=num)
    return {path: Fraction(walk(p, path), sum(p[0]) ** num) for path in paths if walk(p, path)}


def mean_accepted(odds: dict[tuple, Fraction]) -> Fraction:
    """How many drafts a row keeps on average: a row emits one token more."""
    return sum(odd * (len(tokens) - 1) for tokens, odd in odds.items())
