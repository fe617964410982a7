"""`minserve bench serve`: many requests that all arrive at once, served by each contender in turn.

    tokens/s    output tokens that somebody asked for, per second from the arrival to the last request's end
    TTFT        from the arrival, which is everybody's, to the request's own first token
    padded      positions computed for nobody, of all positions computed

Prefill and decode are told apart by steps. A step that reads any prompt token is a prefill step, whatever runs beside
it; all others decode. A step lasts until the next one begins, so choosing tokens and book-keeping are in it.

    prefill/s   prompt tokens, per second of prefill steps
    decode/s    output tokens that decode steps bring, per second of these; what comes beside a prompt is not counted
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import torch

from minserve.bench.contenders import contenders, run_rounds
from minserve.engine_config import EngineConfig
from minserve.errors import InvalidValue
from minserve.events import EventKind, EventLog
from minserve.llm import shipped_checkpoint
from minserve.metrics import steps, summary
from minserve.model.checkpoint import read_config
from minserve.model.tokenizer import Tokenizer, load_tokenizer
from minserve.request import Request, SamplingParams, check_prompt
from minserve.tuning.workload import (
    Workload,
    all_at_once,
    make_workload,
    quantile_lengths,
    standard_library_text,
    with_prompts,
)

BATCH_TOKENS = 2048


@dataclass(frozen=True)
class Speeds:
    """The times of one run, see the module; decode_tokens_per_s is None where no step only decodes."""

    tokens_per_s: float
    prefill_tokens_per_s: float
    decode_tokens_per_s: float | None
    ttft_p50_s: float
    ttft_p99_s: float


@dataclass(frozen=True)
class ServingResult:
    """One contender's figures.

    Fields:
        name: whose.
        speeds: medians over rounds.
        ratios: per peer, tokens_per_s over the peer's in the same round; the median.
        num_steps, padded_share: of the last round; they are the same in each.
        num_same: requests whose tokens are those of `naive`. In float32 a batch rounds differently, and two nearly
            equal logits may change places.
    """

    name: str
    speeds: Speeds
    ratios: dict[str, float]
    num_steps: int
    padded_share: float
    num_same: int


@dataclass(frozen=True)
class ServingBench:
    """What was run, what came out, and each contender's log of the last round.

    `prompt_tokens` and `output_tokens` are totals; `batch_size` is a static batch's, `batch_tokens` a step of the
    engine's; `num_threads` are torch's.
    """

    num_requests: int
    prompt_tokens: int
    output_tokens: int
    batch_size: int
    batch_tokens: int
    rounds: int
    dtype: str
    num_threads: int
    results: tuple[ServingResult, ...]
    logs: dict[str, EventLog]


def bench_workload(
    num_requests: int, prompt_tokens: tuple[int, int], output_tokens: tuple[int, int], tokenizer: Tokenizer
) -> Workload:  # fmt: skip
    """Requests at time 0, the same ones every time: slices of the standard library's source.

    Arguments:
        num_requests: how many, at least 1.
        prompt_tokens, output_tokens: shortest and longest; between them lengths are log-uniform, so that there are as
            many from 32 to 64 as from 64 to 128. The two are independent.
        tokenizer: turns source into tokens.
    """
    for name, value in (("prompt_tokens", prompt_tokens), ("output_tokens", output_tokens)):
        if not 1 <= value[0] <= value[1]:
            raise InvalidValue(name, value, "a shortest and a longest length, from 1")
    if num_requests < 1:
        raise InvalidValue("num_requests", num_requests, "at least 1")
    rng = np.random.default_rng(0)
    ranges = (prompt_tokens, output_tokens)
    lengths = [quantile_lengths(num_requests, {0: low, 100: high}, rng) for low, high in ranges]
    workload = make_workload("bench", all_at_once(num_requests), *lengths)
    return with_prompts(workload, standard_library_text(), tokenizer=tokenizer)


def bench_serving(
    path: str | Path | None = None,
    num_requests: int = 64,
    batch_size: int | None = None,
    rounds: int = 3,
    against: str | None = None,
    prompt_tokens: tuple[int, int] = (32, 512),
    output_tokens: tuple[int, int] = (16, 128),
    config: EngineConfig | None = None,
) -> ServingBench:
    """Serve one workload by the plain loop, static batches, the engine and, if asked, transformers.

    Greedy, and every output as long as was asked for, whatever its tokens are.

    Arguments:
        path: a checkpoint folder; None takes the shipped model.
        num_requests, prompt_tokens, output_tokens: see `bench_workload`.
        batch_size: requests of a static batch, ours and the peer's; None puts all into one.
        rounds: each contender runs once per round, in turn, after one uncounted round.
        against: None or "transformers".
        config: the engine's; its dtype is everybody's. None lets a step have BATCH_TOKENS: all requests come at once
            here, as a static batch has them, and nobody is reading yet whom a long step would hold up.
    Errors: InvalidValue or PromptTooLong, MissingRequirement without the peer's package.
    """
    folder, config = Path(path) if path else shipped_checkpoint(), config or EngineConfig(batch_tokens=BATCH_TOKENS)
    workload = bench_workload(num_requests, prompt_tokens, output_tokens, load_tokenizer(folder))
    batch_size = num_requests if batch_size is None else batch_size
    if batch_size < 1:
        raise InvalidValue("batch_size", batch_size, "at least 1")
    model_config = read_config(folder)
    for request in requests_of(workload):
        limit = config.max_context or model_config.max_position_embeddings
        check_prompt(request.prompt_ids, request.params, model_config.vocab_size, limit)
    serves = contenders(folder, config, batch_size, against)
    speeds, tokens, logs = {name: [] for name in serves}, {}, {}
    for name, requests, log in run_rounds(serves, lambda: requests_of(workload), rounds):
        speeds[name].append(speeds_of(log))
        tokens[name], logs[name] = [request.output_ids for request in requests], log
    peers = [name for name in ("naive", against) if name is not None]
    return ServingBench(
        num_requests, sum(a.prompt_tokens for a in workload), sum(a.output_tokens for a in workload), batch_size,
        config.batch_tokens, rounds, config.dtype, torch.get_num_threads(),
        tuple(_result(name, speeds, peers, logs[name], tokens) for name in serves), logs,
    )  # fmt: skip


def requests_of(workload: Workload) -> list[Request]:
    """Fresh requests, one per arrival, greedy and with exactly as many output tokens as it says."""
    return [
        Request(i, arrival.prompt, SamplingParams(max_tokens=arrival.output_tokens, ignore_eos=True, seed=0))
        for i, arrival in enumerate(workload)
    ]


def speeds_of(log: EventLog) -> Speeds:
    """The speeds of a run in which all requests arrived at once, as the module defines them."""
    run, whole = steps(log), summary(log)
    reading = {e.data["step"] for e in log if e.kind is EventKind.SLICE and e.data["phase"] == "prefill"}
    stops_s = [*(step.start_s for step in run[1:]), log.end_s]
    prefill_s = decode_s = 0.0
    for step, stop_s in zip(run, stops_s, strict=True):
        if step.step in reading:
            prefill_s += stop_s - step.start_s
        else:
            decode_s += stop_s - step.start_s
    latest, num_decoded = None, 0
    for event in log:
        if event.kind is EventKind.STEP:
            latest = event.data["step"]
        elif event.kind is EventKind.TOKENS and latest not in reading:
            num_decoded += event.data["count"]
    decode = num_decoded / decode_s if decode_s else None
    return Speeds(whole.tokens_per_s, whole.prompt_tokens / prefill_s, decode, whole.ttft.p50, whole.ttft.p99)


def _result(
    name: str, speeds: dict[str, list[Speeds]], peers: Sequence[str], log: EventLog, tokens: dict[str, list]
) -> ServingResult:  # fmt: skip
    """One contender's medians over the rounds, and its counts."""
    columns = {field.name: [getattr(one, field.name) for one in speeds[name]] for field in fields(Speeds)}
    medians = {key: None if None in column else statistics.median(column) for key, column in columns.items()}
    ratios = {
        peer: statistics.median(
            own.tokens_per_s / other.tokens_per_s for own, other in zip(speeds[name], speeds[peer], strict=True)
        )
        for peer in peers
    }
    whole = summary(log)
    num_same = sum(own == theirs for own, theirs in zip(tokens[name], tokens["naive"], strict=True))
    return ServingResult(name, Speeds(**medians), ratios, whole.num_steps, whole.padded_share, num_same)


