"""Every kernel compiles for GPUs that are not here, and fits into them."""

from __future__ import annotations

import re

import pytest
from kernel_checks import ROOT, compiled_rows, needs_triton

SOURCES = sorted((ROOT / "minserve").rglob("*_triton.py"))
KERNELS = [
    name
    for path in SOURCES
    for name in re.findall(r"@triton\.jit\ndef (\w+_kernel)\(", path.read_text(encoding="utf-8"))
]
SHARED_BYTES = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "gfx942": 64 * 1024}  # what one program may use


@pytest.fixture(scope="module")
def rows():
    """What all kernels take, by kernel, target and dtype."""
    return {(row["kernel"], row["target"], row["dtype"]): row for row in compiled_rows()}


def test_kernels_are_found():
    assert len(KERNELS) >= 5 and len(set(KERNELS)) == len(KERNELS)


@needs_triton
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("target", SHARED_BYTES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_compiles_and_fits(rows, kernel, target, dtype):
    row = rows[kernel, target, dtype]
    assert row["binary"] == ("hsaco" if target == "gfx942" else "cubin") and row["binary_bytes"] > 1000
    assert row.get("spilled", 0) == 0, row
    assert row["shared_bytes"] <= SHARED_BYTES[target], row
