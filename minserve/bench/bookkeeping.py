"""`minserve bench engine`: what a step costs without the model.

Queues, pages, states, packing, stops and the log: everything that runs in Python beside the model. It has to be small
against the model's own step, and must not grow with the pool. Prompts have nothing in common: the prefix cache costs
what it costs, and saves nothing.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tqdm import tqdm

from minserve.clock import RealClock
from minserve.engine import Engine
from minserve.engine_config import MOST_STATES, EngineConfig
from minserve.errors import InvalidValue
from minserve.events import EventLog
from minserve.llm import shipped_checkpoint
from minserve.metrics import steps
from minserve.model.checkpoint import read_config
from minserve.model.tokenizer import load_tokenizer
from minserve.request import Request, SamplingParams

# pages in the pool, and prompt tokens of each request: the same load in three pools, then long contexts in the largest
POOLS = ((1_000, 4), (10_000, 4), (100_000, 4), (100_000, 4_096))


@dataclass(frozen=True)
class BookkeepingResult:
    """The book-keeping of a decode step, medians over steps and rounds.

    Fields:
        num_pages, pages_held: in the pool, and of these in use at the end.
        prefix_cache: whether what was computed is kept for others.
        num_running: decode rows of each step.
        context_tokens: of each request at the end.
        step_ms: the whole step.
        before_ms: until the step is written down: planning, pages and states, packing, choosing, writing its slices.
        after_ms: from there on: writing down the tokens, committing, stops and text.
    """

    num_pages: int
    pages_held: int
    prefix_cache: bool
    num_running: int
    context_tokens: int
    step_ms: float
    before_ms: float
    after_ms: float


def bench_bookkeeping(
    path: str | Path | None = None,
    num_requests: int = 256,
    pools: Sequence[tuple[int, int]] = POOLS,
    num_steps: int = 40,
    rounds: int = 3,
) -> list[BookkeepingResult]:
    """Time decode steps of an engine that has no model; every request looks for a stop string in its text.

    Arguments:
        path: a checkpoint folder whose config and tokenizer are taken; None takes the shipped model's.
        num_requests: how many run, all of them in every step.
        pools: (pages in the pool, prompt tokens of each request, at least 2); each is two results, with the prefix
            cache and without.
        num_steps: decode steps timed per round, at least 1.
        rounds: each of them is run once per round, in turn.
    Errors: InvalidValue where not all requests fit into a pool.
    """
    for name, value in (("num_requests", num_requests), ("num_steps", num_steps), ("rounds", rounds)):
        if value < 1:
            raise InvalidValue(name, value, "at least 1")
    folder = Path(path) if path else shipped_checkpoint()
    times_ms, held = {(*pool, is_on): [] for pool in pools for is_on in (True, False)}, {}
    for case in tqdm(list(times_ms) * rounds, desc="bench", leave=False):
        engine = _decoding(folder, num_requests, *case, num_steps)
        times_ms[case] += _timed(engine, num_steps)
        held[case] = engine.sizes.num_pages - engine.cache.num_takeable
    results = []
    for (num_pages, prompt_tokens, is_on), measured in times_ms.items():
        medians = (statistics.median(column) for column in zip(*measured, strict=True))
        counts = (num_pages, held[num_pages, prompt_tokens, is_on], is_on, num_requests, prompt_tokens + num_steps)
        results.append(BookkeepingResult(*counts, *medians))
    return results


def _decoding(
    folder: Path, num_requests: int, num_pages: int, prompt_tokens: int, prefix_cache: bool, num_steps: int
) -> Engine:
    """An engine whose requests all have their prompts computed, and more tokens to come than will be timed."""
    params = SamplingParams(max_tokens=num_steps + 2, ignore_eos=True, stop="\n\n", seed=0)
    config = EngineConfig(
        num_pages=num_pages, num_states=MOST_STATES * num_requests, max_running=num_requests,
        batch_tokens=num_requests * prompt_tokens, prefix_cache=prefix_cache,
    )  # fmt: skip
    engine = Engine(None, read_config(folder), config, EventLog(RealClock()), load_tokenizer(folder).incremental)
    pages_needed = engine.cache.pages_needed
    at_the_end, to_be_let_in = pages_needed(prompt_tokens + params.max_tokens), pages_needed(prompt_tokens + 1) + 1
    needed = num_requests * max(at_the_end, to_be_let_in)
    if needed > num_pages:
        limit = f"at least {needed}, for {num_requests} requests of {prompt_tokens + params.max_tokens} tokens"
        raise InvalidValue("num_pages", num_pages, limit, "pools or num_requests")
    prompts = [(*divmod(number, 256), *[0] * prompt_tokens)[:prompt_tokens] for number in range(num_requests)]
    requests = [Request(number, prompt, params) for number, prompt in enumerate(prompts)]
    for request in requests:
        engine.add(request)
    while not all(request.output_ids for request in requests):
        engine.step()
    return engine


def _timed(engine: Engine, num_steps: int) -> list[tuple[float, float, float]]:
    """Run steps; of each the milliseconds in all, before it was written down, and after. Changes: the engine."""
    clock, whole_s = engine.log.clock, []
    for _ in range(num_steps):
        start_s = clock.now()
        engine.step()
        whole_s.append(clock.now() - start_s)
    before_s = [step.duration_s for step in steps(engine.log)[-num_steps:]]
    return [(1e3 * a, 1e3 * b, 1e3 * (a - b)) for a, b in zip(whole_s, before_s, strict=True)]


def table(results: Sequence[BookkeepingResult]) -> str:
    """The results as lines of text."""
    lines = [
        f"a decode step of {results[0].num_running} requests without the model, median",
        f"{'pages':>9} {'held':>8} {'context':>8} {'prefixes':>9}  {'ms/step':>8} {'before':>8} {'after':>8}",
    ]
    for r in results:
        lines.append(
            f"{r.num_pages:9,} {r.pages_held:8,} {r.context_tokens:8,} {'kept' if r.prefix_cache else '-':>9}  "
            f"{r.step_ms:8.2f} {r.before_ms:8.2f} {r.after_ms:8.2f}"
        )
    lines.append("before: plan, pages, states, packing, slices; after: tokens, commit, stops, text")
    return "\n".join(lines)


def to_json(results: Sequence[BookkeepingResult]) -> str:
    """The results as JSON."""
    return json.dumps([asdict(r) for r in results])
