"""Lets the tests here import what lies beside them, and gives them the small models, each built once.

The matrix runs without the shape checks that the other tests run under: they cost more than these models do.
"""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="module", autouse=True)
def steps_run_unchecked(shapes_unchecked):
    """The shape checks are left out while these tests run."""


@pytest.fixture(scope="session")
def alone():
    """What each request gets by itself, by model: computed when first asked for."""
    from alone import Alone
    from gated_models import MODELS, build

    return {name: Alone(build(name)) for name in MODELS}
