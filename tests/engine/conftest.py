"""Lets the tests here import what lies beside them, and gives them a small random model.

They run thousands of short steps, and without the shape checks that other tests run under: these cost more than a step.
"""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="module", autouse=True)
def steps_run_unchecked(shapes_unchecked):
    """The shape checks are left out while these tests run."""


@pytest.fixture(scope="session")
def model():
    """The small model, in float64."""
    from small_engine import small_model

    return small_model()