def table(bench: ServingBench) -> str:
    """The figures as lines of text."""
    peers = list(bench.results[0].ratios)
    over = "".join(f"  {'/ ' + peer:>14}" for peer in peers)
    lines = [
        f"{bench.num_requests} requests at once, {bench.prompt_tokens:,} prompt tokens, {bench.output_tokens:,} output "
        f"tokens; {bench.dtype}, {bench.num_threads} threads",
        f"static batches of {bench.batch_size}; steps of the engine up to {bench.batch_tokens:,} tokens; "
        f"medians of {bench.rounds} rounds",
        "",
        f"{'':12} {'tokens/s':>8}{over}  {'prefill/s':>9} {'decode/s':>8}  {'TTFT p50':>8} {'p99':>7}  "
        f"{'steps':>5} {'padded':>6}",
    ]
    for r in bench.results:
        ratios = "".join(f"  {r.ratios[peer]:>12.2f} x" for peer in peers)
        s = r.speeds
        decode = "-" if s.decode_tokens_per_s is None else f"{s.decode_tokens_per_s:.0f}"
        lines.append(
            f"{r.name:12} {s.tokens_per_s:8.0f}{ratios}  {s.prefill_tokens_per_s:9.0f} {decode:>8}  "
            f"{s.ttft_p50_s:6.3f} s {s.ttft_p99_s:5.3f} s  {r.num_steps:5} {r.padded_share:6.1%}"
        )
    for r in bench.results:
        if r.num_same < bench.num_requests:
            lines.append(f"{r.name} chose other tokens than naive in {bench.num_requests - r.num_same} requests")
    return "\n".join(lines)


def to_json(bench: ServingBench) -> str:
    """What was run and what came out, without the logs, as JSON."""
    told = {f.name: getattr(bench, f.name) for f in fields(bench) if f.name not in ("results", "logs")}
    return json.dumps({**told, "results": [asdict(result) for result in bench.results]})
