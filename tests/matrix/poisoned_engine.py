"""An engine in whose memory every number that nobody has written is NaN, and the serving of a workload by it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from alone import Answer

from minserve.clock import VirtualClock
from minserve.engine import Engine
from minserve.engine_config import EngineConfig
from minserve.events import EventLog
from minserve.model.hybrid_lm import HybridLM
from minserve.model.tokenizer import ByteTokenizer
from minserve.parts import Parts
from minserve.request import Request, SamplingParams

WHEN_IDLE = math.inf


def cost_s(rows: Sequence[tuple[int, int]]) -> float:
    """What a step costs: something, and a little for each token, so that drafts pay as long as some are kept."""
    return 1 + 0.2 * sum(stop - start for start, stop in rows)


@dataclass(frozen=True)
class Ask:
    """A request of a workload.

    Fields: `arrives` before this step, or `WHEN_IDLE`, when all others are done; `leaves` after so many more steps,
    aborted, if it is not None.
    """

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    arrives: float = 0
    leaves: int | None = None


def poisoned_engine(model: HybridLM, config: EngineConfig, parts: Parts | None = None) -> Engine:
    """An engine with NaN in all pages and state slots, from the start and again whenever one is set free: fault K4."""
    log, new_decoder = EventLog(VirtualClock()), ByteTokenizer().incremental
    engine = Engine(model, model.config, config, log, new_decoder, parts, cost_s)
    memory, allocator, states = engine.memory, engine.cache.allocator, engine.cache.states
    pages = [*memory.k_pages.values(), *memory.v_pages.values()]
    slots = [*memory.tails.values(), *memory.states.values(), *([] if memory.hidden is None else [memory.hidden])]
    release_pages, release_slot = allocator.release, states.release

    def poison(pools: Iterable[torch.Tensor], numbers: Iterable[int]) -> None:
        at = torch.tensor([*numbers], dtype=torch.long)
        for pool in pools if len(at) else ():
            pool.index_fill_(0, at, torch.nan)

    def release_and_poison_pages(released: Sequence[int]) -> None:
        released = list(released)
        release_pages(released)
        poison(pages, {page for page in released if not allocator.ref_count(page)})

    def release_and_poison_slot(slot: int) -> None:
        release_slot(slot)
        poison(slots, [slot] if not states.ref_count(slot) else [])

    poison(pages, range(allocator.num_pages))
    poison(slots, range(states.num_slots))
    allocator.release, states.release = release_and_poison_pages, release_and_poison_slot
    return engine


def serve(engine: Engine, asks: Sequence[Ask]) -> list[list[Answer]]:
    """Serve a workload to its end, and return the answers of each request, one per output.

    Checks every invariant after each step, and that at idle all that is not free is the tree's, to be evicted: CONS.
    """
    families = [[request_of(number, ask, i) for i in range(ask.params.n)] for number, ask in enumerate(asks)]
    answers = {request.id: Answer() for family in families for request in family}
    waiting = sorted(range(len(asks)), key=lambda number: asks[number].arrives)
    leaving: dict[int, list[Request]] = {}
    most = 20 + 4 * sum(len(ask.prompt_ids) + ask.params.max_tokens * ask.params.n for ask in asks)
    now = 0
    while waiting or engine.has_work:
        while waiting and (asks[waiting[0]].arrives <= now or not engine.has_work):
            number = waiting.pop(0)
            first, *riders = families[number]
            engine.add(first, riders)
            if asks[number].leaves is not None:
                leaving.setdefault(now + asks[number].leaves, []).extend(families[number])
        _note(answers, engine.step())
        engine.check()
        now += 1
        for request in leaving.pop(now, ()):
            engine.abort(request.id)
        assert now <= most, f"after {now} steps there is still work: {engine.batcher.running}"
    _note(answers, engine.step())
    cache = engine.cache
    assert cache.num_takeable == cache.allocator.num_pages and not cache.holders
    assert len(cache.states.held) == (0 if cache.snapshots is None else len(cache.snapshots))
    if not engine.config.prefix_cache:
        assert cache.allocator.num_free == cache.allocator.num_pages and not cache.states.held
    for request in (request for family in families for request in family):
        answers[request.id].prompt_logprobs = request.prompt_logprobs
    return [[answers[request.id] for request in family] for family in families]


def request_of(number: int, ask: Ask, index: int = 0) -> Request:
    """A fresh request for one output of an ask; a greedy one needs a seed as well, and draws nothing with it."""
    seed = 0 if ask.params.seed is None else None
    return Request(f"{number}.{index}", ask.prompt_ids, ask.params, seed, index)


def _note(answers: dict[str, Answer], progress: Iterable) -> None:
    """Put what a step brought where it belongs. Changes: the answers."""
    for one in progress:
        answer = answers[one.request.id]
        answer.token_ids += one.token_ids
        answer.logprobs += one.logprobs
        answer.finish_reason, answer.error = one.finish_reason, one.error
