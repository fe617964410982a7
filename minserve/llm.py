"""`LLM`: load a model, ask it, get text. What most people import."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from importlib.resources import files
from numbers import Integral
from pathlib import Path

import torch

from minserve.clock import RealClock
from minserve.errors import InvalidValue, MissingRequirement
from minserve.events import EventKind, EventLog
from minserve.metrics import metrics_of
from minserve.model.hybrid_lm import HybridLM
from minserve.model.naive import run_alone
from minserve.model.tokenizer import load_tokenizer
from minserve.request import FinishReason, Output, Request, SamplingParams, Status, Timings, Usage, check_prompt
from minserve.sampling import request_seed
from minserve.stopping import StopChecker

DTYPES = ("float32", "float64", "bfloat16", "float16")


def shipped_checkpoint(name: str = "tiny") -> Path:
    """The folder of a model that ships: "tiny" is the hybrid one, "tiny_attention" has attention layers alone."""
    return Path(str(files("minserve"))) / "model" / "weights" / name


@dataclass(frozen=True)
class EngineConfig:
    """How to run the model.

    Fields:
        dtype: "float32", "float64" (the reference mode), "bfloat16" or "float16".
        device: where, in torch's words.
        max_context: tokens of prompt and output together, at most; None takes the model's own limit.
        batch_tokens: tokens per step, at most; a longer prompt is run in slices.
        seed: requests that bring no seed draw theirs from this one.

    >>> EngineConfig(dtype="float8")
    Traceback (most recent call last):
    minserve.errors.InvalidValue: dtype is 'float8'; it must be one of float32, float64, bfloat16, float16
    """

    dtype: str = "float32"
    device: str = "cpu"
    max_context: int | None = None
    batch_tokens: int = 512
    seed: int = 0

    def __post_init__(self):
        if self.dtype not in DTYPES:
            raise InvalidValue("dtype", self.dtype, "one of " + ", ".join(DTYPES))
        for name in ("max_context", "batch_tokens"):
            value = getattr(self, name)
            if not (value is None and name == "max_context") and (not isinstance(value, int) or value < 1):
                raise InvalidValue(name, value, "an int >= 1")
        if not isinstance(self.seed, int) or not 0 <= self.seed < 2**64:
            raise InvalidValue("seed", self.seed, "an int from 0 to 2**64 - 1")


@dataclass(frozen=True)
class Piece:
    """A part of an output that has just become known.

    Fields: `text` and `token_ids` since the last piece; `index` of the output, for n > 1; `output`, the whole of it, on
    the last piece of each output and None before.
    """

    text: str
    token_ids: tuple[int, ...]
    index: int = 0
    output: Output | None = None


class LLM:
    """A model ready to be asked.

    Arguments:
        path: a checkpoint folder; None takes the model that ships.
        config: see EngineConfig.
    Attributes:
        model, tokenizer, config: what was loaded.
        log: every event so far, on `log.clock`; it grows by three events per token, as long as the LLM lives.
    Raises CheckpointError, InvalidValue or MissingRequirement, saying what to change.
    """

    def __init__(self, path: str | Path | None = None, *, config: EngineConfig | None = None):
        self.config = config or EngineConfig()
        folder = shipped_checkpoint() if path is None else Path(path)
        _check_device(self.config.device)
        self.model = HybridLM.from_checkpoint(folder, getattr(torch, self.config.dtype), self.config.device)
        self.tokenizer = load_tokenizer(folder)
        self.log = EventLog(RealClock())
        limit = self.model.config.max_position_embeddings
        self.max_context = self.config.max_context or limit
        if self.max_context > limit:
            raise InvalidValue("max_context", self.max_context, f"at most {limit}, the model's own limit")
        self._num_requests = 0

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Output]:
        """Complete prompts, and return their outputs in order; a prompt with n > 1 gives n outputs in a row.

        Arguments:
            prompts: one or a list; each a text or a list of token ids.
            params: one for all, or one per prompt.
        Raises InvalidValue before anything runs when a prompt or its params cannot be served.
        """
        checked = self._check(_as_prompts(prompts), params)
        requests = [request for ids, wanted in checked for request in self._arrive(ids, wanted)]
        pieces = self._run_all(requests)
        return [piece.output for piece in pieces if piece.output is not None]

    def stream(self, prompt: str | Sequence[int], params: SamplingParams | None = None) -> Iterator[Piece]:
        """Complete one prompt, piece by piece; the joined pieces are the output's text. Errors as `generate`.

        The request arrives when the first piece is asked for. Leaving the iterator early aborts what is left of it.
        """
        ((ids, wanted),) = self._check([prompt], params)
        return self._stream(ids, wanted)

    def _stream(self, prompt_ids: Sequence[int], params: SamplingParams) -> Iterator[Piece]:
        """The pieces of a checked prompt. Changes: the log, from the first piece on."""
        yield from self._run_all(self._arrive(prompt_ids, params))

    def _check(self, prompts: Sequence, params: object) -> list[tuple[Sequence[int], SamplingParams]]:
        """Token ids and params of each prompt, all of them checked before any runs."""
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if not isinstance(params, Sequence) or not all(isinstance(one, SamplingParams) for one in params):
            raise InvalidValue("params", params, "SamplingParams, or a list of them")
        if len(params) != len(prompts):
            raise InvalidValue("params", f"{len(params)} entries", f"one, or one per prompt ({len(prompts)})")
        checked = []
        for prompt, wanted in zip(prompts, params, strict=True):
            ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
            check_prompt(ids, wanted, self.model.config.vocab_size, self.max_context)
            checked.append((ids, wanted))
        return checked

    def _arrive(self, prompt_ids: Sequence[int], params: SamplingParams) -> list[Request]:
        """One request per wanted output, each recorded as arrived. Changes: the log, the count of requests."""
        return [self._request(prompt_ids, params, index) for index in range(params.n)]

    def _run_all(self, requests: list[Request]) -> Iterator[Piece]:
        """Run requests one after the other; those that an early end leaves are aborted. Changes: requests, log."""
        try:
            for request in requests:
                yield from self._run(request)
        finally:
            for request in requests:
                if request.status is not Status.FINISHED:
                    self._finish(request, FinishReason.ABORT)

    def _request(self, prompt_ids: Sequence[int], params: SamplingParams, index: int) -> Request:
        """A request with a number of its own, recorded as arrived. Changes: the log, the count of requests."""
        number = self._num_requests
        self._num_requests += 1
        seed = request_seed(self.config.seed, number) if params.seed is None else None
        self.log.record(EventKind.ARRIVED, number, prompt_tokens=len(prompt_ids))
        return Request(number, prompt_ids, params, seed, index)

    def _run(self, request: Request) -> Iterator[Piece]:
        """Run one request to its end and yield its pieces. Changes: the request, the log."""
        checker = StopChecker(request.params, self.tokenizer.incremental(), self.model.config.eos_token_ids)
        logprobs, error, text = [], None, ""
        self.log.record(EventKind.ADMITTED, request.id, cached_tokens=0)
        try:
            for sampled in run_alone(self.model, request, self.log, self.config.batch_tokens):
                self.log.record(EventKind.TOKENS, request.id, count=1)
                logprobs.append(sampled.logprobs)
                text = checker.push([sampled.token_id]).text
                if checker.finish_reason is not None:
                    break
                yield Piece(text, (sampled.token_id,), request.index)
        except InvalidValue as fault:  # logits that are no numbers: this request ends, others go on
            error, text = str(fault), checker.finish(FinishReason.ERROR)
        finally:
            reason = FinishReason.ERROR if error else checker.finish_reason or FinishReason.ABORT
            self._finish(request, reason)
        last_ids = tuple(request.output_ids[-1:]) if error is None else ()
        yield Piece(text, last_ids, request.index, self._output(request, checker.text, logprobs, error))

    def _finish(self, request: Request, reason: FinishReason) -> None:
        """End a request. Changes: the request, the log."""
        request.finish(reason)
        self.log.record(EventKind.FINISHED, request.id, reason=str(request.finish_reason))

    def _output(self, request: Request, text: str, logprobs: list, error: str | None) -> Output:
        """What the caller gets, its times read from the log."""
        metrics = metrics_of(self.log, request.id)
        timings = Timings(**{field.name: getattr(metrics, field.name) for field in fields(Timings)})
        scores = request.prompt_logprobs
        return Output(
            text=text,
            token_ids=tuple(request.output_ids),
            finish_reason=request.finish_reason,
            logprobs=None if request.params.logprobs is None else tuple(logprobs),
            prompt_logprobs=None if scores is None else tuple(scores),
            usage=Usage(prompt_tokens=len(request.prompt_ids), completion_tokens=len(request.output_ids)),
            timings=timings,
            index=request.index,
            error=error,
        )


def _as_prompts(prompts: object) -> list:
    """One prompt or several, as a list of prompts."""
    prompts = prompts.tolist() if hasattr(prompts, "tolist") else prompts
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise InvalidValue("prompts", prompts, "a text, a list of token ids, or a list of these")
    return [prompts] if prompts and all(isinstance(entry, Integral) for entry in prompts) else list(prompts)


def _check_device(device: str) -> None:
    """Name a device that this machine does not have."""
    try:
        kind, index = torch.device(device).type, torch.device(device).index or 0
    except (RuntimeError, TypeError):
        kind, index = None, 0
    if kind not in ("cpu", "cuda"):
        raise InvalidValue("device", device, "'cpu' or 'cuda'")
    if kind == "cuda" and index >= torch.cuda.device_count():
        raise MissingRequirement("that CUDA device", f"device={device!r}", "use device='cpu'")
