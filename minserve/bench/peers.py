"""Other libraries as contenders: transformers' generate on the same weights, as the static batch that it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from minserve.clock import Clock, RealClock
from minserve.errors import MissingRequirement
from minserve.events import EventKind, EventLog
from minserve.request import FinishReason, Request, Status


class TokenTimes:
    """A streamer that only looks at the clock: generate hands it the prompts, then every step's tokens."""

    def __init__(self, clock: Clock):
        self.times_s: list[float] = []
        self._clock = clock

    def put(self, value: Tensor) -> None:
        """Note when this came. Changes: times_s."""
        self.times_s.append(self._clock.now())

    def end(self) -> None:
        """Nothing is held back."""


def transformers_batches(
    folder: Path, dtype: torch.dtype, batch_size: int, device: str = "cpu"
) -> Callable[[Sequence[Request]], EventLog]:  # fmt: skip
    """transformers' generate, batch after batch: prompts padded on the left, greedy, until the longest has its tokens.

    End tokens end nothing, as with ignore_eos. Tokens beyond what a request asked for are computed, and count as
    padding. Without its optional kernels, which a CPU cannot run, transformers computes the delta rule and the
    convolution by its own PyTorch reference, and says so.

    Arguments:
        folder: the checkpoint.
        dtype, device: of the weights.
        batch_size: requests of a batch.
    Returns a contender, see `minserve.bench.contenders`; its requests are to be greedy ones.
    Errors: MissingRequirement without the package.
    """
    try:
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise MissingRequirement("the package transformers", "bench --against transformers",
                                 "pip install 'minserve[notebooks]'") from error  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval().to(device)
    model.generation_config.eos_token_id = None

    def serve(requests: Sequence[Request]) -> EventLog:
        log = EventLog(RealClock())
        for request in requests:
            log.record(EventKind.ARRIVED, request.id, time_s=0.0, prompt_tokens=len(request.prompt_ids))
        for start in range(0, len(requests), batch_size):
            batch = requests[start : start + batch_size]
            ids, mask = (x.to(device) for x in pad_left([request.prompt_ids for request in batch]))
            times, longest = TokenTimes(log.clock), max(request.params.max_tokens for request in batch)
            with torch.inference_mode():
                out = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=longest, pad_token_id=0,
                                     streamer=times)  # fmt: skip
            record_batch(log, batch, out[:, ids.shape[1] :].tolist(), times.times_s)
        return log

    return serve


def pad_left(prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Prompts as one rectangle, and which places of it are real.

    >>> pad_left([(5, 6, 7), (8,)])
    (tensor([[5, 6, 7],
            [0, 0, 8]]), tensor([[1, 1, 1],
            [0, 0, 1]]))
    """
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    return ids, torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])


def record_batch(
    log: EventLog, batch: Sequence[Request], outputs: Sequence[Sequence[int]], times_s: Sequence[float]
) -> None:  # fmt: skip
    """Write a batch that has run into the log, in the terms of `run_static`, and give the requests their tokens.

    Arguments:
        log: its requests have arrived.
        batch: the requests.
        outputs: what the batch computed for each, as many tokens for all.
        times_s: when it began, and when each step's tokens were there.
    Changes: the log, the requests.
    """
    width = max(len(request.prompt_ids) for request in batch)
    for request in batch:
        log.record(EventKind.ADMITTED, request.id, time_s=times_s[0], cached_tokens=0)
    for i, (began_s, time_s) in enumerate(zip(times_s[:-1], times_s[1:], strict=True)):
        number, num_useful = len(log), 0
        going_on = [request for request in batch if i < request.params.max_tokens]
        for request in batch:
            length = len(request.prompt_ids)
            start, stop = (0, length) if i == 0 else (length + i - 1, length + i)
            phase = "prefill" if i == 0 else "decode" if request in going_on else "padded"
            num_useful += stop - start if request in going_on else 0
            log.record(EventKind.SLICE, request.id, time_s, start=start, stop=stop, phase=phase, step=number)
        num_padded = len(batch) * (width if i == 0 else 1) - num_useful
        log.record(EventKind.STEP, time_s=time_s, step=number, start_s=began_s, duration_s=time_s - began_s,
                   num_rows=len(batch), num_tokens=num_useful, num_padded=num_padded)  # fmt: skip
        for request in going_on:
            log.record(EventKind.TOKENS, request.id, time_s, count=1)
    for request, ids in zip(batch, outputs, strict=True):
        wanted = request.params.max_tokens
        request.status = Status.RUNNING
        request.commit(len(request.prompt_ids) + wanted - 1, ids[:wanted])
        request.finish(FinishReason.LENGTH)
        log.record(EventKind.FINISHED, request.id, time_s=times_s[-1], reason=str(request.finish_reason))
