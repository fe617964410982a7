"""What a step writes into the event log."""

from __future__ import annotations

from collections.abc import Sequence

from minserve.batching.batcher import Plan, Slice
from minserve.events import EventKind, EventLog


def record_plan(log: EventLog, plan: Plan) -> None:
    """Write down who was put back and who was let in. Changes: the log."""
    for request, num_computed in plan.preempted:
        log.record(EventKind.PREEMPTED, request.id, num_computed=num_computed)
    for request in plan.admitted:
        log.record(EventKind.ADMITTED, request.id, cached_tokens=request.num_computed)


def record_step(log: EventLog, number: int, slices: Sequence[Slice], began_s: float) -> None:
    """Write down what ran in a step that ends now. Changes: the log."""
    log.record_all(EventKind.SLICE, (
        (p.request.id, {"start": p.start, "stop": p.start + p.num_tokens, "phase": p.phase.value, "step": number})
        for p in slices
    ))  # fmt: skip
    num_tokens = sum(piece.num_tokens for piece in slices)
    log.record(EventKind.STEP, step=number, start_s=began_s, duration_s=log.clock.now() - began_s,
               num_rows=len(slices), num_tokens=num_tokens, num_padded=0)  # fmt: skip
