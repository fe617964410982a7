"""What the tests of every kernel share: poison and guards around tensors, bounds on errors, refusals.

Tests that use it set TRITON_INTERPRET before triton is imported: see the conftest of their folder.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from minserve.errors import MissingRequirement

ROOT = Path(__file__).resolve().parents[2]
NAN, GUARD, MARGIN = float("nan"), 77.0, 64
DTYPES = (torch.float32, torch.float16, torch.float64)  # the interpreter has no bfloat16
MOST_ITERATIONS = 150  # of all programs of a case together: the interpreter is slow
needs_triton = pytest.mark.skipif(platform.system() != "Linux", reason="triton is made for Linux")


def surrounded(tensor: torch.Tensor, fill: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A copy of a tensor in the middle of a memory full of `fill`, and that memory."""
    memory = torch.full((tensor.numel() + 2 * MARGIN,), fill, dtype=tensor.dtype)
    inside = memory[MARGIN : MARGIN + tensor.numel()].view(tensor.shape)
    return inside.copy_(tensor), memory


def check_margins(memory: torch.Tensor) -> None:
    """What lies around a surrounded tensor is still GUARD."""
    margins = torch.cat([memory[:MARGIN], memory[-MARGIN:]])
    assert (margins == GUARD).all(), "something was written outside"


def bound(dtype: torch.dtype, largest: float) -> float:
    """How far sums of numbers up to `largest` may be off: 100 roundings of the wide dtype they are computed in.

    A narrow dtype rounds twice more, by half a unit in the last place: the weights before they meet the values, and the
    result.
    """
    wide = torch.promote_types(dtype, torch.float32)
    narrow = torch.finfo(dtype).eps if dtype != wide else 0
    return max(1.0, largest) * (100 * torch.finfo(wide).eps + narrow)


def largest_difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference; two times the same infinity differ by nothing."""
    found, wanted = found.double(), wanted.double()
    assert torch.equal(found.isneginf(), wanted.isneginf()) and found.shape == wanted.shape
    difference = (found - wanted).nan_to_num(0) if wanted.isneginf().any() else found - wanted
    assert difference.isfinite().all(), "free memory got into a result"
    return difference.abs().max().item() if difference.numel() else 0.0


def check_interpreted(kernel) -> None:
    """Fails where triton was imported before the interpreter was asked for."""
    assert type(kernel).__name__ == "InterpretedFunction", "triton was imported before TRITON_INTERPRET was set"


def check_a_compiled_kernel_wants_a_gpu(monkeypatch, module, kernel_name: str, call) -> None:
    """Without a GPU, `call` says so instead of breaking off in the launcher."""
    from triton import JITFunction

    monkeypatch.setattr(module, kernel_name, JITFunction(getattr(module, kernel_name).fn))
    with pytest.raises(MissingRequirement, match="needs a GPU"):
        call()


def check_a_missing_triton_is_named(monkeypatch, path: str) -> None:
    """A module of kernels, imported where triton is not installed, says what to install."""
    monkeypatch.setitem(sys.modules, "triton", None)
    spec = importlib.util.spec_from_file_location("kernels_without_triton", ROOT / path)
    with pytest.raises(MissingRequirement, match=r"minserve\[triton\]"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def compiled_rows(*arguments: str) -> list[dict]:
    """What compile_kernels.py says of each kernel, in a process of its own, which does not interpret."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1"}
    command = [sys.executable, str(ROOT / "tests" / "kernels" / "compile_kernels.py"), *arguments]
    ran = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return [json.loads(line) for line in ran.stdout.splitlines()]
