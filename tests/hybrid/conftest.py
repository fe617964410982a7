"""Lets the tests here import what lies beside them, and gives them the small models, each built once.

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
def models():
    """The small models in float64: one with a state layer, one with attention only."""
    from served import small_models

    return small_models()


@pytest.fixture(scope="session")
def model(models):
    """The small model with a state layer."""
    return models["hybrid"]
