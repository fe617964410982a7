"""Lets the tests here import what lies beside them, and gives them a small random model.

They run thousands of short steps, and without the shape checks that other tests run under: these cost more than a step.
"""

import sys
from pathlib import Path

import jaxtyping
import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="package", autouse=True)
def shapes_unchecked():
    """Leaves the shape checks out while these tests run."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)


@pytest.fixture(scope="session")
def model():
    """The small model, in float64."""
    from small_engine import small_model

    return small_model()
