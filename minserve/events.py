"""The one event log: what happened, when, to which request. Metrics and pictures are read from it, and only from it.

A request's life in events, and the one event that is about no request:

    ARRIVED ── ADMITTED ── SLICE ── TOKENS ── SLICE ── TOKENS ── ... ── FINISHED
    DRAFTS: between a slice and its tokens, where guesses were verified with it
    STEP: one run of the model, which the slices name by its number
    PREEMPTED: it gives its memory back; it is ADMITTED again later, and computes its SLICEs once more

Whoever knows a time better than the clock passes it: an arrival that fell into the middle of a step is recorded after
that step, with its own `time_s`. Times therefore rise within a request, not over the whole log.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from minserve.clock import Clock, VirtualClock
from minserve.errors import InvalidValue, MinserveError


class MalformedLog(MinserveError):
    """A log that tells an impossible story: the message names the request or step, and what contradicts what."""


class EventKind(Enum):
    """What can happen; `FIELDS` lists what each kind must say."""

    ARRIVED = "arrived"  # a request was handed in
    ADMITTED = "admitted"  # it holds its memory and may run; again after a preemption
    PREEMPTED = "preempted"  # it gave its memory back and waits again; what it computed is computed once more
    SLICE = "slice"  # a step computed its positions [start, stop)
    DRAFTS = "drafts"  # a step verified `drafted` guesses at its next tokens, and it got `accepted` of them
    TOKENS = "tokens"  # `count` of its output tokens became known at once
    FINISHED = "finished"  # nothing more will happen to it
    STEP = "step"  # the model ran once, for all rows of a batch


FIELDS = MappingProxyType(
    {
        EventKind.ARRIVED: ("prompt_tokens",),
        EventKind.ADMITTED: ("cached_tokens",),
        EventKind.PREEMPTED: ("num_computed",),
        EventKind.SLICE: ("start", "stop", "phase", "step"),
        EventKind.DRAFTS: ("drafted", "accepted"),
        EventKind.TOKENS: ("count",),
        EventKind.FINISHED: ("reason",),
        EventKind.STEP: ("step", "start_s", "duration_s", "num_rows", "num_tokens", "num_padded"),
    }
)


_NEEDED = MappingProxyType({kind: frozenset(fields) for kind, fields in FIELDS.items()})


class Event(NamedTuple):
    """One thing that happened.

    Arguments:
        kind: what.
        time_s: when, in seconds of the log's clock.
        request_id: to which request; None for a step.
        data: the fields that `FIELDS` demands of this kind, and any others.
    """

    kind: EventKind
    time_s: float
    request_id: int | str | None
    data: dict[str, Any]


def _check_fields(kind: EventKind, data: dict[str, Any]) -> None:
    """Raise InvalidValue unless the data have what the kind demands."""
    if not _NEEDED[kind] <= data.keys():
        missing = [field for field in FIELDS[kind] if field not in data]
        raise InvalidValue(f"data of a {kind.value} event", data, f"given with {', '.join(missing)}")


class EventLog:
    """Events in the order in which they were recorded.

    Arguments:
        clock: what stamps an event that brings no time of its own.

    >>> log = EventLog(VirtualClock())
    >>> log.record(EventKind.ARRIVED, "a", prompt_tokens=5).time_s
    0.0
    >>> log.record(EventKind.TOKENS, "a", time_s=0.5, count=2).data
    {'count': 2}
    >>> [event.kind.value for event in log.of("a")]
    ['arrived', 'tokens']
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._events: list[Event] = []
        self._by_request: defaultdict[int | str, list[Event]] = defaultdict(list)

    def __len__(self) -> int:
        return len(self._events)

    def __iter__(self) -> Iterator[Event]:
        return iter(self._events)

    @property
    def request_ids(self) -> tuple[int | str, ...]:
        """Every request that the log speaks of, in order of first mention."""
        return tuple(self._by_request)

    @property
    def end_s(self) -> float:
        """The time of the latest event in seconds, 0 for an empty log: unfinished business is counted up to here."""
        return max((event.time_s for event in self), default=0.0)

    def of(self, request_id: int | str) -> tuple[Event, ...]:
        """The events of one request in the order recorded; none for an id never seen."""
        return tuple(self._by_request.get(request_id, ()))

    def record(
        self, kind: EventKind, request_id: int | str | None = None, time_s: float | None = None, **data: Any
    ) -> Event:
        """Append one event and return it. Changes: this log.

        Arguments:
            kind: what happened.
            request_id: to whom; left out for a step, and only there.
            time_s: when, in seconds of the log's clock, finite; the clock's now if left out.
            data: the fields of this kind (`FIELDS`); more are allowed.
        Errors: InvalidValue for a missing field, a time that is not finite, a request where none belongs or none where
            one does.
        """
        _check_fields(kind, data)
        if (request_id is None) != (kind is EventKind.STEP):
            raise InvalidValue("request_id", request_id, "None for a step and an id for every other event")
        if time_s is None:
            time_s = self.clock.now()
        elif not math.isfinite(time_s):
            raise InvalidValue("time_s", time_s, "a finite time in seconds")
        event = Event(kind, float(time_s), request_id, data)
        self._events.append(event)
        if request_id is not None:
            self._by_request[request_id].append(event)
        return event

    def record_all(self, kind: EventKind, rows: Iterable[tuple[int | str, dict[str, Any]]]) -> None:
        """Append an event of one kind for each (request, data), all at the clock's now. Changes: this log.

        What `record` does, for the many rows of a step. Errors: InvalidValue for a missing field.
        """
        time_s = float(self.clock.now())
        for request_id, data in rows:
            _check_fields(kind, data)
            event = Event(kind, time_s, request_id, data)
            self._events.append(event)
            self._by_request[request_id].append(event)

    def save(self, path: str | Path) -> None:
        """Write the log as JSON lines, one event a line, so that a run can be looked at later or elsewhere."""
        lines = [
            json.dumps({"kind": e.kind.value, "time_s": e.time_s, "request_id": e.request_id, **e.data}, default=_plain)
            for e in self
        ]
        Path(path).write_text("".join(line + "\n" for line in lines), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> EventLog:
        """Read what `save` wrote; its clock is a virtual one that stands at the last event.

        Errors: MalformedLog naming file and line where a line is no event.
        """
        log = cls(VirtualClock())
        for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
            try:
                fields = json.loads(line)
                log.record(EventKind(fields.pop("kind")), fields.pop("request_id"), fields.pop("time_s"), **fields)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise MalformedLog(f"{path}, line {number}: not an event ({error})") from error
        log.clock = VirtualClock(log.end_s)
        return log


def _plain(value: Any) -> Any:
    """The plain number in a NumPy or torch scalar, which JSON does not know."""
    if not hasattr(value, "item"):
        raise InvalidValue("event field", value, "a number, a string, a list or None, so that the log can be saved")
    return value.item()
