"""What each request was doing when: the log as intervals, for the timeline picture and for a trace viewer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from minserve.events import EventKind, EventLog
from minserve.metrics import request_metrics, steps


@dataclass(frozen=True)
class Span:
    """What one request was doing in [start_s, stop_s): "waiting", or the phase of a slice."""

    request_id: int | str
    phase: str
    start_s: float
    stop_s: float


def spans(log: EventLog) -> list[Span]:
    """What each request was doing when: waiting for admission, then one span per slice, as long as its step.

    A slice whose step is not recorded yet (it is still running) is left out.
    """
    by_number = {step.step: step for step in steps(log)}
    found = []
    for request_id, metrics in request_metrics(log).items():
        waited_until = next((t for t in (metrics.admitted, metrics.finished) if t is not None), log.end_s)
        found.append(Span(request_id, "waiting", metrics.arrived, waited_until))
        for event in log.of(request_id):
            step = by_number.get(event.data["step"]) if event.kind is EventKind.SLICE else None
            if step is not None:
                found.append(Span(request_id, event.data["phase"], step.start_s, step.start_s + step.duration_s))
    return found


def chrome_trace(log: EventLog, path: str | Path) -> None:
    """Write the spans as JSON trace events, one lane per request, for ui.perfetto.dev or chrome://tracing."""
    lanes = {request_id: lane for lane, request_id in enumerate(log.request_ids)}
    trace = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": lane, "args": {"name": f"request {request_id}"}}
        for request_id, lane in lanes.items()
    ]
    for span in spans(log):
        start_us, duration_us = 1e6 * span.start_s, 1e6 * (span.stop_s - span.start_s)
        lane = lanes[span.request_id]
        trace.append({"ph": "X", "name": span.phase, "pid": 0, "tid": lane, "ts": start_us, "dur": duration_us})
    Path(path).write_text(json.dumps({"traceEvents": trace}), encoding="utf-8")
