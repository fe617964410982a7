"""Run every kernel pair, and the engine, on a CUDA GPU: how far off, and how fast beside a plain copy.

    python tests/gpu/check_gpu.py --out found.json      in the root of a checkout, on a machine with a GPU
    python tests/gpu/check_gpu.py --tiny                the same script on a CPU, interpreted; its times mean nothing

It prints one table. The exit status is 0; 1 when an error is beyond its bound or something failed; 2 without a GPU.

    error     the largest; of several results, the one that is worst beside its bound
    GPU ms    between two CUDA events, all launches queued before and the cache emptied: median
    call ms   of a wall clock, launching and waiting included; reference: the same for the pair's reference
    MB        what the call must read and write, counted from its arguments; GB/s is that over GPU ms
    of copy   GB/s, as a share of what a copy from memory to memory does in the same run
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

TESTS = Path(__file__).resolve().parents[1]
LIMIT_S = 240.0
RESERVE_S = 10.0  # for the last copies and the table, when small cases run on to the limit


@dataclass
class Row:
    """One line of the table; what was not measured is None."""

    check: str
    size: str
    dtype: str
    error: float | None = None
    bound: float | None = None
    gpu_s: float | None = None
    call_s: float | None = None
    reference_s: float | None = None
    num_bytes: int | None = None
    flops: int | None = None
    failed: str = ""

    @property
    def is_good(self) -> bool:
        """Whether nothing failed and no error is beyond its bound, or is no number."""
        return not self.failed and (self.bound is None or self.error <= self.bound)


HEAD = ("check", "size", "dtype", "error", "bound", "GPU ms", "call ms", "reference", "MB", "GB/s", "of copy",
        "TFLOP/s", "")  # fmt: skip


def cells(row: Row, copy_bytes_per_s: float) -> list[str]:
    """A row as it is printed."""

    def shown(number: float | None, style: str, unit: float = 1) -> str:
        return "-" if number is None else format(number / unit, style)

    rate = row.num_bytes / row.gpu_s if row.gpu_s and row.num_bytes else None
    flops_per_s = row.flops / row.gpu_s if row.gpu_s and row.flops else None
    times = [shown(x, ".3f", 1e-3) for x in (row.gpu_s, row.call_s, row.reference_s)]
    speed = [shown(row.num_bytes, ".1f", 1e6), shown(rate, ".0f", 1e9), shown(rate, ".0%", copy_bytes_per_s)]
    verdict = "" if row.is_good else row.failed or "BEYOND ITS BOUND"
    errors = [shown(row.error, ".1e"), shown(row.bound, ".1e")]
    return [row.check, row.size, row.dtype, *errors, *times, *speed, shown(flops_per_s, ".1f", 1e12), verdict]


def print_table(rows: list[Row], copy_bytes_per_s: float) -> None:
    """All rows, in columns."""
    lines = [list(HEAD), *(cells(row, copy_bytes_per_s) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        text = (
            cell.ljust(width) if i < 3 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        print("  ".join(text).rstrip())


def name_of(dtype: torch.dtype) -> str:
    """A dtype's name without the package's."""
    return str(dtype).removeprefix("torch.")


def pair_row(pair, kernel, dtype: torch.dtype, timer) -> Row:
    """Compare one kernel with its reference, which computes in float32 on the same device; then time both."""
    from small_cases import share_of_bound

    row = Row(pair.kernel, pair.note, name_of(dtype), flops=pair.flops or None)
    args = pair.tensors(dtype, timer.device)
    wide = [x.to(torch.promote_types(x.dtype, torch.float32)) if x.is_floating_point() else x.clone() for x in args]
    mine = [x.clone() for x in args]
    wanted, found = pair.reference(*wide, **pair.given), kernel(*mine, **pair.given)
    if wanted is None:  # it writes to the pools that it is given, its third and fourth argument
        wanted, found = wide[2:4], mine[2:4]
    wanted, found = ((x,) if isinstance(x, torch.Tensor) else x for x in (wanted, found))
    row.error, row.bound = max(pair.differences(found, wanted, args), key=share_of_bound)
    del wide, mine, wanted, found
    call = partial(kernel, *args, **pair.given, **pair.options(args))
    row.num_bytes, row.gpu_s, row.call_s = pair.num_bytes(dtype), timer.gpu_s(call), timer.call_s(call)
    row.reference_s = timer.call_s(lambda: pair.reference(*args, **pair.given), num_repeats=min(3, timer.num_repeats))
    return row


def pair_rows(sizes, dtypes: tuple[torch.dtype, ...], timer):
    """Every pair in every dtype; one that fails is a row too."""
    from real_sizes import pairs
    from small_cases import TABLES

    kernels = {name: kernel for name, kernel, _, _ in TABLES}
    for pair in pairs(sizes):
        for dtype in dtypes:
            try:
                yield pair_row(pair, kernels[pair.kernel], dtype, timer)
            except Exception as error:  # the others are still worth knowing
                yield Row(pair.kernel, pair.note, name_of(dtype), failed=said_of(error))


def said_of(error: Exception) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def served_rows(device: str, narrow: str, options: dict):
    """The engine on the device beside the reference on the CPU, and requests that turn every knob."""
    from served_on_both import every_knob, served_on_both

    row = Row("engine", "", "float32")
    try:
        served = served_on_both(device, **options)
        row.error, row.bound = served.error, served.bound
        row.size = f"{served.num_scored} tokens scored; {served.num_same} of {served.num_outputs} greedy outputs equal"
        if served.gaps:
            row.size += f", the others part at gaps of {', '.join(f'{gap:.1e}' for gap in served.gaps)}"
        if served.num_wrong:
            row.failed = f"{served.num_wrong} outputs part at no tie"
    except Exception as error:
        row.failed = said_of(error)
    yield row
    row = Row("engine", "every knob of sampling, and forks", narrow)
    try:
        row.failed = ", ".join(end for end in every_knob(device, narrow, **options) if end != "length")
    except Exception as error:
        row.failed = said_of(error)
    yield row


def small_rows(device: torch.device, dtypes: tuple[torch.dtype, ...], num_cases: int | None, stop_s: float):
    """The tests' own cases, while there is time: a row for each kernel and dtype, of its worst case."""
    from small_cases import TABLES, share_of_bound, tried_cases

    tried = {(name, dtype): [] for name, *_ in TABLES for dtype in dtypes}
    totals = {name: len(module.CASES[:num_cases]) for name, _, module, _ in TABLES}
    cases, failed = tried_cases(device, dtypes, num_cases), ""
    while not failed and time.perf_counter() < stop_s:
        try:
            case = next(cases)
            tried[case.kernel, case.dtype].append(case)
        except StopIteration:
            break
        except Exception as error:
            failed = said_of(error)
    for (name, dtype), done in tried.items():
        worst = max(done, key=lambda case: share_of_bound(case.worst), default=None)
        said = f"{len(done)} of {totals[name]} small cases" + (f", worst: {worst.note}" if worst else "")
        yield Row(name, said, name_of(dtype), *(worst.worst if worst else ()))
    if failed:
        yield Row("small cases", f"after {sum(map(len, tried.values()))} that ran", "-", failed=failed)


