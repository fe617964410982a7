"""Metrics against values computed by hand, and the impossible logs that they refuse."""

import json
import math

import numpy as np
import pytest

from minserve.clock import VirtualClock
from minserve.errors import InvalidValue
from minserve.events import EventKind, EventLog, MalformedLog
from minserve.metrics import Spread, metrics_of, percentile, request_metrics, steps, summary
from minserve.spans import Span, chrome_trace, spans

K = EventKind


def log_of(*events):
    """A log of (time, kind, request, data) as they stand."""
    log = EventLog(VirtualClock())
    for time_s, kind, request_id, data in events:
        log.record(kind, request_id, time_s=time_s, **data)
    return log


def step(number, start_s, duration_s, num_rows, num_tokens, num_padded=0):
    """One STEP event, recorded at its end."""
    counts = {"num_rows": num_rows, "num_tokens": num_tokens, "num_padded": num_padded}
    return start_s + duration_s, K.STEP, None, {"step": number, "start_s": start_s, "duration_s": duration_s} | counts


ARRIVED, ADMITTED = {"prompt_tokens": 4}, {"cached_tokens": 0}
A_FINISHED = (
    (1.0, K.ARRIVED, "a", ARRIVED),
    (1.5, K.ADMITTED, "a", ADMITTED),
    (2.0, K.TOKENS, "a", {"count": 1}),
    (2.5, K.TOKENS, "a", {"count": 3}),
    (2.75, K.TOKENS, "a", {"count": 1}),
    (3.0, K.FINISHED, "a", {"reason": "stop"}),
)


def test_a_request_by_hand():  # fault I12: tokens are counted, not events
    metrics = request_metrics(log_of(*A_FINISHED))["a"]
    assert (metrics.arrived, metrics.admitted, metrics.first_token, metrics.finished) == (1.0, 1.5, 2.0, 3.0)
    assert metrics.ttft == 1.0, "from arrival, not from admission"
    assert metrics.queue_s == 0.5
    assert metrics.completion_tokens == 5 and metrics.prompt_tokens == 4
    assert metrics.tpot == 0.75 / 4, "over n - 1 tokens, up to the last token, not up to the end"
    assert metrics.itl == (0.5, 0.25), "one entry per pause"
    assert sum(metrics.itl) == 4 * metrics.tpot
    assert metrics.finish_reason == "stop"


@pytest.mark.parametrize("length", range(1, len(A_FINISHED)))
def test_a_request_that_is_not_done_says_none_where_it_has_not_been(length):
    metrics = request_metrics(log_of(*A_FINISHED[:length]))["a"]
    assert metrics.finished is metrics.finish_reason is metrics.tpot is None
    assert (metrics.admitted is None) == (metrics.queue_s is None) == (length < 2)
    assert (metrics.first_token is None) == (metrics.ttft is None) == (length < 3)
    assert metrics.completion_tokens == [0, 0, 1, 4, 5][length - 1]
    assert len(metrics.itl) == max(0, length - 3)


def test_a_request_that_the_log_never_heard_of_is_an_error():
    with pytest.raises(InvalidValue, match="request_id is 'b'"):
        metrics_of(log_of(*A_FINISHED), "b")


def test_one_token_has_no_time_per_token_and_one_burst_has_zero():
    one = log_of((0, K.ARRIVED, 1, ARRIVED), (1, K.TOKENS, 1, {"count": 1}), (1, K.FINISHED, 1, {"reason": "length"}))
    assert request_metrics(one)[1].tpot is None and request_metrics(one)[1].itl == ()
    burst = log_of((0, K.ARRIVED, 1, ARRIVED), (1, K.TOKENS, 1, {"count": 4}), (1, K.FINISHED, 1, {"reason": "length"}))
    assert request_metrics(burst)[1].tpot == 0 and request_metrics(burst)[1].completion_tokens == 4


def test_admitted_again_after_a_preemption_keeps_the_first_time():
    again = log_of(*A_FINISHED[:3], (2.25, K.ADMITTED, "a", ADMITTED), *A_FINISHED[3:])
    assert request_metrics(again)["a"].admitted == 1.5


def test_refused_in_the_queue_has_an_end_and_nothing_else():
    refused = log_of((1, K.ARRIVED, 1, ARRIVED), (4, K.FINISHED, 1, {"reason": "abort"}))
    metrics = request_metrics(refused)[1]
    assert metrics.finished == 4 and metrics.ttft is metrics.queue_s is metrics.tpot is None
    assert spans(refused) == [Span(1, "waiting", 1.0, 4.0)]


IMPOSSIBLE = {
    "before it arrived": [(1, K.TOKENS, 1, {"count": 1}), (2, K.ARRIVED, 1, ARRIVED)],
    "for the second time": [(1, K.ARRIVED, 1, ARRIVED), (2, K.ARRIVED, 1, ARRIVED)],
    "finished at 4.0 s, after it finished at 3.0 s": [*A_FINISHED, (4, K.FINISHED, "a", {"reason": "abort"})],
    "tokens at 4.0 s, after it finished": [*A_FINISHED, (4, K.TOKENS, "a", {"count": 1})],
    "earlier than arrived at 1.0 s": [(1, K.ARRIVED, 1, ARRIVED), (0.5, K.TOKENS, 1, {"count": 1})],
    "earlier than tokens at 2.5 s": [*A_FINISHED[:4], (2.25, K.FINISHED, "a", {"reason": "stop"})],
    "with a count of 0": [(1, K.ARRIVED, 1, ARRIVED), (2, K.TOKENS, 1, {"count": 0})],
}


