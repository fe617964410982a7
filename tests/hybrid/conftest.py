"""Lets the tests here import what lies beside them, and gives them the models, each built once.

They run thousands of short steps, and without the shape checks that other tests run under: these cost more than a step.
"""

import sys
from pathlib import Path

import jaxtyping
import pytest

sys.path[:0] = [str(Path(__file__).parent), *(str(Path(__file__).parents[1] / name) for name in ("engine", "matrix"))]


@pytest.fixture(scope="package", autouse=True)
def shapes_unchecked():
    """Leaves the shape checks out while these tests run."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)


@pytest.fixture(scope="session")
def worlds():
    """The models, each with what it says plainly."""
    from worlds import all_worlds

    return all_worlds()
