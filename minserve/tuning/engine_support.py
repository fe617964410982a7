"""What public engines can do with hybrid models, from a dated table: engines change, so it is data and never prose."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True)
class Support:
    """One ability of one engine, for models with states beside pages.

    `status` is "yes", "partly" or "no"; `how` says with which means, or what is missing; `since` is the change that
    brought it, where known; `read_on` the day on which the source was read.
    """

    engine: str
    ability: str
    status: str
    how: str
    since: str | None
    source: str
    read_on: str


def engine_support() -> tuple[Support, ...]:
    """The rows of the data file, an engine's together.

    >>> [row.status for row in engine_support() if row.ability == "speculation"]
    ['partly', 'partly']
    """
    content = json.loads((files("minserve") / "data" / "engine_support.json").read_text(encoding="utf-8"))
    return tuple(Support(**row, read_on=content["read_on"]) for row in content["support"])