@pytest.mark.parametrize("message", IMPOSSIBLE)
def test_an_impossible_life_is_refused_by_name(message):
    log = log_of(*IMPOSSIBLE[message])
    for read in (request_metrics, summary, spans):
        with pytest.raises(MalformedLog, match=message):
            read(log)


def test_steps_come_in_order_and_once():
    log = log_of(step(1, 0.5, 0.25, 2, 2), step(0, 0.0, 0.5, 1, 4, 4))
    assert [(run.step, run.num_tokens, run.num_padded) for run in steps(log)] == [(0, 4, 4), (1, 2, 0)]
    with pytest.raises(MalformedLog, match="step 1 is recorded twice"):
        steps(log_of(step(1, 0, 1, 1, 1), step(1, 1, 1, 1, 1)))
    with pytest.raises(MalformedLog, match=r"step 3 lasts -0\.5 s"):
        steps(log_of(step(3, 1, -0.5, 1, 1)))


@pytest.mark.parametrize("values", [[5.0], [1, 2], [3, 1, 2, 10], list(np.random.default_rng(0).lognormal(size=137))])
@pytest.mark.parametrize("q", [0, 25, 50, 90, 99, 100])
def test_percentile_lies_on_the_line_between_neighbours(values, q):
    ranked, place = sorted(values), q / 100 * (len(values) - 1)
    low = math.floor(place)
    high = min(low + 1, len(values) - 1)
    assert percentile(values, q) == pytest.approx(ranked[low] + (place - low) * (ranked[high] - ranked[low]), abs=1e-12)


@pytest.mark.parametrize("values, q", [([], 50), ([1, math.nan], 50), ([1], -1), ([1], 101), ([1], math.nan)])
def test_percentile_refuses_what_has_none(values, q):
    with pytest.raises(InvalidValue):
        percentile(values, q)


def two_requests_and_a_gap():
    """a is inside [1, 3), b [2, 4), nobody [4, 10), c from 10 to the last event at 12, where it is still unfinished."""
    return log_of(
        *A_FINISHED,
        (2.0, K.ARRIVED, "b", {"prompt_tokens": 2}),
        (2.5, K.ADMITTED, "b", ADMITTED),
        step(0, 1.5, 0.5, 1, 4),
        step(1, 2.5, 0.25, 2, 4, 4),
        (3.0, K.TOKENS, "b", {"count": 1}),
        (4.0, K.TOKENS, "b", {"count": 1}),
        (4.0, K.FINISHED, "b", {"reason": "length"}),
        (10.0, K.ARRIVED, "c", {"prompt_tokens": 9}),
        step(2, 10.0, 2.0, 1, 2),
    )


def test_summary_by_hand():
    total = summary(two_requests_and_a_gap())
    assert (total.num_requests, total.num_finished, total.num_unfinished) == (3, 2, 1)
    assert (total.prompt_tokens, total.completion_tokens) == (15, 7)
    assert total.busy_s == 5.0, "the union of [1, 3), [2, 4) and [10, 12)"
    assert total.tokens_per_s == 7 / 5.0
    assert total.ttft == Spread(1.0, 1.0, 1.0), "a and b; c never got one"
    assert total.tpot == Spread(*(pytest.approx(0.1875 + q * (1 - 0.1875)) for q in (0.5, 0.9, 0.99)))
    assert total.itl == Spread(*(percentile([0.5, 0.25, 1.0], q) for q in (50, 90, 99)))
    assert (total.num_steps, total.rows_per_step, total.tokens_per_step) == (3, 4 / 3, 10 / 3)
    assert total.padded_share == 4 / 14
    assert "num_unfinished    1\n" in str(total) and "p50 1 s" in str(total)


def test_summary_of_nothing_divides_by_nothing():
    total = summary(EventLog(VirtualClock()))
    assert total.num_requests == total.num_steps == total.completion_tokens == total.busy_s == 0
    assert total.tokens_per_s is total.ttft is total.padded_share is total.rows_per_step is None
    assert "None" in str(total)


def sliced(request_id, number, phase, time_s):
    """One SLICE event; which positions it covers does not matter here."""
    return time_s, K.SLICE, request_id, {"start": 0, "stop": 1, "phase": phase, "step": number}


def test_spans_are_as_long_as_their_steps():
    log = log_of(
        *A_FINISHED[:2],
        step(0, 1.5, 0.5, 1, 4),
        sliced("a", 0, "prefill", 2.0),
        step(1, 2.0, 0.25, 1, 1),
        sliced("a", 1, "decode", 2.25),
        sliced("a", 2, "decode", 2.25),
        (2.25, K.ARRIVED, "b", ARRIVED),
        (2.75, K.FINISHED, "a", {"reason": "stop"}),
    )
    waiting, *worked = [Span("a", "waiting", 1, 1.5), Span("a", "prefill", 1.5, 2), Span("a", "decode", 2, 2.25)]
    assert spans(log) == [waiting, *worked, Span("b", "waiting", 2.25, 2.75)], "step 2 is still running, b still waits"


def test_chrome_trace_has_a_lane_per_request_and_microseconds(tmp_path):
    log = log_of(*A_FINISHED[:2], step(0, 1.5, 0.5, 1, 4), sliced("a", 0, "prefill", 2.0), (2, K.ARRIVED, "b", ARRIVED))
    chrome_trace(log, tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [(e["tid"], e["args"]["name"]) for e in trace if e["ph"] == "M"] == [(0, "request a"), (1, "request b")]
    timed = [(e["tid"], e["name"], e["ts"], e["dur"]) for e in trace if e["ph"] == "X"]
    assert timed == [(0, "waiting", 1e6, 5e5), (0, "prefill", 1.5e6, 5e5), (1, "waiting", 2e6, 0)]
