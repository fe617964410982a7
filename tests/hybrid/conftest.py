"""Lets the tests here import what lies beside them, and gives them the models, each built once.

They run thousands of short steps, and without the shape checks that other tests run under: these cost more than a step.
"""

import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), *(str(Path(__file__).parents[1] / name) for name in ("engine", "matrix"))]


@pytest.fixture(scope="module", autouse=True)
def steps_run_unchecked(shapes_unchecked):
    """The shape checks are left out while these tests run."""


@pytest.fixture(scope="session")
def worlds():
    """The models, each with what it says plainly."""
    from worlds import all_worlds

    return all_worlds()
