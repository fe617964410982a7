"""`minserve bench prefix`: what requests with the same beginning save, with the prefix cache and without.

Few-shot: many requests at once, one long beginning, a short question each. Chat: sessions in step with one another, one
system prompt, and every turn sends all that was said before it, the model's own answers included. Unlike: prompts that
have nothing in common, for which a cache can only cost.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
from tqdm import tqdm

from minserve.cache_hits import best_cached_tokens, cache_hits
from minserve.engine_config import EngineConfig
from minserve.errors import InvalidValue
from minserve.llm import LLM
from minserve.metrics import percentile
from minserve.model.tokenizer import chat_prompt
from minserve.request import Output, SamplingParams
from minserve.tuning.sessions import DEFAULT_SYSTEM
from minserve.tuning.workload import standard_library_text

NUM_SHOTS, SHOT_TOKENS, QUESTION_CHARS = 64, 400, 24
NUM_SESSIONS, NUM_TURNS, USER_CHARS = 8, 6, 60
NUM_UNLIKE, UNLIKE_TOKENS = 16, (32, 2048)  # lengths from the first to the second, evenly by octave
Load = Callable[[LLM, SamplingParams], list[tuple[list[int], Output]]]


@dataclass(frozen=True)
class PrefixResult:
    """A load served one way: medians over the rounds of what differs between them.

    Fields:
        load, way: which load, and how.
        prompt_tokens, cached_tokens, prefill_tokens: as in `minserve.cache_hits.CacheHits`.
        best_tokens: of the prompts, what a cache that forgets nothing and is never early could have given.
        ttft_p50_s, ttft_p99_s: time to first token.
        seconds: until all were done.
        outputs: the token ids, to see that they are the same.
    """

    load: str
    way: str
    prompt_tokens: int
    cached_tokens: int
    prefill_tokens: int
    best_tokens: int
    ttft_p50_s: float
    ttft_p99_s: float
    seconds: float
    outputs: tuple[tuple[int, ...], ...]


def few_shot(llm: LLM, params: SamplingParams) -> list[tuple[list[int], Output]]:
    """Serve many questions after one beginning, all at once; each prompt with its output."""
    text, rng = standard_library_text(), np.random.default_rng(0)
    beginning = llm.tokenizer.encode(text)[:SHOT_TOKENS]
    prompts = [beginning + llm.tokenizer.encode(_piece(text, QUESTION_CHARS, rng)) for _ in range(NUM_SHOTS)]
    return list(zip(prompts, llm.generate(prompts, params), strict=True))


def chat(llm: LLM, params: SamplingParams) -> list[tuple[list[int], Output]]:
    """Serve sessions turn by turn, all sessions' turns at once; each prompt with its output."""
    text, rng = standard_library_text(), np.random.default_rng(1)
    sessions = [[{"role": "system", "content": DEFAULT_SYSTEM}] for _ in range(NUM_SESSIONS)]
    served: list[tuple[list[int], Output]] = []
    for _ in range(NUM_TURNS):
        for messages in sessions:
            messages.append({"role": "user", "content": _piece(text, USER_CHARS, rng)})
        prompts = [chat_prompt(messages, llm.tokenizer) for messages in sessions]
        outputs = llm.generate(prompts, params)
        for messages, output in zip(sessions, outputs, strict=True):
            messages.append({"role": "assistant", "content": output.text})
        served += zip(prompts, outputs, strict=True)
    return served


def unlike(llm: LLM, params: SamplingParams) -> list[tuple[list[int], Output]]:
    """Serve prompts that have nothing in common, one after the other; each prompt with its output."""
    lengths = np.geomspace(*UNLIKE_TOKENS, NUM_UNLIKE).astype(int)
    prompts = [np.random.default_rng(i).integers(32, 127, size).tolist() for i, size in enumerate(lengths)]
    return [(prompt, llm.generate([prompt], params)[0]) for prompt in prompts]


