"""Every time and count, read from the event log and from nothing else.

    queue = admitted - arrived       TTFT = first token - arrived       TPOT = (last token - first token) / (n - 1)

TTFT (time to first token) counts from arrival, not from admission: waiting is what the user feels. TPOT (time per
output token) divides by n - 1, for the first token's wait is the TTFT; it counts tokens, not messages, so that a step
which brings three tokens is three times as good. ITL (inter-token latency) has one entry per pause in the stream, as
vLLM's serving benchmark has it: tokens that arrive together have no pause between them (SGLang's divides the pause
among them instead, which hides how long it was). The pauses of a request sum to (n - 1) TPOT either way.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import numpy as np

from minserve.errors import InvalidValue
from minserve.events import Event, EventKind, EventLog, MalformedLog
from minserve.request import Timings


@dataclass(frozen=True)
class RequestMetrics:
    """One request's times in seconds and counts of tokens; None where it has not come so far.

    Arguments:
        arrived, admitted, first_token, finished: times on the log's clock; admitted is the first admission.
        ttft, queue_s: first token and admission, counted from arrival.
        tpot: mean time per token after the first; None below two tokens and for an unfinished request.
        itl: the pauses between one arrival of tokens and the next.
        prompt_tokens, completion_tokens: tokens handed in and, so far, given out.
        finish_reason: "stop", "length", "abort", "error", or None.
    """

    arrived: float
    admitted: float | None
    first_token: float | None
    finished: float | None
    ttft: float | None
    tpot: float | None
    queue_s: float | None
    itl: tuple[float, ...]
    prompt_tokens: int
    completion_tokens: int
    finish_reason: str | None


@dataclass(frozen=True)
class StepMetrics:
    """One run of the model: when, for how long, how many rows, and how many positions for somebody and for nobody."""

    step: int
    start_s: float
    duration_s: float
    num_rows: int
    num_tokens: int
    num_padded: int


@dataclass(frozen=True)
class Spread:
    """The 50th, 90th and 99th percentile of something in seconds."""

    p50: float
    p90: float
    p99: float

    def __str__(self) -> str:
        return f"p50 {self.p50:.4g} s, p90 {self.p90:.4g} s, p99 {self.p99:.4g} s"


@dataclass(frozen=True)
class Summary:
    """A whole run in a few numbers; None where there is nothing to divide by.

    Arguments:
        num_requests, num_finished, num_unfinished: how many the log speaks of. Percentiles know nothing of a request
            that never got there: with many unfinished ones they flatter.
        prompt_tokens, completion_tokens: totals, unfinished requests included.
        busy_s: time during which at least one request was inside, from its arrival to its end.
        tokens_per_s: output tokens that somebody received, per busy second. Padding, prefill and work done twice are
            no output.
        ttft, tpot: over requests.  itl: over pauses.
        num_steps, rows_per_step, tokens_per_step: runs of the model; mean rows and mean positions for somebody in one.
        padded_share: positions computed for nobody, of all positions computed, 0..1.
    """

    num_requests: int
    num_finished: int
    num_unfinished: int
    prompt_tokens: int
    completion_tokens: int
    busy_s: float
    tokens_per_s: float | None
    ttft: Spread | None
    tpot: Spread | None
    itl: Spread | None
    num_steps: int
    rows_per_step: float | None
    tokens_per_step: float | None
    padded_share: float | None

    def __str__(self) -> str:
        shown = {name: f"{x:.4g}" if isinstance(x, float) else str(x) for name, x in vars(self).items()}
        return "\n".join(f"{name:18}{text}" for name, text in shown.items())


def percentile(values: Iterable[float], q: float) -> float:
    """The value that q per cent of the values are at or below, on the line between the two neighbours.

    The sorted values stand at 0, 100/(n-1), ... 100 per cent (NumPy's default). So p99 of fewer than 100 values lies
    between the two largest: it says little more than the maximum does.

    Arguments: values, at least one, none of them NaN; q in 0..100.
    Errors: InvalidValue for no values, a NaN, or q out of range.

    >>> percentile([1, 2, 3, 10], 50)
    2.5
    """
    values = np.asarray(list(values), dtype=np.float64)
    if values.size == 0 or np.isnan(values).any():
        raise InvalidValue("values", values.tolist(), "at least one number, none of them NaN")
    if not 0 <= q <= 100:
        raise InvalidValue("q", q, "a percentage in 0..100")
    return float(np.percentile(values, q))


def request_metrics(log: EventLog) -> dict[int | str, RequestMetrics]:
    """Each request's times and counts, in order of first mention in the log.

    Errors: MalformedLog where a request does anything before it arrived or after it finished, arrives twice, receives
        less than one token, or goes back in time.
    """
    return {request_id: metrics_of(log, request_id) for request_id in log.request_ids}


def metrics_of(log: EventLog, request_id: int | str) -> RequestMetrics:
    """One request's times and counts; errors as `request_metrics`."""
    events = log.of(request_id)
    _check_life(request_id, events)
    first = {event.kind: event for event in reversed(events)}
    tokens = [event for event in events if event.kind is EventKind.TOKENS]
    times = [event.time_s for event in tokens]
    num_tokens = sum(event.data["count"] for event in tokens)
    arrived, end = first[EventKind.ARRIVED], first.get(EventKind.FINISHED)
    admitted = first[EventKind.ADMITTED].time_s if EventKind.ADMITTED in first else None
    return RequestMetrics(
        arrived=arrived.time_s,
        admitted=admitted,
        first_token=times[0] if times else None,
        finished=end.time_s if end else None,
        ttft=times[0] - arrived.time_s if times else None,
        tpot=(times[-1] - times[0]) / (num_tokens - 1) if end and num_tokens > 1 else None,
        queue_s=None if admitted is None else admitted - arrived.time_s,
        itl=tuple(after - before for before, after in itertools.pairwise(times)),
        prompt_tokens=arrived.data["prompt_tokens"],
        completion_tokens=num_tokens,
        finish_reason=end.data["reason"] if end else None,
    )


def timings_of(log: EventLog, request_id: int | str) -> Timings:
    """The part of one request's times that its output carries; errors as `request_metrics`."""
    metrics = metrics_of(log, request_id)
    return Timings(**{field.name: getattr(metrics, field.name) for field in fields(Timings)})


def _check_life(request_id: int | str, events: Sequence[Event]) -> None:
    """Refuse a life that cannot have been lived in this order, or that nobody has lived."""
    if not events:
        raise InvalidValue("request_id", request_id, "one that the log speaks of")
    before = None
    for event in events:
        said = f"request {request_id!r}: {event.kind.value} at {event.time_s} s"
        if before is None and event.kind is not EventKind.ARRIVED:
            raise MalformedLog(f"{said}, before it arrived")
        if before is not None:
            if event.kind is EventKind.ARRIVED:
                raise MalformedLog(f"{said}, for the second time")
            if before.kind is EventKind.FINISHED:
                raise MalformedLog(f"{said}, after it finished at {before.time_s} s")
            if event.time_s < before.time_s:
                raise MalformedLog(f"{said}, earlier than {before.kind.value} at {before.time_s} s, recorded before it")
        if event.kind is EventKind.TOKENS and event.data["count"] < 1:
            raise MalformedLog(f"{said}, with a count of {event.data['count']}")
        before = event


def steps(log: EventLog) -> list[StepMetrics]:
    """Every run of the model, by step number.

    Errors: MalformedLog where two runs have one number, or one took less than no time.
    """
    found: dict[int, StepMetrics] = {}
    for event in log:
        if event.kind is not EventKind.STEP:
            continue
        step = StepMetrics(**{name: event.data[name] for name in StepMetrics.__dataclass_fields__})
        if step.step in found:
            raise MalformedLog(f"step {step.step} is recorded twice, the second time at {step.start_s} s")
        if not step.duration_s >= 0:
            raise MalformedLog(f"step {step.step} lasts {step.duration_s} s")
        found[step.step] = step
    return [found[number] for number in sorted(found)]


def summary(log: EventLog) -> Summary:
    """The whole run in a few numbers; `print` shows them one a line.

    Errors: MalformedLog, as `request_metrics` and `steps`.
    """
    requests, runs = list(request_metrics(log).values()), steps(log)
    num_finished = sum(request.finished is not None for request in requests)
    num_output = sum(request.completion_tokens for request in requests)
    num_useful, num_padded = sum(run.num_tokens for run in runs), sum(run.num_padded for run in runs)
    busy_s = _busy_s(requests, log.end_s)
    return Summary(
        num_requests=len(requests),
        num_finished=num_finished,
        num_unfinished=len(requests) - num_finished,
        prompt_tokens=sum(request.prompt_tokens for request in requests),
        completion_tokens=num_output,
        busy_s=busy_s,
        tokens_per_s=num_output / busy_s if busy_s else None,
        ttft=_spread(request.ttft for request in requests),
        tpot=_spread(request.tpot for request in requests),
        itl=_spread(pause for request in requests for pause in request.itl),
        num_steps=len(runs),
        rows_per_step=sum(run.num_rows for run in runs) / len(runs) if runs else None,
        tokens_per_step=num_useful / len(runs) if runs else None,
        padded_share=num_padded / (num_useful + num_padded) if num_useful + num_padded else None,
    )


def _spread(values: Iterable[float | None]) -> Spread | None:
    """The three percentiles of the values that are known, None if none is."""
    known = [value for value in values if value is not None]
    return Spread(*(percentile(known, q) for q in (50, 90, 99))) if known else None


def _busy_s(requests: Sequence[RequestMetrics], end_s: float) -> float:
    """The length of the union of the intervals [arrived, finished); an unfinished request is inside until the end."""
    busy_s, covered_until = 0.0, -np.inf
    for request in sorted(requests, key=lambda request: request.arrived):
        stop = end_s if request.finished is None else request.finished
        busy_s += max(0.0, stop - max(request.arrived, covered_until))
        covered_until = max(covered_until, stop)
    return busy_s
