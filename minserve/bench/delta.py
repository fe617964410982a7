"""`minserve bench delta`: the gated delta rule token by token against in chunks, at a model's shape."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from minserve.clock import RealClock
from minserve.deltanet.gated_delta import gated_delta_chunked, gated_delta_recurrent
from minserve.errors import InvalidValue
from minserve.llm import shipped_checkpoint
from minserve.model.checkpoint import read_config
from minserve.model.config import ModelConfig

NUM_TOKENS = (64, 512, 2048)
CHUNKS = (16, 32, 64, 128)


@dataclass(frozen=True)
class DeltaResult:
    """One form of the rule on one sequence, in one layer.

    Fields:
        num_tokens: of the sequence.
        chunk: tokens per chunk; 1 is the token-by-token form.
        ms: the call, median over rounds.
        ratio: how many times faster than token by token, median over rounds of the ratio within a round.
        difference: the largest difference of an output or a state from the token-by-token form's.
    """

    num_tokens: int
    chunk: int
    ms: float
    ratio: float
    difference: float


@torch.inference_mode()
def bench_delta(
    path: str | Path | None = None,
    num_tokens: Sequence[int] = NUM_TOKENS,
    chunks: Sequence[int] = CHUNKS,
    rounds: int = 15,
) -> list[DeltaResult]:
    """Time both forms in float32 at batch 1, with as many threads as torch has been given.

    Arguments:
        path: a checkpoint folder whose heads are taken; None takes the shipped model's.
        num_tokens, chunks: lengths of the sequence, and chunk sizes, each at least 1.
        rounds: all forms are run once per round, in turn, after one uncounted round.
    Errors: InvalidValue for counts below 1, and for a model without DeltaNet layers.
    """
    for name, values in (("num_tokens", num_tokens), ("chunks", chunks), ("rounds", [rounds])):
        if not values or min(values) < 1:
            raise InvalidValue(name, values, "at least 1 each")
    config, results = read_config(Path(path) if path else shipped_checkpoint()), []
    if not config.num_linear_layers:
        raise InvalidValue("path", path, "a model with DeltaNet layers")
    for length in tqdm(num_tokens, desc="bench", leave=False):
        results += _compared(_sequence(config, length), chunks, rounds)
    return results


def _sequence(config: ModelConfig, num_tokens: int) -> tuple[Tensor, ...]:
    """What one layer is given for a sequence, decay from 0.8 to 0.99 and beta from 0.2 to 0.8, and a state."""
    generator = torch.Generator().manual_seed(num_tokens)
    key_heads, heads = config.linear_num_key_heads, config.linear_num_value_heads
    key_dim, value_dim = config.linear_key_head_dim, config.linear_value_head_dim

    def drawn(draw: Callable, *shape: int) -> Tensor:
        return draw(1, *shape, generator=generator)

    q, k = (torch.nn.functional.normalize(drawn(torch.randn, num_tokens, key_heads, key_dim), dim=-1) for _ in range(2))
    v, state = drawn(torch.randn, num_tokens, heads, value_dim), drawn(torch.randn, heads, key_dim, value_dim)
    g, beta = (drawn(torch.rand, num_tokens, heads) for _ in range(2))
    return q * key_dim**-0.5, k, v, (0.8 + 0.19 * g).log(), 0.2 + 0.6 * beta, state


def _compared(sequence: tuple[Tensor, ...], chunks: Sequence[int], rounds: int) -> list[DeltaResult]:
    """Time the forms on one sequence, in turn."""
    forms = {1: partial(gated_delta_recurrent, *sequence)}
    forms |= {chunk: partial(gated_delta_chunked, *sequence, chunk) for chunk in chunks if chunk > 1}
    found, clock = {chunk: form() for chunk, form in forms.items()}, RealClock()
    times_ms = {chunk: [] for chunk in forms}
    for _ in range(rounds):
        for chunk, form in forms.items():
            start_s = clock.now()
            form()
            times_ms[chunk].append(1e3 * (clock.now() - start_s))
    results = []
    for chunk, measured in times_ms.items():
        ratio = statistics.median(peer / ms for peer, ms in zip(times_ms[1], measured, strict=True))
        difference = max((x - y).abs().max().item() for x, y in zip(found[chunk], found[1], strict=True))
        results.append(DeltaResult(sequence[2].shape[1], chunk, statistics.median(measured), ratio, difference))
    return results


def table(results: Sequence[DeltaResult]) -> str:
    """The results as lines of text."""
    lines = [
        "the delta rule of one layer, batch 1, float32, median",
        f"{'tokens':>6} {'chunk':>13} {'ms':>8} {'us/token':>9} {'speed':>7} {'difference':>11}",
    ]
    for r in results:
        name = "none" if r.chunk == 1 else str(r.chunk)
        lines.append(
            f"{r.num_tokens:6,} {name:>13} {r.ms:8.2f} {1e3 * r.ms / r.num_tokens:9.1f} "
            f"{r.ratio:5.1f} x {r.difference:11.1e}"
        )
    lines.append("speed: over token by token, of the same round; difference: the largest from its outputs and state")
    return "\n".join(lines)


def to_json(results: Sequence[DeltaResult]) -> str:
    """The results as JSON."""
    return json.dumps([asdict(r) for r in results])
