"""`LLM`: load a model, ask it, get text. What most people import."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from numbers import Integral
from pathlib import Path

import torch

from minserve.clock import RealClock
from minserve.engine import Engine, EngineStuck
from minserve.engine_config import EngineConfig
from minserve.errors import InvalidValue, MissingRequirement
from minserve.events import EventKind, EventLog
from minserve.freed_memory import keep_freed_memory
from minserve.metrics import timings_of
from minserve.model.hybrid_lm import HybridLM
from minserve.model.tokenizer import load_tokenizer
from minserve.parts import Parts
from minserve.request import Output, Request, SamplingParams, Usage
from minserve.request_life import Progress
from minserve.sampling import request_seed


def shipped_checkpoint(name: str = "tiny") -> Path:
    """The folder of a model that ships: "tiny", the hybrid one; "tiny_attention", of attention alone; "tiny_draft"."""
    return Path(str(files("minserve"))) / "model" / "weights" / name


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
        parts: what of the engine to replace, see Parts.
    Attributes:
        model, tokenizer, config: what was loaded.
        engine: what serves; `llm.engine.step()` and the rest may be called by hand.
        log: every event so far, on `log.clock`; it grows by two events per token, as long as the LLM lives.
    Raises CheckpointError, InvalidValue or MissingRequirement, saying what to change.
    Changes: on a CPU, how this process's allocator treats freed memory (`minserve.freed_memory`).
    """

    def __init__(
        self, path: str | Path | None = None, *, config: EngineConfig | None = None, parts: Parts | None = None
    ):
        self.config = config or EngineConfig()
        folder = shipped_checkpoint() if path is None else Path(path)
        _check_device(self.config.device)
        if torch.device(self.config.device).type == "cpu":
            keep_freed_memory()
        dtype = getattr(torch, self.config.dtype)
        self.model = HybridLM.from_checkpoint(folder, dtype, self.config.device, self.config.impl)
        self.tokenizer = load_tokenizer(folder)
        self.log = EventLog(RealClock())
        self.engine = Engine(
            self.model, self.model.config, self.config, self.log, self.tokenizer.incremental, parts=parts
        )
        self._num_requests = 0
        self._unread: dict[int, deque[Progress]] = {}

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
        families = [self._family(ids, wanted) for ids, wanted in self._check(_as_prompts(prompts), params)]
        pieces = self._serve([request for family in families for request in family], families)
        outputs = {request.id: piece.output for request, piece in pieces if piece.output is not None}
        return [outputs[request.id] for family in families for request in family]

    def stream(self, prompt: str | Sequence[int], params: SamplingParams | None = None) -> Iterator[Piece]:
        """Complete one prompt, piece by piece; the joined pieces are the output's text. Errors as `generate`.

        The request arrives when the first piece is asked for. Leaving the iterator early aborts what is left of it.
        """
        ((ids, wanted),) = self._check([prompt], params)
        return self._stream(ids, wanted)

    def _stream(self, prompt_ids: Sequence[int], params: SamplingParams) -> Iterator[Piece]:
        """The pieces of a checked prompt. Changes: the engine, from the first piece on."""
        family = self._family(prompt_ids, params)
        for _, piece in self._serve(family, [family]):
            yield piece

    def _check(self, prompts: Sequence, params: object) -> list[tuple[Sequence[int], SamplingParams]]:
        """Token ids and params of each prompt, all of them checked before any runs."""
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if not isinstance(params, Sequence) or not all(isinstance(one, SamplingParams) for one in params):
            raise InvalidValue("params", params, "SamplingParams, or a list of them")
        if len(params) != len(prompts):
            raise InvalidValue("params", f"{len(params)} entries", f"one, or one per prompt ({len(prompts)})")
        checked = []
        for number, (prompt, wanted) in enumerate(zip(prompts, params, strict=True)):
            ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
            try:
                self.engine.check_request(ids, wanted)
            except InvalidValue as error:
                field = f"prompts[{number}]: {error.field}" if len(prompts) > 1 else error.field
                raise type(error)(field, error.value, error.limit, error.knob) from None
            checked.append((ids, wanted))
        return checked

    def _family(self, prompt_ids: Sequence[int], params: SamplingParams) -> list[Request]:
        """One request per wanted output, each with a number of its own. Changes: the count of requests."""
        family = []
        for index in range(params.n):
            number, self._num_requests = self._num_requests, self._num_requests + 1
            seed = request_seed(self.config.seed, number) if params.seed is None else None
            family.append(Request(number, prompt_ids, params, seed, index))
        return family

    def _serve(self, requests: list[Request], families: list[list[Request]]) -> Iterator[tuple[Request, Piece]]:
        """Let families of requests in, and step until they are done; an early end aborts what is left of them.

        Steps serve everybody: what they bring to the requests of other iterators is kept for these.
        Changes: the engine, the requests.
        """
        mine, added = {request.id: _Transcript(request) for request in requests}, []
        self._unread |= {request_id: deque() for request_id in mine}
        try:
            for first, *riders in families:
                self.engine.add(first, riders)
                added += [first, *riders]
            while mine:
                ready = [i for i in mine if self._unread[i]]
                if not ready:
                    self._deliver(self.engine.step())
                    if not (self.engine.has_work or any(self._unread[i] for i in mine)):
                        raise EngineStuck("steps taken by hand brought this request's tokens to somebody else")
                for request_id in ready:
                    progress = self._unread[request_id].popleft()
                    piece = self._piece(mine[request_id], progress)
                    if piece.output is not None:
                        del mine[request_id]
                    yield progress.request, piece
        finally:
            for request in added:
                self.engine.abort(request.id)
            for request in requests:
                del self._unread[request.id]
            self._deliver(self.engine.take_ended())

    def _deliver(self, steps: list[Progress]) -> None:
        """Keep for each reader what a step brought. Changes: what is unread."""
        for progress in steps:
            if progress.request.id in self._unread:
                self._unread[progress.request.id].append(progress)

    def _piece(self, transcript: _Transcript, progress: Progress) -> Piece:
        """A request's progress as its reader gets it. Changes: the transcript."""
        transcript.text.append(progress.text)
        transcript.logprobs += progress.logprobs
        ended = progress.finish_reason is not None
        output = self._output(progress.request, transcript, progress.error) if ended else None
        return Piece(progress.text, progress.token_ids, progress.request.index, output)

    def _output(self, request: Request, transcript: _Transcript, error: str | None) -> Output:
        """What the caller gets, its times read from the log."""
        scores = request.prompt_logprobs
        events = self.log.of(request.id)
        admitted = [event.data for event in events if event.kind is EventKind.ADMITTED]
        cached_tokens = admitted[0]["cached_tokens"] if admitted else 0  # later ones are after a preemption
        drafts = [event.data for event in events if event.kind is EventKind.DRAFTS]
        drafted, accepted = (sum(data[name] for data in drafts) for name in ("drafted", "accepted"))
        return Output(
            text="".join(transcript.text),
            token_ids=tuple(request.output_ids),
            finish_reason=request.finish_reason,
            logprobs=None if request.params.logprobs is None else tuple(transcript.logprobs),
            prompt_logprobs=None if scores is None else tuple(scores),
            usage=Usage(len(request.prompt_ids), cached_tokens, len(request.output_ids), drafted, accepted),
            timings=timings_of(self.log, request.id),
            index=request.index,
            error=error,
        )


@dataclass
class _Transcript:
    """What a request has said so far, in pieces."""

    request: Request
    text: list[str] = field(default_factory=list)
    logprobs: list[dict[int, float] | None] = field(default_factory=list)


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
