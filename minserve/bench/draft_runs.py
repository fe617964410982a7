"""Drafters as a bench runs them: an engine for each, which serves groups of requests and is timed while it decodes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from minserve.clock import RealClock
from minserve.draft_model import DraftModel
from minserve.engine import Engine
from minserve.engine_config import EngineConfig
from minserve.errors import InvalidValue, MinserveError
from minserve.events import EventLog
from minserve.llm import shipped_checkpoint
from minserve.model.hybrid_lm import HybridLM
from minserve.model.shuffled_head import shuffle_head
from minserve.model.tokenizer import Tokenizer, load_tokenizer
from minserve.paging.page_table import pages_needed
from minserve.request import Request, SamplingParams
from minserve.speculation.drafters import Drafter, NGramDrafter, Scorer

DRAFTERS = ("none", "ngram", "mtp", "model", "shuffled")
ALWAYS = "-always"  # behind a drafter's name: all drafts in each step, whether they pay or not


@dataclass(frozen=True)
class Load:
    """What is served.

    Fields: `batch` requests in each step, at a `temperature`; `prompt_tokens` of each at most, `num_tokens` of output;
    `draft_tokens` of a request in a step at most.
    """

    batch: int
    temperature: float
    prompt_tokens: int
    num_tokens: int
    draft_tokens: int

    @property
    def params(self) -> SamplingParams:
        """What each request asks for: more than is waited for, so that no step drafts less because an end is near."""
        most = self.num_tokens + self.draft_tokens
        return SamplingParams(max_tokens=most, temperature=self.temperature, ignore_eos=True)


class LoadedModels:
    """The models behind some drafters, read once.

    Arguments:
        names: of `DRAFTERS`, each perhaps with `ALWAYS` behind it.
        folder: the checkpoint that serves.
        draft_folder: the small model's; None takes the one that ships.
        dtype: of all models.
    Errors: InvalidValue for an unknown name, or a model without an MTP head where that is to be shuffled.
    """

    def __init__(self, names: Iterable[str], folder: Path, draft_folder: str | Path | None, dtype: str):
        bases = {name.removesuffix(ALWAYS) for name in names}
        for name in sorted(bases - {*DRAFTERS}):
            raise InvalidValue("drafter", name, f"one of {', '.join(DRAFTERS)}, perhaps with {ALWAYS} behind it")
        self._dtype, width = dtype, getattr(torch, dtype)
        self.model, self.tokenizer = HybridLM.from_checkpoint(folder, width), load_tokenizer(folder)
        draft_folder = draft_folder or shipped_checkpoint("tiny_draft")
        self._small = HybridLM.from_checkpoint(draft_folder, width) if "model" in bases else None
        self._shuffled = shuffle_head(self.model, seed=0) if "shuffled" in bases else None

    def new_run(self, name: str, load: Load) -> DraftRun:
        """An engine with this drafter, which has served nothing yet."""
        base, num_rows = name.removesuffix(ALWAYS), load.batch
        drafter = DraftModel(self._small, num_rows, load.draft_tokens) if base == "model" else base
        length = load.prompt_tokens + load.num_tokens + 2 * load.draft_tokens
        config = EngineConfig(
            dtype=self._dtype, draft="mtp" if base == "shuffled" else drafter, draft_tokens=load.draft_tokens,
            adapt_drafts=not name.endswith(ALWAYS), prefix_cache=False, max_running=num_rows, num_states=num_rows,
            batch_tokens=num_rows * length, num_pages=num_rows * (1 + pages_needed(length, EngineConfig.page_size)),
        )  # fmt: skip
        return DraftRun(self._shuffled if base == "shuffled" else self.model, config, self.tokenizer, load)

    def on_text(self, name: str) -> Drafter | Scorer | HybridLM:
        """The same drafter for `minserve.bench.drafts_on_text`; "none" has none."""
        base = name.removesuffix(ALWAYS)
        if base == "model":
            return DraftModel(self._small)
        return NGramDrafter() if base == "ngram" else self._shuffled if base == "shuffled" else self.model


class DraftRun:
    """One drafter's engine, and its times round by round.

    Arguments:
        model, config, tokenizer: the engine's.
        load: what it will serve.
    Attributes:
        engine: its log is of the rounds that count.
        step_s, tokens_per_s: of each of these rounds.
        outputs: of the last one, the token ids of each request.
    """

    def __init__(self, model: HybridLM, config: EngineConfig, tokenizer: Tokenizer, load: Load):
        self._clock, self._load = RealClock(), load
        self.engine = Engine(model, model.config, config, EventLog(self._clock), tokenizer.incremental)
        self.step_s: list[float] = []
        self.tokens_per_s: list[float] = []
        self.outputs: list[list[int]] = []

    def forget(self) -> None:
        """Let no round before this one count; what the engine knows of drafts and prices stays. Changes: log, times."""
        self.step_s, self.tokens_per_s, self.engine.log = [], [], EventLog(self._clock)

    def serve(self, prompts: Sequence[Sequence[int]]) -> None:
        """Serve prompts, `batch` of them at a time, as one round. Changes: the engine, times, outputs.

        Errors: MinserveError where a request cannot go on.
        """
        requests = [Request(number, prompt, self._load.params, seed=number) for number, prompt in enumerate(prompts)]
        seconds, num_steps, num_new = 0.0, 0, 0
        for start in range(0, len(requests), self._load.batch):
            took = self._serve_together(requests[start : start + self._load.batch])
            seconds, num_steps, num_new = seconds + took[0], num_steps + took[1], num_new + took[2]
        self.step_s.append(seconds / num_steps)
        self.tokens_per_s.append(num_new / seconds)
        self.outputs = [request.output_ids[: self._load.num_tokens] for request in requests]

    def _serve_together(self, requests: Sequence[Request]) -> tuple[float, int, int]:
        """Seconds, steps and tokens from when all prompts are read until one request has all its tokens."""
        for request in requests:
            self.engine.add(request)
        while not all(map(_num_output, requests)):
            self._step()
        num_before, num_steps, began_s = sum(map(_num_output, requests)), 0, self._clock.now()
        while max(map(_num_output, requests)) < self._load.num_tokens:
            self._step()
            num_steps += 1
        seconds = self._clock.now() - began_s
        for request in requests:
            self.engine.abort(request.id)
        self.engine.take_ended()
        return seconds, num_steps, sum(map(_num_output, requests)) - num_before

    def _step(self) -> None:
        """Run a step of the engine, and raise what has gone wrong for a request. Changes: the engine."""
        for progress in self.engine.step():
            if progress.error is not None:
                raise MinserveError(f"request {progress.request.id}: {progress.error}")


def _num_output(request: Request) -> int:
    """Tokens of a request's output so far."""
    return request.num_committed - len(request.prompt_ids)
