"""Engines that are broken on purpose, and routes that have to show it."""

from __future__ import annotations

from routes import FACTORS, Route, problems, run

PLAIN = {name: levels[0] for name, levels in FACTORS.items()} | {"batch_tokens": 9, "page_size": 4, "snapshot_every": 8}


def swap(engine, **functions):
    """Put other functions behind the layers. Changes: the engine."""
    engine.memory.implementation = engine.memory.implementation._replace(**functions)


def check_seen(fault, levels, alone, monkeypatch):
    """Fail unless a route is right as it is, and is not any more when `fault` has broken the engine.

    Arguments:
        fault: (engine, monkeypatch) -> None; breaks the engine.
        levels: of the route, where they are not the plain ones.
    """
    route = Route({**PLAIN, **levels}, (11, 27, 8, 22, 16, 37))
    assert not problems(route, run(route, alone), alone)
    with monkeypatch.context() as patch:
        ran = run(route, alone, lambda engine: fault(engine, patch))
    assert problems(route, ran, alone)
