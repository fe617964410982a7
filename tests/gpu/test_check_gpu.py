"""The GPU check without a GPU: it runs from end to end at tiny sizes, counts bytes rightly, and sees what is wrong."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import check_gpu
import pytest
import real_sizes
import torch
from check_gpu import HEAD, Row, cells, pair_row
from gpu_timing import Timer
from kernel_checks import needs_triton
from served_on_both import Served, gap_where_they_part

SCRIPT = Path(check_gpu.__file__)
CPU = torch.device("cpu")
TINY_PAIRS = list(real_sizes.pairs(real_sizes.TINY))
pytestmark = needs_triton


def test_the_whole_script_at_tiny_sizes(tmp_path):
    command = [sys.executable, SCRIPT, "--tiny", "--out", tmp_path / "found.json"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert all(row["is_good"] for row in found["rows"])
    checks = [row["check"] for row in found["rows"]]
    assert set(checks) == {*(pair.kernel for pair in TINY_PAIRS), "engine", "copy"}
    lines = done.stdout.splitlines()
    assert lines[1].split()[:2] == ["check", "size"] and len(lines) == 2 + len(checks)


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        check_gpu.main([])
    assert ended.value.code == 2 and "no GPU" in capsys.readouterr().err


@pytest.mark.parametrize("error, status", [(1e-5, 0), (1e-3, 1)])
def test_an_error_beyond_its_bound_is_the_exit_status(monkeypatch, capsys, error, status):
    monkeypatch.setattr(sys, "path", list(sys.path))
    rows = [Row("good", "", "float32", 0.0, 0.0), Row("asked", "", "float32", error, 1e-4), Row("good", "", "float32")]
    for name in ("pair_rows", "served_rows", "small_rows"):
        monkeypatch.setattr(check_gpu, name, lambda *args: rows)
    assert check_gpu.main(["--tiny"]) == status
    assert ("BEYOND" in capsys.readouterr().out) == bool(status)


@pytest.mark.parametrize("pair", TINY_PAIRS, ids=lambda pair: f"{pair.kernel}, {pair.note}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_bytes_are_those_of_the_arguments_and_results(pair, dtype):
    """Pages hold NaN where no context lies, so what an attention reads are the numbers that are none."""
    args = pair.tensors(dtype, CPU)
    tables = sum((x >= 0).sum().item() * x.itemsize for x in args if not x.is_floating_point())
    if pair.kernel == "tail_copy":
        read = args[3].numel() * args[2][0].numel() * dtype.itemsize  # as much as is written
        assert pair.num_bytes(dtype) == 2 * read + tables
        return
    if pair.kernel in ("gated_delta_ragged", "conv_tail_ragged"):  # a result for each token, one for each row
        read = sum(x.nbytes for x in args if x.is_floating_point())
        written = (args[2].nbytes + args[5].nbytes) if len(args) > 4 else (args[0].nbytes + args[2].nbytes)
        assert pair.num_bytes(dtype) == read + written + tables
        return
    if pair.kernel == "verify":  # two results for each row, which has one random number
        read = sum((~x.isnan()).sum().item() * x.itemsize for x in args if x.is_floating_point())
        assert pair.num_bytes(dtype) == read + 2 * args[-1].nbytes + tables
        return
    numbers = args[:2] if pair.kernel == "write_pages" else args[:3]
    read = sum((~x.isnan()).sum().item() * x.itemsize for x in numbers)
    written = read if pair.kernel == "write_pages" else args[0].nbytes + args[0][..., 0].numel() * 4
    assert pair.num_bytes(dtype) == read + written + tables


@pytest.mark.parametrize("queries, contexts", [((3,), (3,)), ((2, 1, 0), (5, 4, 7))])
def test_operations_are_counted_key_by_key(queries, contexts):
    seen = sum(c - n + i + 1 for n, c in zip(queries, contexts, strict=True) for i in range(n))
    sizes = real_sizes.Sizes(heads=3, head_dim=5)
    assert real_sizes.attention_flops(queries, contexts, sizes) == seen * 3 * 5 * 2 * 2


@pytest.mark.parametrize("pair", TINY_PAIRS[-1:] + TINY_PAIRS[:1], ids=lambda pair: pair.kernel)
@pytest.mark.parametrize("off", [0.0, 0.1, math.nan])
def test_a_wrong_result_is_beyond_its_bound(pair, off):
    def kernel(*args, out=None):
        found = pair.reference(*args)
        (found if isinstance(found, torch.Tensor) else found[0])[-1, -1, -1] += off
        return found

    assert pair_row(pair, kernel, torch.float32, Timer(CPU, 1, 0)).is_good == (off == 0)


def test_a_pair_that_fails_is_a_row(monkeypatch):
    def broken(*args):
        raise RuntimeError("out of\nluck")

    monkeypatch.setattr(check_gpu, "pair_row", broken)
    rows = list(check_gpu.pair_rows(real_sizes.TINY, (torch.float32,), Timer(CPU, 1, 0)))
    assert len(rows) == len(TINY_PAIRS)
    assert all(row.failed == "RuntimeError: out of luck" and not row.is_good for row in rows)


def test_the_table_reckons_with_the_copy():
    row = Row("kernel", "size", "float32", 1e-5, 1e-4, 0.002, 0.003, 0.5, 10**9, 4 * 10**9)
    shown = dict(zip(HEAD, cells(row, copy_bytes_per_s=2e12), strict=True))
    assert (shown["GPU ms"], shown["MB"], shown["GB/s"], shown["of copy"]) == ("2.000", "1000.0", "500", "25%")
    assert shown["TFLOP/s"] == "2.0" and row.is_good
    assert not Row("kernel", "size", "float32", math.nan, 1e-4).is_good


def test_guards_and_poison_travel_along():
    """A kernel that writes beside its result is found on the device too."""
    from small_cases import on_device, paging, write_cases

    def careless(k, v, k_pages, v_pages, slots):
        paging.write_pages(k, v, k_pages, v_pages, slots)
        k_pages.as_strided((1,), (1,), k_pages.storage_offset() - 1).fill_(0)

    case = write_cases.CASES[0]
    assert write_cases.errors(on_device(paging.write_pages, CPU), case, torch.float32) == (0, 0)
    with pytest.raises(AssertionError, match="outside"):
        write_cases.errors(on_device(careless, CPU), case, torch.float32)


@pytest.mark.parametrize(
    "theirs, gap",
    [((1, 2, 3), math.inf), ((1, 5), 0.25), ((1, 7), math.inf), ((1,), math.inf)],
    ids=["too long", "nearly as likely", "not among the likeliest", "ended early"],
)
def test_how_far_outputs_are_from_a_tie(theirs, gap):
    likeliest = ({1: -0.1}, {2: -0.5, 5: -0.75})
    wanted = SimpleNamespace(token_ids=(1, 2), logprobs=likeliest)
    assert gap_where_they_part(wanted, SimpleNamespace(token_ids=theirs)) == gap
    assert Served(0.0, 0.3, 2, 1, 0, (gap,)).num_wrong == (gap > 0.3)
