"""Lets the tests here import what lies beside them, and gives them a small checkpoint."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def sparse(tmp_path):
    """A sparse checkpoint on disk, and its tensors."""
    from small_checkpoints import SPARSE, random_tensors

    from minserve.model.checkpoint import write_checkpoint

    tensors = random_tensors(SPARSE)
    write_checkpoint(tmp_path, SPARSE, tensors)
    return tmp_path, tensors
