"""The two sides of the race, each run by itself and written down moment by moment.

They run one after the other, since two at once would slow each other down. What is replayed afterwards is what was
recorded, on its own clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from minserve.bench.contenders import serve_in_turn
from minserve.clock import RealClock
from minserve.engine import Engine, Progress
from minserve.engine_config import EngineConfig
from minserve.errors import InvalidValue
from minserve.events import EventLog
from minserve.freed_memory import keep_freed_memory
from minserve.llm import shipped_checkpoint
from minserve.metrics import timings_of
from minserve.model.hybrid_lm import HybridLM
from minserve.model.tokenizer import load_tokenizer
from minserve.paging.page_table import pages_needed
from minserve.request import Output, Request, SamplingParams, Usage, check_prompt

# Seven prompts, each with its share of the longest output: requests end one by one, and others get their pages.
PROMPTS = (
    ("def read_lines(path):\n", 0.5),
    ("class Stack:\n    def __init__(self", 0.9),
    ("import os\nimport sys\n\ndef main(", 0.3),
    ("    for name in sorted(", 0.75),
    ("def test_empty(self):\n        self.assert", 0.4),
    ("try:\n    value = int(", 1.0),
    ('"""Reading and writing ', 0.6),
)
YOURS = 4  # the reader's own prompt is the fifth of the eight: in the loop it waits neither least nor longest

Pages = tuple[int | None, ...]


@dataclass(frozen=True)
class Recording:
    """One side's run.

    Fields:
        name: of the side.
        outputs: what each prompt got.
        said: moments in order: (time, number of the request, text, tokens).
        pages: after each step of the engine, (time, owner of each page or None); empty for the loop.
        start_s: when all requests had arrived; times are on the side's own clock, like those of the outputs.
    """

    name: str
    outputs: tuple[Output, ...]
    said: tuple[tuple[float, int, str, int], ...]
    pages: tuple[tuple[float, Pages], ...]
    start_s: float

    @property
    def duration_s(self) -> float:
        """Seconds until the last request was done."""
        return max(output.timings.finished for output in self.outputs) - self.start_s


@dataclass(frozen=True)
class Race:
    """Both sides of a race, over the same prompts with the same seeds; `page_size` is the engine's, in tokens."""

    prompts: tuple[str, ...]
    loop: Recording
    engine: Recording
    page_size: int

    @property
    def differences(self) -> dict[int, int]:
        """By request whose tokens differ between the sides: the first output token that does."""
        found = {}
        for i, (one, other) in enumerate(zip(self.loop.outputs, self.engine.outputs, strict=True)):
            if one.token_ids != other.token_ids:
                pairs = enumerate(zip(one.token_ids, other.token_ids, strict=False))
                shorter = min(len(one.token_ids), len(other.token_ids))
                found[i] = next((place for place, (a, b) in pairs if a != b), shorter)
        return found


def run_race(
    prompt: str, path: str | Path | None = None, max_tokens: int = 120, seed: int = 0, dtype: str = "float32"
) -> Race:  # fmt: skip
    """Let both sides complete eight prompts, sampled at temperature 0.8 from the same seeds, and record it.

    Arguments:
        prompt: the reader's own; the other seven are always the same.
        path: a checkpoint folder; None takes the shipped model.
        max_tokens: of the reader's output, at least 1; the others want a fixed share of it. Any may end earlier.
        seed: request i draws from seed + i.
        dtype: of the model, see EngineConfig. Float64 promises the same tokens on both sides; in float32 a batch
            rounds differently, which rarely changes one.
    Errors: InvalidValue or PromptTooLong for a prompt that cannot be served, before anything runs.
    Changes: how this process's allocator treats freed memory, for both sides.
    """
    if max_tokens < 1:
        raise InvalidValue("max_tokens", max_tokens, "at least 1")
    prompts, shares = zip(*PROMPTS[:YOURS], (prompt, 1.0), *PROMPTS[YOURS:], strict=True)
    lengths = [max(1, round(share * max_tokens)) for share in shares]
    folder, page_size = Path(path) if path else shipped_checkpoint(), EngineConfig.page_size
    tokenizer = load_tokenizer(folder)
    ids = [tokenizer.encode(text) for text in prompts]
    keep_freed_memory()
    # Just the pages that all of them need, and the one in hand that letting somebody in takes: a map full of life.
    needed = [pages_needed(len(prompt_ids) + n, page_size) for prompt_ids, n in zip(ids, lengths, strict=True)]
    num_pages = sum(needed) + len(prompts)
    # No two of them begin alike; and a page that is kept for others would look free here.
    config = EngineConfig(dtype=dtype, num_pages=num_pages, page_size=page_size, prefix_cache=False)
    model = HybridLM.from_checkpoint(folder, getattr(torch, dtype))
    params = [SamplingParams(n, temperature=0.8, top_p=0.95, seed=seed + i) for i, n in enumerate(lengths)]
    for prompt_ids, wanted in zip(ids, params, strict=True):
        check_prompt(prompt_ids, wanted, model.config.vocab_size, model.config.max_position_embeddings)

    def requests() -> list[Request]:
        return [Request(i, prompt_ids, one) for i, (prompt_ids, one) in enumerate(zip(ids, params, strict=True))]

    for count in (1, len(prompts)):  # one request first, for what a model sets up once and nobody should pay for
        loop = record_loop(model, requests()[:count], tokenizer.incremental)
        engine = record_engine(model, config, requests()[:count], tokenizer.incremental)
    return Race(prompts, loop, engine, page_size)


def record_loop(model: HybridLM, requests: Sequence[Request], new_decoder: Callable) -> Recording:
    """Run requests in the generate() loop. Changes: the requests."""
    log = EventLog(RealClock())
    return _record("generate() in a loop", requests, log, serve_in_turn(model, requests, log, new_decoder), [])


def record_engine(
    model: HybridLM, config: EngineConfig, requests: Sequence[Request], new_decoder: Callable
) -> Recording:  # fmt: skip
    """Run requests in an engine, and look at its pages after each step. Changes: the requests."""
    log, pages = EventLog(RealClock()), []
    engine = Engine(model, model.config, config, log, new_decoder)

    def progress() -> Iterator[Progress]:
        for request in requests:
            engine.add(request)
        while engine.has_work:
            brought = engine.step()
            pages.append((log.clock.now(), page_owners(engine)))
            yield from brought

    return _record("the engine", requests, log, progress(), pages)


def page_owners(engine: Engine) -> Pages:
    """Which request holds each page of an engine's pool, None where nobody does."""
    owners: list[int | None] = [None] * engine.sizes.num_pages
    for request_id, table in engine.cache.tables.items():
        for page in table.pages:
            owners[page] = request_id
    return tuple(owners)


def _record(
    name: str, requests: Sequence[Request], log: EventLog, progress: Iterable[Progress], pages: list
) -> Recording:  # fmt: skip
    """Let a side run, and note what comes when. Changes: whatever the progress changes."""
    said = []
    for one in progress:
        said.append((log.clock.now(), one.request.id, one.text, len(one.token_ids)))
    outputs = []
    for request in requests:
        text = "".join(text for _, request_id, text, _ in said if request_id == request.id)
        timings = timings_of(log, request.id)
        usage = Usage(prompt_tokens=len(request.prompt_ids), completion_tokens=len(request.output_ids))
        outputs.append(Output(text, tuple(request.output_ids), request.finish_reason, usage=usage, timings=timings))
    start_s = max(output.timings.arrived for output in outputs)
    return Recording(name, tuple(outputs), tuple(said), tuple(pages), start_s)