class Run(NamedTuple):
    """What is run: where, in which dtypes, at which sizes; requests; and how many cases of a table, None for all."""

    name: str
    device: torch.device
    dtypes: tuple[torch.dtype, ...]
    sizes: object
    timer: object
    copy_bytes: int
    served: dict
    num_cases: int | None


def run_for(tiny: bool) -> Run:
    """The real thing, or the little that an interpreter can do; it has no bfloat16."""
    from gpu_timing import COPY_BYTES, Timer
    from real_sizes import TINY, Sizes

    device, dtypes = torch.device("cpu" if tiny else "cuda"), (torch.float32, torch.float16)
    if tiny:
        served = {"prompts": ("de", "x", "f"), "max_tokens": 2}
        return Run("Triton's interpreter", device, dtypes, TINY, Timer(device, 1, 0), 2**20, served, 2)
    dtypes += (torch.bfloat16,)
    return Run(torch.cuda.get_device_name(), device, dtypes, Sizes(), Timer(device), COPY_BYTES, {}, None)


def check(run: Run, out: Path | None, began_s: float, stop_s: float) -> bool:
    """Measure, print, write; whether all is within bounds."""
    import triton

    torch.set_float32_matmul_precision("highest")
    rows, copies = [], [run.timer.copy_bytes_per_s(run.copy_bytes)]

    def note(row: Row) -> None:
        """Keep a row, and write all that is known: what comes next may break everything."""
        rows.append(row)
        print(f"{time.perf_counter() - began_s:6.1f} s  {row.check}, {row.size}, {row.dtype}", file=sys.stderr)
        found = {"device": run.name, "torch": torch.__version__, "triton": triton.__version__,
                 "copy_bytes_per_s": copies, "wall_s": time.perf_counter() - began_s,
                 "rows": [asdict(row) | {"is_good": row.is_good} for row in rows]}  # fmt: skip
        if out:
            out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")

    parts = (
        pair_rows(run.sizes, run.dtypes, run.timer),
        served_rows(str(run.device), name_of(run.dtypes[-1]), run.served),
        small_rows(run.device, run.dtypes, run.num_cases, stop_s),
    )
    for part in parts:
        for row in part:
            note(row)
    copies.append(run.timer.copy_bytes_per_s(run.copy_bytes))
    note(Row("copy", f"{copies[0] / 1e9:.0f} GB/s before, {copies[1] / 1e9:.0f} after", "uint8"))
    print(f"{run.name}, torch {torch.__version__}, triton {triton.__version__}")
    print_table(rows, max(copies))
    return all(row.is_good for row in rows)


def main(arguments: list[str] | None = None) -> int:
    """Run as the module says; the exit status."""
    began_s = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, help="where to write what was found, as JSON")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes in Triton's interpreter, on a CPU")
    parser.add_argument("--seconds", type=float, default=LIMIT_S, help="small cases stop in time for this")
    asked = parser.parse_args(arguments)
    if not asked.tiny and not torch.cuda.is_available():
        parser.exit(2, f"no GPU: torch {torch.__version__} finds no CUDA device here; --tiny checks the script alone\n")
    os.environ["TRITON_INTERPRET"] = "1" if asked.tiny else "0"
    os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"
    folders = ("kernels", "paging", "batching", "deltanet", "radix", "speculation")
    sys.path[:0] = [str(TESTS.parent), *(str(TESTS / name) for name in folders)]
    stop_s = began_s + asked.seconds - RESERVE_S
    return 0 if check(run_for(asked.tiny), asked.out, began_s, stop_s) else 1


if __name__ == "__main__":
    sys.exit(main())
