"""The kernels' table: how far each is from a loop, case by case, and what it takes on each GPU it compiles for.

    python tests/kernels/table.py [KERNEL ...]      prints it as Markdown; all kernels unless some are named

Errors are those of Triton's interpreter; each is the largest of all results of a case.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from itertools import chain
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"
os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"
TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [
    str(TESTS.parent),
    *(str(TESTS / folder) for folder in ("kernels", "deltanet", "batching", "paging", "radix", "speculation")),
]

import conv_cases  # noqa: E402
import delta_cases  # noqa: E402
import paged_cases  # noqa: E402
import ragged_cases  # noqa: E402
import shared_cases  # noqa: E402
import test_tail_copy as tail_cases  # noqa: E402
import verify_cases  # noqa: E402
import write_cases  # noqa: E402
from kernel_checks import DTYPES, compiled_rows  # noqa: E402

from minserve.batching import ragged_attention_triton as batching  # noqa: E402
from minserve.deltanet import conv_tail_triton as convolution  # noqa: E402
from minserve.deltanet import gated_delta_triton as delta_rule  # noqa: E402
from minserve.deltanet import tail_copy_triton as deltanet  # noqa: E402
from minserve.paging import paged_attention_triton as paging  # noqa: E402
from minserve.radix import shared_prefix_attention_triton as radix  # noqa: E402
from minserve.speculation import verify_triton as speculation  # noqa: E402

MEASURED = {  # the wrapper, its cases, and the kernels that it launches
    "tail_copy": (deltanet.tail_copy, tail_cases, ["tail_copy_kernel"]),
    "conv_tail_ragged": (convolution.conv_tail_ragged, conv_cases, ["conv_tail_kernel"]),
    "gated_delta_ragged": (
        delta_rule.gated_delta_ragged,
        delta_cases,
        ["delta_tokens_kernel", "within_chunks_kernel", "across_chunks_kernel"],
    ),
    "ragged_attention": (batching.ragged_attention, ragged_cases, ["ragged_attention_kernel"]),
    "paged_attention": (paging.paged_attention, paged_cases, ["paged_attention_kernel", "merge_parts_kernel"]),
    "shared_prefix_attention": (
        partial(radix.shared_prefix_attention, paged_attention=paging.paged_attention),
        shared_cases,
        ["prefix_attention_kernel", "merge_prefix_kernel"],
    ),
    "write_pages": (paging.write_pages, write_cases, ["write_pages_kernel"]),
    "verify": (speculation.verify, verify_cases, ["verify_kernel"]),
}
HEAD_DIMS = ("32", "80", "128", "256")


def print_table(head: list[str], rows) -> None:
    """A Markdown table, printed row by row as it comes."""
    for cells in chain([head, ["---"] * len(head)], rows):
        print("|", " | ".join(str(cell) for cell in cells), "|", flush=True)
    print()


def error_rows(name: str):
    """The largest error of each case, in each dtype."""
    kernel, module, _ = MEASURED[name]
    for case in module.CASES:
        yield [case.note, *(f"{max(module.errors(kernel, case, dtype)):.1e}" for dtype in DTYPES)]


def size_rows(kernels: list[str]):
    """What the compiled kernels take."""
    for row in compiled_rows(*kernels, "--head-dims", *HEAD_DIMS):
        sizes = " ".join(f"{name}={size}" for name, size in row["sizes"].items())
        measured = (row.get("registers", "?"), row.get("spilled", "?"), row["shared_bytes"])
        yield [row["kernel"], sizes, row["target"], row["dtype"], *measured]


if __name__ == "__main__":
    names = sys.argv[1:] or list(MEASURED)
    for name in names:
        print(f"## {name}: largest error against a loop in float64, interpreted\n")
        print_table(["case", *(str(dtype).removeprefix("torch.") for dtype in DTYPES)], error_rows(name))
    print("## What a program takes, compiled\n")
    print("Registers are per thread. Spilled: bytes of stack on sm_*, registers on gfx*.\n")
    kernels = [kernel for name in names for kernel in MEASURED[name][2]]
    print_table(["kernel", "sizes", "target", "dtype", "registers", "spilled", "shared bytes"], size_rows(kernels))
