"""Traces: both loaders, their errors, the shipped figures, and, where the files are at hand, that they are true."""

import json
from pathlib import Path

import numpy as np
import pytest

from minserve.errors import InvalidValue
from minserve.tuning.load_shape import describe
from minserve.tuning.traces import (
    TraceError,
    load_azure_trace,
    load_mooncake_trace,
    trace_attribution,
    trace_names,
    trace_shape,
    workload_like,
)

FOLDER = Path(__file__).parents[3] / "shared" / "traces"
REAL = {
    "azure_code": (load_azure_trace, "AzureLLMInferenceTrace_code.csv"),
    "azure_conversation": (load_azure_trace, "AzureLLMInferenceTrace_conv.csv"),
    "mooncake_conversation": (load_mooncake_trace, "mooncake_conversation.jsonl"),
    "mooncake_synthetic": (load_mooncake_trace, "mooncake_synthetic.jsonl"),
}


@pytest.fixture
def azure(tmp_path):
    """Writes an Azure trace and returns its path."""

    def write(*rows, header="TIMESTAMP,ContextTokens,GeneratedTokens"):
        path = tmp_path / "trace.csv"
        path.write_text("\n".join((header, *rows)) + "\n")
        return path

    return write


@pytest.fixture
def mooncake(tmp_path):
    """Writes a Mooncake trace and returns its path."""

    def write(*rows):
        path = tmp_path / "trace.jsonl"
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return path

    return write


def test_azure_rows_become_arrivals(azure):
    workload = load_azure_trace(
        azure("2023-11-16 18:17:04.0319600,3180,8", "2023-11-16 18:17:03.9799600,4808,10")
    )
    assert [(a.prompt_tokens, a.output_tokens) for a in workload] == [(4808, 10), (3180, 8)]
    assert workload.arrivals[0].time_s == 0
    assert workload.arrivals[1].time_s == pytest.approx(0.052, abs=1e-5)
    assert workload.block_tokens == 0


def test_mooncake_rows_become_arrivals_that_share_blocks(mooncake):
    row = {"timestamp": 3000, "input_length": 1000, "output_length": 5, "hash_ids": [0, 1]}
    workload = load_mooncake_trace(mooncake(row, {**row, "timestamp": 4500, "hash_ids": [0, 2]}))
    assert [a.time_s for a in workload] == [0, 1.5]
    assert [a.block_ids for a in workload] == [(0, 1), (0, 2)]
    assert (workload.block_tokens, describe(workload).shared_blocks) == (512, 0.25)


def test_azure_errors_say_where(azure, tmp_path):
    good = "2023-11-16 18:17:03.9799600,4808,10"
    for rows, message in (
        ((good, "2023-11-16 18:17:04,many,8"), "line 3.*many"),
        ((good, "yesterday,5,8"), "line 3.*yesterday"),
        ((good, "2023-11-16 18:17:04,5"), "line 3"),
        ((good, "2023-11-16 18:17:04,0,8"), "prompt_tokens is 0"),
        ((), "no requests"),
    ):
        with pytest.raises(TraceError, match=message):
            load_azure_trace(azure(*rows))
    with pytest.raises(TraceError, match="no column ContextTokens"):
        load_azure_trace(azure(good, header="TIMESTAMP,Tokens,GeneratedTokens"))
    with pytest.raises(TraceError, match="No such file"):
        load_azure_trace(tmp_path / "absent.csv")


def test_mooncake_errors_say_where(mooncake):
    good = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}
    for bad, message in (
        ("{not json", "line 2"),
        ("[1, 2]", "line 2"),
        ({k: v for k, v in good.items() if k != "output_length"}, "line 2: no field 'output_length'"),
        ({**good, "input_length": "long"}, "line 2"),
        ({**good, "hash_ids": [0]}, "line 2: 1 hash_ids for 600 tokens"),
    ):
        with pytest.raises(TraceError, match=message):
            load_mooncake_trace(mooncake(good, bad))


@pytest.mark.parametrize("name", trace_names())
def test_shipped_figures_are_whole_and_drawn_loads_have_them(name):
    shape = trace_shape(name)
    assert "https://" in trace_attribution(name)
    assert ("CC-BY 4.0" if "azure" in name else "Apache-2.0") in trace_attribution(name)
    drawn = workload_like(name, 20_000, np.random.default_rng(0), rate=2.0)
    got = describe(drawn)
    assert got.rate == pytest.approx(2.0, rel=0.25)
    assert got.cv == pytest.approx(shape.cv, rel=0.2)
    for percent in (10, 25, 50, 75, 90):
        for lengths, published in ((got.prompt_tokens, shape.prompt_tokens), (got.output_tokens, shape.output_tokens)):
            assert lengths.quantiles[percent] == pytest.approx(published.quantiles[percent], rel=0.1, abs=1)


def test_unknown_trace_lists_the_known_ones():
    with pytest.raises(InvalidValue, match="one of azure_code, azure_conversation"):
        trace_shape("mine")


def test_shipped_figures_are_those_of_the_traces():
    if not FOLDER.is_dir():
        pytest.skip("trace not here")
    for name, (load, file) in REAL.items():
        got, shipped = describe(load(FOLDER / file)), trace_shape(name)
        assert got.num_requests == shipped.num_requests
        assert round(got.duration_s) == shipped.duration_s
        assert round(got.rate, 2) == shipped.rate
        assert (round(got.cv, 2), round(got.dispersion, 1), round(got.peak, 1)) == (
            shipped.cv, shipped.dispersion, shipped.peak,
        )  # fmt: skip
        assert round(got.correlation, 2) == shipped.correlation
        assert got.shared_blocks is None or round(got.shared_blocks, 3) == shipped.shared_blocks
        for lengths, table in ((got.prompt_tokens, shipped.prompt_tokens), (got.output_tokens, shipped.output_tokens)):
            assert {percent: int(value) for percent, value in lengths.quantiles.items()} == dict(table.quantiles)
            assert round(lengths.mean, 1) == table.mean
