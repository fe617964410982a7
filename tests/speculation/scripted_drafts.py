"""Drafters for the scripted model of the small engines, which know how its text goes on, or do not."""

from __future__ import annotations

from minserve.events import EventKind


def goes_on(tokens, num: int) -> list[int]:
    """The next tokens of the scripted model's text."""
    tokens = list(tokens)
    start = len(tokens)
    for _ in range(num):
        tokens.append((3 * tokens[-1] + len(tokens) - 1) % 25)
    return tokens[start:]


class GoesOn:
    """Drafts as many tokens as are wanted; the first `num_right` of a step are right. It notes what it was asked."""

    def __init__(self, num_right=100):
        self.num_right, self.asked = num_right, []

    def propose(self, tokens, most):
        self.asked.append((tuple(tokens), most))
        right = goes_on(tokens, most)
        return right[: self.num_right] + [(token + 1) % 25 for token in right[self.num_right :]]


class Fails:
    """Drafts right tokens, or does what a test wants it to do instead."""

    def __init__(self):
        self.instead = None

    def do(self, instead):
        """Call this instead from now on; None: work again."""
        self.instead = instead

    def propose(self, tokens, most):
        return goes_on(tokens, most) if self.instead is None else self.instead(tokens, most)


def verified(engine, request_id=None) -> list[tuple[int, int]]:
    """(drafted, accepted) of every step and row that had drafts, of one request or of all."""
    events = engine.log if request_id is None else engine.log.of(request_id)
    return [(e.data["drafted"], e.data["accepted"]) for e in events if e.kind is EventKind.DRAFTS]


def by_step(engine) -> list[list[tuple[int, int]]]:
    """(drafted, accepted) of the decoding rows of each step, (0, 0) of those without drafts."""
    steps: list[dict] = [{}]
    for event in engine.log:
        if event.kind is EventKind.SLICE and event.data["phase"] == "decode":
            steps[-1][event.request_id] = (0, 0)
        if event.kind is EventKind.STEP:
            steps.append({})
        if event.kind is EventKind.DRAFTS:
            steps[-2][event.request_id] = event.data["drafted"], event.data["accepted"]
    return [list(rows.values()) for rows in steps[:-1]]
