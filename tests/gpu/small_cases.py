"""The case tables of the kernels' own tests, run on a device: poison and guards travel with the tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import conv_cases
import delta_cases
import paged_cases
import ragged_cases
import shared_cases
import test_tail_copy
import torch
import verify_cases
import write_cases
from kernel_checks import bound

from minserve.batching import ragged_attention_triton as batching
from minserve.deltanet import conv_tail_triton as convolution
from minserve.deltanet import gated_delta_triton as delta_rule
from minserve.deltanet import tail_copy_triton as deltanet
from minserve.paging import paged_attention_triton as paging
from minserve.radix import shared_prefix_attention_triton as radix
from minserve.speculation import verify_triton as speculation


def attention_bounds(dtype: torch.dtype) -> tuple[float, float]:
    """What the kernels' own tests allow the attention, and its log-sum-exp."""
    return bound(dtype, 5), bound(torch.promote_types(dtype, torch.float32), 10)


def delta_bounds(dtype: torch.dtype) -> tuple[float, float]:
    """What the kernels' own tests allow the delta rule, and the states, which are wide."""
    return bound(dtype, 5), bound(torch.promote_types(dtype, torch.float32), 5)


def convolution_bounds(dtype: torch.dtype) -> tuple[float, float]:
    """What the kernel's own tests allow the convolution; its tails are copies."""
    return bound(dtype, 10), 0.0


def copy_bounds(dtype: torch.dtype) -> tuple[float, ...]:
    """A copy has no error, however many tensors it writes."""
    return (0.0, 0.0)


shared_prefix_attention = partial(radix.shared_prefix_attention, paged_attention=paging.paged_attention)

TABLES = (  # the name of a kernel, its wrapper, its cases, and how far its results may be off
    ("tail_copy", deltanet.tail_copy, test_tail_copy, copy_bounds),
    ("conv_tail_ragged", convolution.conv_tail_ragged, conv_cases, convolution_bounds),
    ("gated_delta_ragged", delta_rule.gated_delta_ragged, delta_cases, delta_bounds),
    ("ragged_attention", batching.ragged_attention, ragged_cases, attention_bounds),
    ("paged_attention", paging.paged_attention, paged_cases, attention_bounds),
    ("shared_prefix_attention", shared_prefix_attention, shared_cases, attention_bounds),
    ("write_pages", paging.write_pages, write_cases, copy_bounds),
    ("verify", speculation.verify, verify_cases, copy_bounds),
)


class Tried(NamedTuple):
    """A case that was run: of which kernel, in which dtype, and the (error, bound) that is worst beside its bound."""

    kernel: str
    note: str
    dtype: torch.dtype
    worst: tuple[float, float]


def share_of_bound(pair: tuple[float, float]) -> float:
    """How much of its bound an error uses up; more than 1 is too much, and so is what is no number."""
    error, limit = pair
    if math.isnan(error):
        return math.inf
    return error / limit if limit else (math.inf if error else 0.0)


def on_device(kernel: Callable, device: torch.device) -> Callable:
    """The kernel, run on copies of its arguments on a device; what it wrote there is brought back.

    Each tensor travels with all the memory that it is a view of, so that poison and guards lie around it there too.
    """

    def run(*args, **options):
        there: dict[int, torch.Tensor] = {}
        memories = []

        def moved(x):
            if not isinstance(x, torch.Tensor):
                return x
            memory = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
            copy = memory.to(device=device, copy=True)
            memories.append((memory, copy))
            there[id(x)] = copy.as_strided(x.shape, x.stride(), x.storage_offset())
            return there[id(x)]

        found = kernel(*map(moved, args), **{name: moved(x) for name, x in options.items()})
        for memory, copy in memories:
            memory.copy_(copy)
        given = {id(copy): x for x in (*args, *options.values()) if (copy := there.get(id(x))) is not None}

        def back(x: torch.Tensor) -> torch.Tensor:
            return given.get(id(x), x.cpu())

        return found if found is None else back(found) if isinstance(found, torch.Tensor) else tuple(map(back, found))

    return run


def tried_cases(device: torch.device, dtypes: tuple[torch.dtype, ...], num_cases: int | None = None) -> Iterator[Tried]:
    """Run the tables' cases, one after the other, as long as the caller wants more.

    The dtypes take turns, and so do the tables: whoever stops early has seen some of everything.

    Arguments:
        num_cases: of each table, at most; None for all.
    """
    longest = max(len(module.CASES) for _, _, module, _ in TABLES)
    for turn in range(len(dtypes)):
        for number in range(longest if num_cases is None else num_cases):
            for name, kernel, module, bounds in TABLES:
                if number < len(module.CASES):
                    case, dtype = module.CASES[number], dtypes[(number + turn) % len(dtypes)]
                    errors = module.errors(on_device(kernel, device), case, dtype)
                    found = zip(errors, bounds(dtype), strict=False)
                    yield Tried(name, case.note, dtype, max(found, key=share_of_bound))
