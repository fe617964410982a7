"""`LLM`: load a model, ask it, get text. What most people import."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from importlib.resources import files
from pathlib import Path

import torch

from minserve.clock import RealClock
from minserve.errors import InvalidValue, MissingRequirement
from minserve.events import EventKind, EventLog
from minserve.metrics import metrics_of
from minserve.model.hybrid_lm import HybridLM
from minserve.model.naive import run_alone
from minserve.model.tokenizer import load_tokenizer
from minserve.request import FinishReason, Output, Request, SamplingParams, Timings, Usage, check_prompt
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
        model, tokenizer, config: what was loaded.  log: every event so far, on `log.clock`.
    Raises CheckpointError, InvalidValue or MissingRequirement, saying what to change.
    """

    def __init__(self, path: str | Path | None = None, *, config: EngineConfig | None = None):
        self.config = config or EngineConfig()
        folder = shipped_checkpoint() if path is None else Path(path)
        _check_device(self.config.device)
        self.model = HybridLM.from_checkpoint(folder, getattr(torch, self.config.dtype), self.config.device)
        self.tokenizer = load_tokenizer(folder)
        self.log = EventLog(RealClock())
        self.max_context = min(self.config.max_context or math.inf, self.model.config.max_position_embeddings)
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
        outputs = []
        for requests in self._admit(prompts, params):
            for request in requests:
                outputs += [piece.output for piece in self._run(request) if piece.output is not None]
        return outputs

    def stream(self, prompt: str | Sequence[int], params: SamplingParams | None = None) -> Iterator[Piece]:
        """Complete one prompt, piece by piece; the joined pieces are the output's text. Errors as `generate`."""
        (requests,) = self._admit([prompt], params)
        return (piece for request in requests for piece in self._run(request))

    def _admit(self, prompts: object, params: object) -> list[list[Request]]:
        """Check all prompts first, so that a bad one stops nothing halfway; one request per wanted output."""
        listed = (
            [prompts] if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], int)) else list(prompts)
        )
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(listed)
        if len(params) != len(listed):
            raise InvalidValue("params", f"{len(params)} entries", f"one, or one per prompt ({len(listed)})")
        checked = []
        for prompt, wanted in zip(listed, params, strict=True):
            ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
            check_prompt(ids, wanted, self.model.config.vocab_size, self.max_context)
            checked.append((ids, wanted))
        return [[self._request(ids, wanted, index) for index in range(wanted.n)] for ids, wanted in checked]

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
            request.finish(checker.finish_reason or FinishReason.ABORT)
            self.log.record(EventKind.FINISHED, request.id, reason=str(request.finish_reason))
        last_ids = tuple(request.output_ids[-1:]) if error is None else ()
        yield Piece(text, last_ids, request.index, self._output(request, checker.text, logprobs, error))

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


def _check_device(device: str) -> None:
    """Name a device that this machine does not have."""
    kind = str(device).split(":")[0]
    if kind == "cuda" and not torch.cuda.is_available():
        raise MissingRequirement("a CUDA device", f"device={device!r}", "use device='cpu'")
    if kind == "mps" and not torch.backends.mps.is_available():
        raise MissingRequirement("an MPS device", f"device={device!r}", "use device='cpu'")
    if kind not in ("cpu", "cuda", "mps"):
        raise InvalidValue("device", device, "'cpu', 'cuda' or 'mps'")
