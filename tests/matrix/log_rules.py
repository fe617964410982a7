"""What a log must say of a run, whatever its answers: who was preempted, who forked, and that slices tile each life."""

from __future__ import annotations

from collections import defaultdict

from minserve.events import EventKind, EventLog

KIND = EventKind


def preempted_ids(log: EventLog) -> set[str]:
    """The requests that gave their memory back and were computed again."""
    return {event.request_id for event in log if event.kind is KIND.PREEMPTED}


def forked_ids(log: EventLog) -> set[str]:
    """The requests whose first token came without a slice of their own."""
    kinds = {request_id: [event.kind for event in log.of(request_id)] for request_id in log.request_ids}
    return {i for i, seen in kinds.items() if seen[:3] == [KIND.ARRIVED, KIND.ADMITTED, KIND.TOKENS]}


def cached_tokens(log: EventLog) -> list[int]:
    """How many tokens were reused at each admission, but for those of forks, which are let in at their prompt's end."""
    forked = forked_ids(log)
    admitted = [event for event in log if event.kind is KIND.ADMITTED and event.request_id not in forked]
    return [event.data["cached_tokens"] for event in admitted]


def verified(log: EventLog) -> list[tuple[int, int]]:
    """How many drafts each row verified that had some, and how many of them it kept."""
    return [(event.data["drafted"], event.data["accepted"]) for event in log if event.kind is KIND.DRAFTS]


def check_steps(log: EventLog, batch_tokens: int) -> None:
    """Every step computes something, no more than it may, and its slices add up to it."""
    tokens = defaultdict(int)
    for event in log:
        if event.kind is KIND.SLICE:
            tokens[event.data["step"]] += event.data["stop"] - event.data["start"]
        if event.kind is KIND.STEP:
            assert 0 < event.data["num_tokens"] == tokens[event.data["step"]] <= batch_tokens, event


def check_slices(log: EventLog, request_id: str) -> None:
    """A request's slices follow one another from what was cached, again so after a preemption, and name their phase.

    A slice decodes when its request's last token was chosen from the slice before; how long it is says nothing. Drafts
    are behind the last known token; those that are kept are tokens, and one more comes with them.
    """
    num_tokens, next_start, num_kept, is_decoding = 0, 0, 0, False
    for event in log.of(request_id):
        data = event.data
        match event.kind:
            case KIND.ARRIVED:
                num_tokens = data["prompt_tokens"]
            case KIND.ADMITTED:
                assert next_start == 0 <= data["cached_tokens"] <= num_tokens, event
                next_start = data["cached_tokens"]  # all of the prompt in a fork
            case KIND.PREEMPTED:
                assert data["num_computed"] == next_start, event
                next_start, is_decoding = 0, False
            case KIND.SLICE:
                assert data["start"] == next_start < data["stop"], event
                assert data["stop"] <= num_tokens or (is_decoding and data["start"] == num_tokens - 1), event
                assert data["phase"] == ("decode" if is_decoding else "prefill"), event  # fault D15
                next_start = data["stop"]
            case KIND.DRAFTS:
                assert data["drafted"] == next_start - num_tokens > 0, event
                next_start, num_kept = num_tokens, data["accepted"]
                assert 0 <= num_kept <= data["drafted"], event
            case KIND.TOKENS:
                assert next_start == num_tokens, f"{event} before all of its tokens were computed"  # fault D10
                assert data["count"] == num_kept + 1, event  # fault E13
                num_tokens, next_start, num_kept = num_tokens + num_kept + 1, num_tokens + num_kept, 0
                is_decoding = True
