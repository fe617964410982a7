"""`minserve bench decode`: one request alone, how fast its tokens come."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

from minserve.bench.contenders import contenders, run_rounds
from minserve.engine_config import EngineConfig
from minserve.errors import InvalidValue
from minserve.llm import shipped_checkpoint
from minserve.metrics import metrics_of
from minserve.model.tokenizer import load_tokenizer
from minserve.request import Request, SamplingParams


@dataclass(frozen=True)
class DecodeResult:
    """One contender's decode at batch 1: tokens per second, prefill left out (median over rounds), and its tokens."""

    name: str
    tokens_per_s: float
    ratio: float
    token_ids: tuple[int, ...]


def bench_decode(
    path: str | Path | None = None,
    prompt: str = "def area(",
    num_tokens: int = 128,
    rounds: int = 5,
    against: str | None = None,
) -> list[DecodeResult]:
    """Decode greedily at batch 1 in float32: the plain loop, the engine and, if asked, transformers.

    Arguments:
        path: a checkpoint folder; None takes the shipped model.
        prompt: the text to go on from.
        num_tokens: output tokens, at least 2; the time counts from the first token to the last.
        rounds: each contender runs once per round, in turn, after one uncounted round.
        against: None or "transformers".
    Returns one result per contender; `ratio` is its speed over the peer's within a round: over that of `against`, or
    over the plain loop's.
    """
    if num_tokens < 2:
        raise InvalidValue("num_tokens", num_tokens, "at least 2")
    folder = Path(path) if path else shipped_checkpoint()
    serves = contenders(folder, EngineConfig(), batch_size=1, against=against)
    del serves["static"]  # a static batch of one is the plain loop
    ids = load_tokenizer(folder).encode(prompt)
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=0)
    speeds, tokens = {name: [] for name in serves}, {}
    for name, (request,), log in run_rounds(serves, lambda: [Request(0, ids, params)], rounds):
        speeds[name].append(1 / metrics_of(log, request.id).tpot)
        tokens[name] = tuple(request.output_ids)
    peer = speeds[against or "naive"]
    return [
        DecodeResult(
            name,
            statistics.median(values),
            statistics.median(a / b for a, b in zip(values, peer, strict=True)),
            tokens[name],
        )
        for name, values in speeds.items()
    ]


def table(results: list[DecodeResult], peer: str = "naive") -> str:
    """The results as lines of text; `peer` is whose speed the ratios are over."""
    lines = [f"{'decode, batch 1':16} {'tokens/s':>9} {'ms/token':>9}  against {peer}"]
    for r in results:
        lines.append(f"{r.name:16} {r.tokens_per_s:9.0f} {1e3 / r.tokens_per_s:9.2f}  {r.ratio:.2f} x")
    if len({r.token_ids for r in results}) > 1:
        lines.append("the contenders chose different tokens")
    return "\n".join(lines)


def to_json(results: list[DecodeResult]) -> str:
    """The results as JSON."""
    return json.dumps([asdict(r) for r in results])
