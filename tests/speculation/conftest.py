"""Lets the tests here import what lies beside them, and the small engines and models of other folders. Kernels are
tested in Triton's interpreter, which must be asked for before triton is imported.
"""

import os
import sys
from pathlib import Path

import pytest

os.environ["TRITON_INTERPRET"] = "1"
os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"  # else the interpreter warns that it does not fuse
TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(Path(__file__).parent), *(str(TESTS / name) for name in ("kernels", "engine", "matrix"))]


@pytest.fixture(scope="session")
def dense():
    """A small random hybrid model with a draft head, in float64, whose gates hide nothing."""
    from gated_models import build

    return build("dense")
