"""The static batch: requests that start together, run side by side at one width, and give their places back together.

What a loop around generate() becomes when it is handed a list of prompts. Shorter prompts are padded on the right.
Decoding goes on until the longest request has its last token. The rows of the others are computed too, for nobody: with
the pads, those positions are what `num_padded` counts.

Serving systems batched whole requests like this from the first (TensorFlow Serving, 2016; Clipper, 2017). Orca (OSDI
2022) named it request-level scheduling and replaced it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from minserve.clock import Clock, VirtualClock
from minserve.errors import InvalidValue
from minserve.events import EventKind, EventLog
from minserve.model.hybrid_lm import HybridLM
from minserve.model.static_memory import StaticMemory
from minserve.model.step import Step
from minserve.request import FinishReason, Request, Status
from minserve.sampling import sample
from minserve.stopping import stop_ids

Cost = Callable[[list[tuple[int, int]]], float]


def newest_tokens(is_real: Bool[Tensor, "rows width"]) -> Int[Tensor, " rows"]:
    """The packed index of each row's last real token: the one whose logits say what comes next.

    >>> newest_tokens(torch.tensor([[True, True, True], [True, False, False]]))
    tensor([2, 3])
    """
    num_rows, width = is_real.shape
    return torch.arange(num_rows, device=is_real.device) * width + is_real.sum(dim=1) - 1


@torch.inference_mode()
def run_static(
    model: HybridLM | None, requests: Sequence[Request], log: EventLog, cost: Cost | None = None,
    newest: Callable[[Tensor], Tensor] = newest_tokens,
) -> None:  # fmt: skip
    """Run requests as one static batch, from their prompts to the last token of the longest.

    A request ends at an end token, at one of its stop_token_ids, or at max_tokens; it is FINISHED in the log, and its
    place free, only when the whole batch is.

    Arguments:
        model: any checkpoint; or None to play time alone: every token is then 0 and only max_tokens ends a request.
        requests: waiting, nothing computed, recorded as arrived; at least one.
        log: every slice and step is recorded here.
        cost: None on a real clock. On a virtual one, the seconds that a step takes, given the (start, stop) positions
            that it computes in each row, pads included: the rows of `minserve.model.counting.count_step`.
        newest: finds the token of each row that is chosen from. A part, so that a wrong one can be tried.
    Errors: InvalidValue for what a static batch does not do: stop strings and prompt_logprobs.
    Changes: the requests, the log, and the clock if there is a cost.
    """
    for request in requests:
        if request.params.stop or request.params.prompt_logprobs is not None:
            raise InvalidValue("params", request.params, "without stop strings and prompt_logprobs in a static batch")
        request.status = Status.RUNNING
        log.record(EventKind.ADMITTED, request.id, cached_tokens=0)
    memory = None if model is None else _memory(model, requests)
    new_ids, starts = [list(request.prompt_ids) for request in requests], [0] * len(requests)
    while any(request.status is Status.RUNNING for request in requests):
        began_s, width = log.clock.now(), max(map(len, new_ids))
        rows = [(start, start + width) for start in starts]
        logits = None if model is None else _forward(model, memory, new_ids, rows, newest)
        if cost is not None:
            log.clock.advance(cost(rows))
        _record_step(log, requests, new_ids, starts, began_s)
        starts = [start + len(ids) for start, ids in zip(starts, new_ids, strict=True)]
        running = [i for i, request in enumerate(requests) if request.status is Status.RUNNING]
        tokens = [0] * len(running) if logits is None else _choose(logits[running], [requests[i] for i in running])
        new_ids = [ids[-1:] for ids in new_ids]  # what a finished row computes on with does not matter
        for i, token in zip(running, tokens, strict=True):
            requests[i].commit(starts[i], [token])
            log.record(EventKind.TOKENS, requests[i].id, count=1)
            new_ids[i] = [token]
            _finish_if_done(requests[i], model)
    for request in requests:
        log.record(EventKind.FINISHED, request.id, reason=str(request.finish_reason))


def serve_static(
    model: HybridLM | None, arrivals: Sequence[tuple[float, Request]], log: EventLog, batch_size: int,
    max_wait_s: float = 0.0, cost: Cost | None = None,
) -> None:  # fmt: skip
    """Serve requests as they arrive: collect a batch, run it to its end, and only then look at the queue again.

    A batch starts as soon as the machine is free and `batch_size` requests wait, or the oldest of them has waited
    `max_wait_s`. It takes the oldest, up to `batch_size`. With a batch size of 1 this is generate() in a loop.

    Arguments:
        model, log, cost: as in `run_static`. Without a cost, the log's clock is real and waiting is done by sleeping.
        arrivals: (seconds on the log's clock, request) in order of time.
        batch_size: requests in a batch, at least 1.
        max_wait_s: seconds that the oldest waits for company while the machine is free, >= 0.
    Changes: the requests, the log, and the clock if there is a cost.
    """
    if batch_size < 1 or not max_wait_s >= 0:
        raise InvalidValue("batch_size, max_wait_s", (batch_size, max_wait_s), "at least 1, and at least 0 seconds")
    coming = list(arrivals)
    while coming:
        is_full_s = coming[batch_size - 1][0] if len(coming) >= batch_size else float("inf")
        _wait_until(log.clock, min(is_full_s, coming[0][0] + max_wait_s))
        batch = [arrival for arrival in coming[:batch_size] if arrival[0] <= log.clock.now()]
        for time_s, request in batch:
            log.record(EventKind.ARRIVED, request.id, time_s=time_s, prompt_tokens=len(request.prompt_ids))
        run_static(model, [request for _, request in batch], log, cost)
        coming = coming[len(batch) :]


def _memory(model: HybridLM, requests: Sequence[Request]) -> StaticMemory:
    """Memory for a batch: a row may take as many steps as the request that wants most, whatever it wants itself."""
    weight = model.model.embed_tokens.weight
    longest = max(len(request.prompt_ids) for request in requests)
    longest += max(request.params.max_tokens for request in requests)
    return StaticMemory(model.config, len(requests), longest, weight.dtype, weight.device)


def _forward(model, memory: StaticMemory, new_ids: list[list[int]], rows: list[tuple[int, int]], newest) -> Tensor:
    """Run one step of the padded batch: logits of each row's newest token. Changes: the memory."""
    device, width = model.model.embed_tokens.weight.device, rows[0][1] - rows[0][0]
    tokens = torch.tensor([ids + [0] * (width - len(ids)) for ids in new_ids], device=device)
    positions = torch.tensor([range(start, stop) for start, stop in rows], device=device)
    memory.place(positions, torch.tensor([len(ids) for ids in new_ids], device=device))
    row_starts = torch.arange(0, tokens.numel() + 1, width, device=device)
    step = Step(tokens.flatten(), positions.flatten(), row_starts, newest(memory.is_real))
    return model(step, memory).logits


def _choose(logits: Float[Tensor, "rows vocab"], requests: list[Request]) -> list[int]:
    """The next token of each request."""
    return [sampled.token_id for sampled in sample(logits, requests)]


def _record_step(log: EventLog, requests, new_ids: list[list[int]], starts: list[int], began_s: float) -> None:
    """Write down what a step computed, for whom, and how much of it for nobody. Changes: the log."""
    number, num_useful = len(log), 0
    for request, ids, start in zip(requests, new_ids, starts, strict=True):
        is_padding = request.status is not Status.RUNNING
        phase = "padded" if is_padding else "prefill" if start < len(request.prompt_ids) else "decode"
        num_useful += 0 if is_padding else len(ids)
        log.record(EventKind.SLICE, request.id, start=start, stop=start + len(ids), phase=phase, step=number)
    num_padded = len(requests) * max(map(len, new_ids)) - num_useful
    log.record(EventKind.STEP, step=number, start_s=began_s, duration_s=log.clock.now() - began_s,
               num_rows=len(requests), num_tokens=num_useful, num_padded=num_padded)  # fmt: skip


def _finish_if_done(request: Request, model: HybridLM | None) -> None:
    """End a request that has its last token. Changes: the request."""
    num_output = request.num_committed - len(request.prompt_ids)
    if model is not None and request.tokens[-1] in stop_ids(request.params, model.config.eos_token_ids):
        request.finish(FinishReason.STOP)
    elif num_output >= request.params.max_tokens:
        request.finish(FinishReason.LENGTH)


def _wait_until(clock: Clock, time_s: float) -> None:
    """Let time pass up to a moment, if it is not past already. Changes: a virtual clock."""
    if isinstance(clock, VirtualClock):
        clock.advance_to(max(clock.now(), time_s))
    while clock.now() < time_s:
        time.sleep(max(0.0, time_s - clock.now()))
