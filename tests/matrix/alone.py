"""What a request gets by itself, through the plain loop: the answer that every other route must give as well."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from minserve.clock import VirtualClock
from minserve.events import EventLog
from minserve.model.hybrid_lm import HybridLM
from minserve.model.naive import run_alone
from minserve.request import Request, SamplingParams
from minserve.sampling import Sampled

MAX_TOKENS = 64
PROMPT_LOGPROBS = 5  # the likeliest tokens reported per prompt token; of output tokens all are
TOLERANCE = 1e-9


@dataclass
class Answer:
    """One output, from whatever route: its tokens, the log-probability of every token at each of them, its end."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, float] | None] | None = None
    finish_reason: str | None = None
    error: str | None = None


class Alone:
    """Answers of one model through the plain loop, each computed once, as far as it was ever asked for."""

    def __init__(self, model: HybridLM):
        self.model = model
        self._known: dict[tuple, tuple[Request, Iterator[Sampled], Answer]] = {}

    def answer(self, prompt_ids: Sequence[int], params: SamplingParams, index: int = 0) -> Answer:
        """What output `index` of a request is, end tokens ignored: as many tokens as it may have."""
        num_tokens, seed = params.max_tokens, (params.seed or 0) + index
        every = replace(params, n=1, seed=seed, max_tokens=MAX_TOKENS, logprobs=self.model.config.vocab_size,
                        prompt_logprobs=PROMPT_LOGPROBS)  # fmt: skip
        key = (tuple(prompt_ids), every)
        if key not in self._known:
            request = Request(0, prompt_ids, every)
            self._known[key] = request, run_alone(self.model, request, EventLog(VirtualClock())), Answer()
        request, tokens, answer = self._known[key]
        while len(answer.token_ids) < num_tokens:
            sampled = next(tokens)
            answer.token_ids.append(sampled.token_id)
            answer.logprobs.append(sampled.logprobs)
        scores = None if params.prompt_logprobs is None else request.prompt_logprobs
        return Answer(answer.token_ids[:num_tokens], answer.logprobs[:num_tokens], scores, "length")


def difference(found: Answer, wanted: Answer, tolerance: float = TOLERANCE) -> str:
    """What is wrong with an answer, in words; nothing when it is the wanted one, or as much of it as an abort left."""
    if found.error is not None or found.finish_reason not in ("abort", wanted.finish_reason):
        return f"it ended with {found.finish_reason!r}, {found.error}"
    for at, (scores, right) in enumerate(zip(found.prompt_logprobs or (), wanted.prompt_logprobs or (), strict=False)):
        if not _distance(scores, right) <= tolerance:
            return f"prompt token {at} is scored {_distance(scores, right):.1e} off"
    for at, (token, right) in enumerate(zip(found.token_ids, wanted.token_ids, strict=False)):
        off = _distance(found.logprobs[at], wanted.logprobs[at])
        if token != right:
            gap = _top_2_gap(wanted.logprobs[at])
            said = "corruption" if not off <= tolerance else "a tie" if gap <= 2 * tolerance else "another draw"
            return (
                f"output token {at} is {token}, alone it is {right}: {said}; "
                f"the top-2 gap alone is {gap:.1e}, the log-probabilities are off by {off:.1e}"
            )
        if not off <= tolerance:
            return f"the log-probabilities of output token {at} are off by {off:.1e}"
    if found.finish_reason != "abort" and _sizes(found) != _sizes(wanted):
        return f"it has {_sizes(found)} output tokens and scored prompt tokens, not {_sizes(wanted)}"
    return ""


def _sizes(answer: Answer) -> tuple[int, int]:
    """How many output tokens there are, and how many scored prompt tokens."""
    return len(answer.token_ids), len(answer.prompt_logprobs or ())


def _top_2_gap(logprobs: dict[int, float]) -> float:
    """How much likelier the likeliest token is than the second."""
    first, second = sorted(logprobs.values(), reverse=True)[:2]
    return first - second


def _distance(found: dict[int, float] | None, wanted: dict[int, float] | None) -> float:
    """The largest difference of two reports; infinite where they are about different tokens."""
    if found is None or wanted is None:
        return 0.0 if found is wanted else torch.inf
    if found.keys() != wanted.keys():
        return torch.inf
    # Not Python's max, which passes over a NaN that does not come first.
    return float(torch.tensor([found[token] - wanted[token] for token in wanted], dtype=torch.float64).abs().max())
