"""A request: what was asked, where it stands (`Request`), and what comes back (`Output`).

`Request` alone says how far a request is, by two counts:

    num_computed     tokens whose keys, values and state exist
    num_committed    tokens that belong to the request: the prompt and the output so far

While a request decodes, num_computed == num_committed - 1 after each step: the newest token is known, and the next
step runs it. Drafts are guesses, not tokens of the request, and never appear here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from minserve.errors import InvalidValue, PromptTooLong
from minserve.sampling_params import NUM_SEEDS, SamplingParams, as_ids

__all__ = [
    "FinishReason", "Output", "Request", "SamplingParams", "Status", "Timings", "Usage", "check_prompt", "max_computed",
]  # fmt: skip


class FinishReason(StrEnum):
    """Why a request ended: a stop token or string, its token limit, its client, or a fault."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Status(StrEnum):
    """Where a request is in its life; a preempted request waits again."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True)
class Usage:
    """What a request used, in tokens; counted from token ids, never from pieces of text.

    Arguments:
        prompt_tokens: the prompt's; cached_tokens: of these, taken from a cache instead of computed.
        completion_tokens: the output's, a closing stop token included.
        drafted_tokens: proposed by a drafter; accepted_tokens: of these, kept.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(frozen=True)
class Timings:
    """When things happened to a request, in seconds on the engine's clock; None: it never did.

    Arguments:
        arrived, admitted, first_token, finished: moments on the clock.
        ttft: time to first token, first_token - arrived.
        tpot: time per output token after the first; None below two tokens.
    """

    arrived: float | None = None
    admitted: float | None = None
    first_token: float | None = None
    finished: float | None = None
    ttft: float | None = None
    tpot: float | None = None


