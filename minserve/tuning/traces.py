"""Public traces of real load: loaders for both formats, and the measured shape of four of them.

The traces themselves are not shipped; `trace_attribution` says where they are. What ships is their shape, measured
once, so that `workload_like` can draw loads like them on a machine that has no trace.
"""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path

import numpy as np

from minserve.errors import InvalidValue, MinserveError
from minserve.tuning.load_shape import LengthShape, LoadShape
from minserve.tuning.workload import Arrival, Workload, gamma_times, make_workload, quantile_lengths

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MOONCAKE_FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")
MOONCAKE_BLOCK_TOKENS = 512


class TraceError(MinserveError):
    """A trace that cannot be read: the message names the file, the line and what is wrong with it."""


def load_azure_trace(path: str | Path) -> Workload:
    """A workload from an Azure LLM inference trace: a CSV of TIMESTAMP, ContextTokens, GeneratedTokens.

    Raises:
        TraceError: no such file, a missing column, a cell that is no time or no count.
    """
    rows = []
    with _open(path) as file:
        reader = csv.DictReader(file)
        missing = [name for name in AZURE_COLUMNS if name not in (reader.fieldnames or ())]
        if missing:
            raise TraceError(f"{path}: no column {missing[0]}; an Azure trace has {', '.join(AZURE_COLUMNS)}")
        for line, row in enumerate(reader, start=2):
            try:
                when = datetime.fromisoformat(row["TIMESTAMP"])
                when_s = when.replace(tzinfo=when.tzinfo or UTC).timestamp()  # no daylight saving in the gaps
                rows.append((when_s, int(row["ContextTokens"]), int(row["GeneratedTokens"]), ()))
            except (ValueError, TypeError) as error:
                raise TraceError(f"{path}, line {line}: {error}") from error
    return _workload(path, rows, block_tokens=0)


def load_mooncake_trace(path: str | Path) -> Workload:
    """A workload from a Mooncake trace: JSON lines with timestamp (ms), input_length, output_length, hash_ids.

    The hash ids become the arrivals' `block_ids`, so that prompts share the prefixes they shared in reality.

    Raises:
        TraceError: no such file, a line that is no JSON object, a missing field, too few hash ids for the prompt.
    """
    rows = []
    with _open(path) as file:
        for line, text in enumerate(file, start=1):
            try:
                row = json.loads(text)
                when, prompt, output, blocks = (row[name] for name in MOONCAKE_FIELDS)
                rows.append((when / 1000, int(prompt), int(output), tuple(map(int, blocks))))
            except KeyError as error:
                raise TraceError(f"{path}, line {line}: no field {error}") from error
            except (ValueError, TypeError) as error:
                raise TraceError(f"{path}, line {line}: {error}") from error
            if len(blocks) != -(-prompt // MOONCAKE_BLOCK_TOKENS):
                raise TraceError(f"{path}, line {line}: {len(blocks)} hash_ids for {prompt} tokens in blocks of 512")
    return _workload(path, rows, block_tokens=MOONCAKE_BLOCK_TOKENS)


def trace_names() -> tuple[str, ...]:
    """The traces whose shape is shipped."""
    return tuple(_shapes()["traces"])


def trace_shape(name: str) -> LoadShape:
    """The measured shape of a public trace, as `describe` gives it.

    Raises:
        InvalidValue: no such name; the message lists the known ones.

    >>> trace_shape("azure_code").cv, trace_shape("azure_conversation").cv
    (13.15, 1.09)
    """
    row = _shape_row(name)
    lengths = {}
    for field in ("prompt_tokens", "output_tokens"):
        quantiles = {float(percent): value for percent, value in row[field]["quantiles"].items()}
        lengths[field] = LengthShape(quantiles, row[field]["mean"])
    figures = {field: row[field] for field in LoadShape.__dataclass_fields__ if field not in lengths}
    return LoadShape(**figures, **lengths)


def trace_attribution(name: str) -> str:
    """Whose trace it is, its licence and its address, to be printed beside its figures.

    >>> trace_attribution("azure_code")
    'Azure LLM inference trace 2023 (CC-BY 4.0), https://github.com/Azure/AzurePublicDataset'
    """
    row = _shape_row(name)
    return f"{row['title']} ({row['licence']}), {row['url']}"


def workload_like(name: str, num_requests: int, rng: np.random.Generator, rate: float | None = None) -> Workload:
    """A drawn workload with the shape of a public trace: its rate, its CV, its prompt and output lengths.

    Gaps, prompt and output lengths are drawn independently. So CV and quantiles are the trace's; its dispersion, its
    correlation of lengths and its shared prefixes are not.

    Arguments:
        rate: arrivals per second; the trace's own unless given.

    Raises:
        InvalidValue: no such name; the message lists the known ones.

    >>> len(workload_like("azure_conversation", 100, np.random.default_rng(0)))
    100
    """
    shape = trace_shape(name)
    times = gamma_times(num_requests, shape.rate if rate is None else rate, shape.cv, rng)
    prompts = quantile_lengths(num_requests, shape.prompt_tokens.quantiles, rng)
    outputs = quantile_lengths(num_requests, shape.output_tokens.quantiles, rng)
    drawn = make_workload(f"like {name}", times, prompts, outputs)
    return replace(drawn, source=f"drawn after {trace_attribution(name)}")


def _open(path: str | Path):
    """The file, opened for reading; an absent one is a TraceError."""
    try:
        return open(path, encoding="utf-8", newline="")
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from error


def _workload(path: str | Path, rows: list, block_tokens: int) -> Workload:
    """Rows of (time, prompt, output, blocks) as a workload that starts at 0."""
    if not rows:
        raise TraceError(f"{path}: no requests in it")
    rows.sort(key=lambda row: row[0])
    start_s = rows[0][0]
    try:
        arrivals = tuple(Arrival(when - start_s, n, m, block_ids=blocks) for when, n, m, blocks in rows)
    except InvalidValue as error:
        raise TraceError(f"{path}: {error}") from error
    return Workload(Path(path).stem, arrivals, source=str(Path(path).name), block_tokens=block_tokens)


def _shapes() -> dict:
    """The data file of measured shapes."""
    return json.loads((files("minserve") / "data" / "traces.json").read_text(encoding="utf-8"))


def _shape_row(name: str) -> dict:
    """One trace of the data file."""
    traces = _shapes()["traces"]
    if name not in traces:
        raise InvalidValue("name", name, "one of " + ", ".join(traces))
    return traces[name]
