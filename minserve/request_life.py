"""A request inside the engine: what follows its output, who rides along, and what each step brings it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from minserve.request import FinishReason, Request
from minserve.stopping import StopChecker


class Progress(NamedTuple):
    """What a step brought to one request: new tokens, the text they set free, and in the end why it ended.

    Fields: `finish_reason` is None while it goes on; `error` says what went wrong, if something did.
    """

    request: Request
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[dict[int, float] | None, ...] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None


@dataclass
class Life:
    """A request, what cuts its output, and its riders: those that fork from it when their prompt is computed."""

    request: Request
    checker: StopChecker
    riders: list[Request] = field(default_factory=list)
