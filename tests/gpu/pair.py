"""One call of a kernel and of its reference, and what the makers of such calls share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

INDEX_BYTES = 8  # the engine's tables hold 64-bit numbers


@dataclass(frozen=True)
class Pair:
    """One call of a kernel and of its reference.

    Fields: `tensors` makes the arguments for a dtype and a device; `num_bytes` counts for a dtype what must move;
    `flops` of the matrix products; `reference` the function; `differences` takes results, wanted ones and arguments to
    (error, bound) pairs; `options` are the kernel's alone, for timing; `given` what both get beside their tensors.
    """

    kernel: str
    note: str
    tensors: Callable[[torch.dtype, torch.device], tuple[torch.Tensor, ...]]
    num_bytes: Callable[[torch.dtype], int]
    reference: Callable
    differences: Callable[..., list[tuple[float, float]]]
    flops: int = 0
    options: Callable[[tuple], dict] = field(default=lambda args: {})
    given: dict = field(default_factory=dict)


def randn(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int) -> torch.Tensor:
    """Random numbers, made where they are wanted."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device).to(dtype)


def indices(values, device: torch.device) -> torch.Tensor:
    """A table of whole numbers."""
    return torch.tensor(list(values), dtype=torch.int64, device=device)


def copied_differences(found, wanted, args) -> list[tuple[float, float]]:
    """A copy is right or it is not."""
    same = all(torch.equal(x, y.to(x.dtype)) for x, y in zip(found, wanted, strict=True))
    return [(0.0 if same else float("inf"), 0.0)]