LOADS: MappingProxyType[str, Load] = MappingProxyType({"few-shot": few_shot, "chat": chat, "unlike": unlike})
WAYS = MappingProxyType({"without": False, "with": True})  # EngineConfig.prefix_cache


def bench_prefix(path: str | Path | None = None, rounds: int = 3, max_tokens: int = 32) -> list[PrefixResult]:
    """Serve the loads with the prefix cache and without, in turn.

    Arguments:
        path: a checkpoint folder; None takes the shipped model's.
        rounds: each load is served so often each way.
        max_tokens: length of every output.
    Errors: InvalidValue for no round.
    """
    if rounds < 1:
        raise InvalidValue("rounds", rounds, "at least 1")
    runs = [(load, way) for _ in range(rounds) for load in LOADS for way in WAYS]
    measured: dict[tuple[str, str], list[PrefixResult]] = {}
    LLM(path).generate("warm up", SamplingParams(max_tokens=4))
    for load, way in tqdm(runs, desc="bench", leave=False):
        measured.setdefault((load, way), []).append(_serve(path, load, way, max_tokens))
    return [_median(results) for results in measured.values()]


def _serve(path: str | Path | None, load: str, way: str, max_tokens: int) -> PrefixResult:
    """Serve a load once, by an engine that has served nothing yet."""
    llm = LLM(path, config=EngineConfig(prefix_cache=WAYS[way]))
    params = SamplingParams(max_tokens=max_tokens, temperature=0.8, top_p=0.9, seed=0, ignore_eos=True)
    start_s = llm.log.clock.now()
    served = LOADS[load](llm, params)
    seconds, hits = llm.log.clock.now() - start_s, cache_hits(llm.log)
    prompts = [prompt for prompt, _ in served]
    best = best_cached_tokens(prompts, [[*prompt, *output.token_ids[:-1]] for prompt, output in served])
    ttft = [output.timings.ttft for _, output in served]
    outputs = tuple(output.token_ids for _, output in served)
    return PrefixResult(load, way, hits.prompt_tokens, hits.cached_tokens, hits.prefill_tokens, sum(best),
                        percentile(ttft, 50), percentile(ttft, 99), seconds, outputs)  # fmt: skip


def _median(results: Sequence[PrefixResult]) -> PrefixResult:
    """One result for several rounds: the counts are the same, the times are medians."""
    names = ("ttft_p50_s", "ttft_p99_s", "seconds")
    return replace(results[0], **{name: statistics.median(getattr(r, name) for r in results) for name in names})


def _piece(text: str, num_chars: int, rng: np.random.Generator) -> str:
    """A piece of text from a random place."""
    start = int(rng.integers(len(text) - num_chars))
    return text[start : start + num_chars]


def table(results: Sequence[PrefixResult]) -> str:
    """The results as lines of text."""
    lines = [
        f"{'load':9} {'cache':8} {'prompt':>8} {'computed':>9} {'hit rate':>9} {'best':>6} "
        f"{'TTFT p50':>9} {'p99':>8} {'all done':>9}"
    ]
    for r in results:
        lines.append(
            f"{r.load:9} {r.way:8} {r.prompt_tokens:8,} {r.prefill_tokens:9,} {r.cached_tokens / r.prompt_tokens:9.1%} "
            f"{r.best_tokens / r.prompt_tokens:6.1%} {r.ttft_p50_s:7.2f} s {r.ttft_p99_s:6.2f} s {r.seconds:7.2f} s"
        )
    for load in LOADS:
        if len({r.outputs for r in results if r.load == load}) > 1:
            lines.append(f"{load}: not all outputs are the same with the cache and without")
    lines.append("tokens of all prompts; best: of a cache that forgets nothing; medians over rounds")
    return "\n".join(lines)


def to_json(results: Sequence[PrefixResult]) -> str:
    """The results as JSON."""
    return json.dumps([asdict(r) for r in results])
