"""The event log: what it takes, what it refuses, and that a file of it says the same."""

import json
import math

import numpy as np
import pytest

from minserve.clock import VirtualClock
from minserve.errors import InvalidValue
from minserve.events import FIELDS, EventKind, EventLog, MalformedLog

K = EventKind
STEP = {"step": 0, "start_s": 0.5, "duration_s": 0.25, "num_rows": 1, "num_tokens": 5, "num_padded": 0}


@pytest.fixture
def log():
    """Two requests, one step, seven events; one arrival recorded late with its own time."""
    clock = VirtualClock()
    log = EventLog(clock)
    log.record(K.ARRIVED, "a", prompt_tokens=5)
    log.record(K.ADMITTED, "a", cached_tokens=0)
    clock.advance(0.75)
    log.record(K.STEP, **STEP)
    log.record(K.SLICE, "a", start=0, stop=5, phase="prefill", step=0)
    log.record(K.TOKENS, "a", count=1)
    log.record(K.ARRIVED, 7, time_s=0.6, prompt_tokens=2)
    log.record(K.FINISHED, "a", reason="length")
    return log


def test_events_keep_order_and_take_the_clocks_time_unless_given(log):
    kinds = [K.ARRIVED, K.ADMITTED, K.STEP, K.SLICE, K.TOKENS, K.ARRIVED, K.FINISHED]
    assert [event.kind for event in log] == kinds
    assert [event.time_s for event in log] == [0, 0, 0.75, 0.75, 0.75, 0.6, 0.75]
    assert len(log) == 7 and log.end_s == 0.75
    assert log.request_ids == ("a", 7)
    assert [event.data for event in log.of(7)] == [{"prompt_tokens": 2}]
    assert len(log.of("a")) == 5 and log.of("nobody") == ()
    assert EventLog(VirtualClock(3)).end_s == 0


def test_an_event_cannot_be_changed(log):
    with pytest.raises(AttributeError):
        log.of("a")[0].time_s = 9.0


@pytest.mark.parametrize("kind", EventKind)
def test_every_kind_names_its_fields_and_refuses_one_missing(kind):
    log = EventLog(VirtualClock())
    request_id = None if kind is K.STEP else "a"
    data = dict.fromkeys(FIELDS[kind], 1)
    assert kind.value == kind.name.lower() and data
    for field in data:
        with pytest.raises(InvalidValue, match=field):
            log.record(kind, request_id, **{name: value for name, value in data.items() if name != field})
    assert len(log) == 0
    assert log.record(kind, request_id, **data, extra=2).data == data | {"extra": 2}


def test_record_refuses_a_wrong_request_or_time():
    log = EventLog(VirtualClock())
    with pytest.raises(InvalidValue, match="request_id"):
        log.record(K.STEP, "a", **STEP)
    with pytest.raises(InvalidValue, match="request_id"):
        log.record(K.TOKENS, count=1)
    for bad in (math.nan, math.inf):
        with pytest.raises(InvalidValue, match="time_s"):
            log.record(K.TOKENS, "a", time_s=bad, count=1)
    assert len(log) == 0 and log.request_ids == ()


def test_a_saved_log_loads_as_the_same_log(log, tmp_path):
    path = tmp_path / "run.jsonl"
    log.record(K.TOKENS, 7, time_s=0.7, count=np.int64(2))
    log.save(path)
    loaded = EventLog.load(path)
    assert list(loaded) == list(log)
    assert loaded.request_ids == log.request_ids and loaded.of(7) == log.of(7)
    assert loaded.clock.now() == 0.75
    assert len(path.read_text().splitlines()) == len(log)
    assert json.loads(path.read_text().splitlines()[0])["kind"] == "arrived"


def test_a_field_that_json_cannot_say_is_named_on_save(tmp_path):
    log = EventLog(VirtualClock())
    log.record(K.FINISHED, "a", reason=EventKind)
    with pytest.raises(InvalidValue, match="event field"):
        log.save(tmp_path / "run.jsonl")


@pytest.mark.parametrize(
    "line",
    [
        '{"kind": "tokens", "time_s": 1.0, "request_id": 1, "cou',
        '{"kind": "teleported", "time_s": 1.0, "request_id": 1}',
        '{"kind": "tokens", "time_s": 1.0, "request_id": 1}',
        '{"kind": "tokens", "request_id": 1, "count": 1}',
        '{"kind": "tokens", "time_s": "soon", "request_id": 1, "count": 1}',
        "[1, 2]",
    ],
    ids=["cut off", "unknown kind", "missing field", "no time", "time in words", "no object"],
)
def test_a_broken_file_is_an_error_that_names_the_line(line, log, tmp_path):
    path = tmp_path / "run.jsonl"
    log.save(path)
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(MalformedLog, match=r"run\.jsonl, line 8"):
        EventLog.load(path)
