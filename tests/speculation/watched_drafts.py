"""An engine whose drafts by the MTP head are written down, and the oracle: the head run over the whole text."""

from __future__ import annotations

from typing import NamedTuple

import torch
from poisoned_engine import poisoned_engine
from small_engine import check_idle, run_all

from minserve.engine import Engine
from minserve.engine_config import EngineConfig
from minserve.events import EventKind
from minserve.model.evaluate import draft_probs
from minserve.request import Request, SamplingParams

TOLERANCE = 1e-9

DRAWN = {"temperature": 2.0}


class Seen(NamedTuple):
    """A request's drafts in a step: the tokens they follow, the drafts, and what each was drawn from, if it was."""

    request: Request
    tokens: list[int]
    ids: list[int]
    q: list[torch.Tensor]


class Wrapped:
    """A model that counts the forwards of its head, and lets tests change or fail its own.

    Arguments:
        change: called with the model's output, and returns another, or raises.
    """

    def __init__(self, inner, change=lambda output: output):
        self.inner, self.change, self.num_head_calls = inner, change, 0

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def __call__(self, step, memory):
        return self.change(self.inner(step, memory))

    def draft_hidden(self, step, hidden, memory):
        self.num_head_calls += 1
        return self.inner.draft_hidden(step, hidden, memory)


def watched_engine(model, **config) -> tuple[Engine, list[Seen]]:
    """An engine that drafts by its head, with NaN in all memory that is nobody's, and its drafts as they are made."""
    own = {"dtype": "float64", "page_size": 4, "num_pages": 64, "num_states": 40, "max_running": 6, "batch_tokens": 32,
           "snapshot_every": 8, "draft": "mtp", "adapt_drafts": False, "check": True}  # fmt: skip
    engine = poisoned_engine(model, EngineConfig(**{**own, **config}))
    propose, seen = engine.drafting.propose, []

    def propose_and_see(slices):
        rows = propose(slices)
        seen.extend(Seen(row.request, [*row.request.tokens], [*row.ids], [*row.q]) for row in rows)
        return rows

    engine.drafting.propose = propose_and_see
    return engine, seen


def request(name, prompt, max_tokens=8, **params) -> Request:
    """A request that draws nothing unless it has a temperature; its random numbers are its name's."""
    seed = None if "seed" in params else sum(map(ord, str(name)))
    return Request(name, prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True, **params), seed)


def serve(engine: Engine, *requests: Request) -> None:
    """Serve requests together, to their end."""
    for one in requests:
        engine.add(one)
    run_all(engine, max_steps=2000)
    check_idle(engine)


def difference(model, seen: Seen) -> float:
    """How far the drafts of a step are from the oracle's: the largest difference of q, infinite for a greedy token."""
    params, last = seen.request.params, len(seen.tokens) - 2
    _, q = draft_probs(model, [*seen.tokens, *seen.ids], len(seen.ids), params.temperature or 1.0)
    if params.is_greedy:
        return max(
            0.0 if of_depth[last].argmax() == token else torch.inf for of_depth, token in zip(q, seen.ids, strict=True)
        )
    return max((of_depth[last] - mine).abs().max().item() for of_depth, mine in zip(q, seen.q, strict=True))


def check_drafts(model, seen: list[Seen], at_least: int = 1) -> None:
    """Fail unless there are drafts, and all are the oracle's."""
    assert len(seen) >= at_least
    for one in seen:
        off = difference(model, one)
        assert off <= TOLERANCE, f"{one.request.id}, drafts {one.ids} behind {len(one.tokens)} tokens: q is {off} off"


def check_all_drafted(engine: Engine, seen: list[Seen], one: Request) -> None:
    """Fail unless a request had all drafts that could be of use in every step but its first."""
    counts = [event.data["count"] for event in engine.log.of(one.id) if event.kind is EventKind.TOKENS]
    left = one.params.max_tokens - counts[0]
    wanted = []
    for count in counts[1:]:
        wanted.append(min(engine.config.draft_tokens, left - 1))
        left -= count
    assert [len(row.ids) for row in seen if row.request is one] == [num for num in wanted if num]


def prompt(num_tokens: int, salt: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * salt + num_tokens)
    return torch.randint(0, 256, (num_tokens,), generator=generator).tolist()


def events(engine, one, kind):
    return [event.data for event in engine.log.of(one.id) if event.kind is kind]
