"""`minserve bench`: speed as a ratio against a named peer, both measured in turn in one run.

A single number of tokens per second says more about the machine and the minute than about the code. So each round runs
every contender once, and what is reported is the median over rounds of the ratio within a round.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from minserve.clock import RealClock
from minserve.errors import InvalidValue, MissingRequirement
from minserve.llm import LLM, SamplingParams, shipped_checkpoint
from minserve.model.tokenizer import load_tokenizer

CONTENDERS = ("naive", "transformers")


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
    """Decode greedily at batch 1 with the plain loop and, if asked, with transformers on the same weights.

    Arguments:
        path: a checkpoint folder; None takes the shipped model.
        prompt: the text to go on from.
        num_tokens: output tokens, at least 2; the first belongs to prefill and is not timed.
        rounds: each contender runs once per round, in turn, after one uncounted round.
        against: None or "transformers".
    Returns one result per contender; `ratio` is its speed over the peer's (the last contender's), within a round.
    """
    for name, value, least in (("num_tokens", num_tokens, 2), ("rounds", rounds, 1)):
        if value < least:
            raise InvalidValue(name, value, f"at least {least}")
    folder = Path(path) if path else shipped_checkpoint()
    runs = {"naive": _naive(folder, prompt, num_tokens)}
    if against is not None:
        if against not in CONTENDERS[1:]:
            raise InvalidValue("against", against, "one of " + ", ".join(CONTENDERS[1:]))
        runs[against] = _transformers(folder, prompt, num_tokens)
    speeds, tokens = {name: [] for name in runs}, {}
    for counted in tqdm([False] + [True] * rounds, desc="bench"):
        for name, run in runs.items():
            tokens[name], duration_s = run()
            if counted:
                speeds[name].append((num_tokens - 1) / duration_s)
    peer = speeds[list(runs)[-1]]
    return [
        DecodeResult(
            name,
            statistics.median(values),
            statistics.median(a / b for a, b in zip(values, peer, strict=True)),
            tokens[name],
        )
        for name, values in speeds.items()
    ]


def _naive(folder: Path, prompt: str, num_tokens: int) -> Callable[[], tuple[tuple[int, ...], float]]:
    """A run of the plain loop: its tokens, and the seconds from the first token to the last."""
    llm = LLM(folder)

    def run() -> tuple[tuple[int, ...], float]:
        output = llm.generate(prompt, SamplingParams(max_tokens=num_tokens, ignore_eos=True))[0]
        return output.token_ids, output.timings.finished - output.timings.first_token

    return run


def _transformers(folder: Path, prompt: str, num_tokens: int) -> Callable[[], tuple[tuple[int, ...], float]]:
    """A run of transformers' generate on the same weights, its first token's time taken off."""
    try:
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise MissingRequirement("the package transformers", "bench --against transformers",
                                 "pip install 'minserve[notebooks]'") from error  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids, clock = torch.tensor([load_tokenizer(folder).encode(prompt)]), RealClock()

    def generate(count: int) -> tuple[torch.Tensor, float]:
        start_s = clock.now()
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=count,
                                 max_new_tokens=count, pad_token_id=0)  # fmt: skip
        return out[0, ids.shape[1] :], clock.now() - start_s

    def run() -> tuple[tuple[int, ...], float]:
        _, first_s = generate(1)
        out, all_s = generate(num_tokens)
        return tuple(out.tolist()), all_s - first_s

    return run


def table(results: list[DecodeResult]) -> str:
    """The results as lines of text."""
    peer = results[-1].name
    lines = [f"{'decode, batch 1':16} {'tokens/s':>9} {'ms/token':>9}  against {peer}"]
    for r in results:
        lines.append(f"{r.name:16} {r.tokens_per_s:9.0f} {1e3 / r.tokens_per_s:9.2f}  {r.ratio:.2f} x")
    if len({r.token_ids for r in results}) > 1:
        lines.append("the contenders chose different tokens")
    return "\n".join(lines)


def to_json(results: list[DecodeResult]) -> str:
    """The results as JSON."""
    return json.dumps([asdict(r) for r in results])