@dataclass(frozen=True)
class Output:
    """One finished output.

    Arguments:
        text: what the tokens say, cut before a stop string; a stop token adds nothing to it.
        token_ids: every token generated, a closing stop token and those of a stop string included.
        finish_reason: see `FinishReason`; it compares equal to its string.
        logprobs: per output token {token id: logprob}, or None when not asked for.
        prompt_logprobs: per prompt token, None for the first, which nothing predicts; or None when not asked for.
        usage, timings: counts and moments.
        index: which of the request's `n` outputs this is.
        error: what went wrong, when finish_reason is "error".
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[dict[int, float], ...] | None = None
    prompt_logprobs: tuple[dict[int, float] | None, ...] | None = None
    usage: Usage = Usage()
    timings: Timings = Timings()
    index: int = 0
    error: str | None = None

    def explain(self) -> str:
        """A small table of where the time went; print it. Prefill ends with the first token, decode makes the others.

        >>> times = Timings(arrived=0.0, admitted=0.1, first_token=0.2, finished=1.0, ttft=0.2, tpot=0.1)
        >>> print(Output("", (), FinishReason.LENGTH, usage=Usage(7, 4, 9), timings=times).explain())
        phase         time  share  tokens  note
        queued    100.0 ms    10%
        prefill   100.0 ms    10%       3  4 of 7 prompt tokens cached
        decode    800.0 ms    80%       8  100.00 ms each
        total    1000.0 ms   100%          9 tokens out, finish reason: length
        """
        times, usage = self.timings, self.usage
        cached = f"{usage.cached_tokens} of {usage.prompt_tokens} prompt tokens cached"
        pace = "" if times.tpot is None else f"{times.tpot * 1e3:.2f} ms each"
        if usage.drafted_tokens:
            pace += f"; {usage.accepted_tokens} of {usage.drafted_tokens} drafts accepted"
        ended = f"{usage.completion_tokens} tokens out, finish reason: {self.finish_reason}"
        rows = (
            ("queued", times.arrived, times.admitted, "", ""),
            ("prefill", times.admitted, times.first_token, usage.prompt_tokens - usage.cached_tokens, cached),
            ("decode", times.first_token, times.finished, max(0, usage.completion_tokens - 1), pace),
            ("total", times.arrived, times.finished, "", ended),
        )
        total_s = _span_s(times.arrived, times.finished)
        lines = [f"{'phase':7} {'time':>10} {'share':>6}  {'tokens':>6}  note"]
        for phase, start, stop, tokens, note in rows:
            span_s = _span_s(start, stop)
            took = "-" if span_s is None else f"{span_s * 1e3:.1f} ms"
            share = f"{span_s / total_s:.0%}" if span_s is not None and total_s else "-"
            lines.append(f"{phase:7} {took:>10} {share:>6}  {tokens:>6}  {note}".rstrip())
        return "\n".join(lines)


def _span_s(start: float | None, stop: float | None) -> float | None:
    """The seconds from start to stop, where both happened."""
    return None if start is None or stop is None else stop - start


@dataclass(eq=False)
class Request:
    """One output in the making.

    Arguments:
        id: unique in the engine.
        prompt_ids: the prompt, at least one token.
        params: what was asked for.
        seed: every random number of this request depends on it and on the token's position alone. A request for
            `n` outputs becomes n of these: number `index` has the seed params.seed + index.
        index: which of the n outputs this is.
    Attributes:
        tokens: the prompt and the output so far.
        num_computed: how many of them have keys, values and state.
        status, finish_reason: where it stands, and why it ended.
        prompt_logprobs: how likely each prompt token was, as far as it was scored; None when not asked for.

    >>> request = Request("a", (5, 6, 7), SamplingParams(seed=1))
    >>> request.commit(2)  # a first slice of the prompt
    >>> request.commit(3, [8])  # the rest, and the first output token
    >>> request.num_computed, request.num_committed, request.output_ids
    (3, 4, [8])
    """

    id: int | str
    prompt_ids: Sequence[int]
    params: SamplingParams = SamplingParams()
    seed: int | None = None
    index: int = 0
    tokens: list[int] = field(init=False)
    num_computed: int = field(default=0, init=False)
    status: Status = field(default=Status.WAITING, init=False)
    finish_reason: FinishReason | None = field(default=None, init=False)
    prompt_logprobs: list[dict[int, float] | None] | None = field(default=None, init=False)

    def __post_init__(self):
        self.prompt_ids = as_ids("prompt_ids", self.prompt_ids)
        if not self.prompt_ids:
            raise InvalidValue("prompt_ids", [], "at least one token")
        if self.seed is None:
            if self.params.seed is None:
                raise InvalidValue("seed", None, "an int, given or in the params (sampling.request_seed draws one)")
            self.seed = (self.params.seed + self.index) % NUM_SEEDS
        self.tokens = list(self.prompt_ids)

    @property
    def num_committed(self) -> int:
        """Tokens that belong to the request."""
        return len(self.tokens)

    @property
    def max_computed(self) -> int:
        """Tokens that will have been computed in the end, at most."""
        return max_computed(self.prompt_ids, self.params)

    @property
    def priority(self) -> int:
        """Who goes first, where that is the policy: the highest."""
        return self.params.priority

    @property
    def output_ids(self) -> list[int]:
        """The tokens generated so far, as a copy."""
        return self.tokens[len(self.prompt_ids) :]

    def commit(self, num_computed: int, new_ids: Sequence[int] = ()) -> None:
        """Take over the result of a step.

        Arguments:
            num_computed: tokens that now have keys, values and state, of those known after this call.
            new_ids: the new output tokens, already cut at the request's end.
        Errors: InvalidValue when the count goes back or passes the tokens, when tokens follow an unfinished prompt or
            when the newest token is already computed: then the next step would have nothing to run.
        Changes: tokens, num_computed.
        """
        num_committed = len(self.tokens)
        high = num_committed + max(0, len(new_ids) - 1)
        low = num_committed if new_ids else self.num_computed
        if not low <= num_computed <= high:
            raise InvalidValue("num_computed", num_computed, f"from {low} to {high} for request {self.id!r}")
        self.tokens += new_ids
        self.num_computed = num_computed

    def reuse(self, num_tokens: int) -> None:
        """Count tokens as computed that a cache holds, at admission; never all, for the last one's logits are wanted.

        Errors: InvalidValue where something is computed already, or nothing would be left. Changes: num_computed.
        """
        if self.num_computed or not 0 <= num_tokens < len(self.tokens):
            limit = f"from 0 to {len(self.tokens) - 1} for request {self.id!r}, of which nothing is computed yet"
            raise InvalidValue("num_tokens", num_tokens, limit)
        self.num_computed = num_tokens

    def restart(self) -> None:
        """Wait again with nothing computed, for preemption; what was generated stays. Changes: num_computed, status."""
        self.num_computed, self.status = 0, Status.WAITING

    def finish(self, reason: FinishReason) -> None:
        """End here; the first reason stands. Changes: status, finish_reason."""
        self.status, self.finish_reason = Status.FINISHED, self.finish_reason or reason


def max_computed(prompt_ids: Sequence[int], params: SamplingParams) -> int:
    """Tokens that will be computed for a prompt, at most: nothing follows the last one, so it is not run.

    >>> max_computed([5, 6, 7], SamplingParams(max_tokens=2))
    4
    """
    return len(prompt_ids) + max(0, params.max_tokens - 1)


def check_prompt(prompt_ids: Sequence[int], params: SamplingParams, vocab_size: int, max_context: int) -> None:
    """Check a prompt against the model before it is let in.

    Arguments:
        prompt_ids: the prompt's token ids.
        params: what was asked for; checked against the vocabulary as well.
        vocab_size: number of token ids of the model.
        max_context: tokens of prompt and output together, at most.
    Errors: InvalidValue for an empty prompt or an id out of range, PromptTooLong when prompt and output do not fit.

    >>> check_prompt([1, 2, 300], SamplingParams(), vocab_size=264, max_context=8192)
    Traceback (most recent call last):
    minserve.errors.InvalidValue: prompt_ids[2] is 300; it must be an int from 0 to 263
    """
    if not as_ids("prompt_ids", prompt_ids, vocab_size):
        raise InvalidValue("prompt_ids", [], "at least one token")
    params.check_vocab(vocab_size)
    if len(prompt_ids) + params.max_tokens > max_context:
        wanted = f"{len(prompt_ids)} prompt tokens + max_tokens {params.max_tokens}"
        knob = "max_tokens, or EngineConfig.max_context up to the model's own limit"
        raise PromptTooLong("prompt_ids", wanted, f"at most {max_context} tokens together", knob)
