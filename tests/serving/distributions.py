"""Telling two distributions apart."""

import math

import numpy as np


def chi_square(counts, expected):
    """The statistic, over its limit at 5 standard deviations (Wilson and Hilferty); above 1 the two differ."""
    counts, expected = np.asarray(counts, float).ravel(), np.asarray(expected, float).ravel()
    assert counts[expected == 0].sum() == 0
    counts, expected = counts[expected > 0], expected[expected > 0] * counts.sum() / expected.sum()
    df = len(counts) - 1
    limit = df * (1 - 2 / (9 * df) + 5 * math.sqrt(2 / (9 * df))) ** 3
    return ((counts - expected) ** 2 / expected).sum() / limit
