"""The routes of the matrix: on each, an engine with some configuration serves some workload.

A factor more is a line more in `FACTORS`: its name is a field of `EngineConfig`, or `Route` knows what it means. Rows
are chosen so that every two levels meet; prompts of every length are spread over them so that each meets every level.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType

import torch
from alone import Alone, Answer, difference
from covering import Row, covering_rows, spread
from gated_models import MODELS
from poisoned_engine import WHEN_IDLE, Ask, poisoned_engine, serve

from minserve.engine import Engine
from minserve.engine_config import EngineConfig
from minserve.paging.page_table import pages_needed
from minserve.request import SamplingParams

FACTORS = MappingProxyType(
    {
        "batch_tokens": (1, 2, 3, 4, 5, 6, 7, 8, 9, 64),
        "page_size": (1, 3, 4, 16),
        "model": tuple(MODELS),
        "company": ("alone", "joining", "preempted"),
        "outputs": (1, 3),  # three are forks of one prompt, drawn with seeds; one is greedy
        "scored": (False, True),
        "policy": ("fcfs", "priority", "longest_prefix"),
        "prefix_cache": (True, False),
        "prompts": ("unlike", "alike", "twice"),
        "snapshot_every": (1, 3, 8, 64),
        "share_reads_from": (1, 4096),  # whether rows read what they share together, as soon as there is anything
        "states": ("many", "few"),  # slots for snapshots beside those of the requests that run
    }
)
LENGTHS = tuple(17 * i % 41 for i in range(1, 41))  # 1 to 40, long ones beside short ones
PER_ROUTE = 8
MAX_RUNNING = 8
LONGEST = 64  # tokens of one request, at most, on a route with room for all


def is_possible(row: Row) -> bool:
    """Whether the levels can go together: one or two tokens per step leave nobody to preempt, except forks."""
    few = row.get("batch_tokens") in (1, 2)
    return not (few and (row.get("company"), row.get("outputs")) == ("preempted", 1))


def prompt(length: int, salt: int = 0) -> tuple[int, ...]:
    """Random bytes, unlike those of any other length: what belongs to another request shows."""
    generator = torch.Generator().manual_seed(1000 * salt + length)
    return tuple(torch.randint(0, 256, (length,), generator=generator).tolist())


def alike(length: int) -> tuple[int, ...]:
    """A prompt that begins as those of all other lengths do, up to the last 0 to 4 tokens; some are its beginnings."""
    num_own = min(length, length % 5)
    return prompt(LONGEST, 2)[: length - num_own] + prompt(length)[:num_own]


@dataclass(frozen=True)
class Route:
    """One row of the matrix: a level per factor, and the lengths of its prompts."""

    levels: Mapping[str, Hashable]
    lengths: tuple[int, ...]

    def __str__(self) -> str:
        return "-".join(f"{name}={level}" for name, level in self.levels.items())

    @property
    def config(self) -> EngineConfig:
        """How the engine runs: pages for everybody, or as few as the longest request needs by itself."""
        size = self.levels["page_size"]
        own = {name: level for name, level in self.levels.items() if name in {f.name for f in fields(EngineConfig)}}
        longest = max(len(ask.prompt_ids) + ask.params.max_tokens for ask in self.asks())
        tight = self.levels["company"] == "preempted"
        num_pages = pages_needed(longest, size) if tight else MAX_RUNNING * pages_needed(LONGEST, size)
        num_states = MAX_RUNNING + (64 if self.levels["states"] == "many" else 2)
        return EngineConfig(dtype="float64", num_pages=num_pages, max_running=MAX_RUNNING, num_states=num_states, **own)

    def params(self, length: int, max_tokens: int) -> SamplingParams:
        """What a request asks for: every log-probability, and outputs as the route has them."""
        outputs = self.levels["outputs"]
        drawn = {"temperature": 0.8, "top_p": 0.9, "n": outputs, "seed": 100 * length} if outputs > 1 else {}
        scored = {"prompt_logprobs": 5} if self.levels["scored"] else {}
        return SamplingParams(
            max_tokens=max_tokens, logprobs=258, ignore_eos=True, priority=length % 3, **drawn, **scored
        )

    def asks(self) -> list[Ask]:
        """The workload: one request per length or two, and the company that the route says."""
        make = alike if self.levels["prompts"] == "alike" else prompt
        lengths = self.lengths * (2 if self.levels["prompts"] == "twice" else 1)
        match self.levels["company"]:
            case "alone":  # one after the other: each finds what the one before left behind
                return [Ask(make(n), self.params(n, 2 + n % 4), WHEN_IDLE) for n in lengths]
            case "joining":  # at different steps, to leave at different steps; two of them in the middle of it
                asks = [Ask(make(n), self.params(n, 2 + n % 6), 2 * i) for i, n in enumerate(lengths)]
                guests = ((23, 1, 9), (7, 3, 2))
                return [*asks, *(Ask(prompt(n, 1), self.params(n, 16), at, leaves) for n, at, leaves in guests)]
            case "preempted":  # all at once, and each outgrows the pages that were free when it was let in
                size = self.levels["page_size"]
                most = 12 if self.levels["outputs"] > 1 else 18 + size
                return [Ask(make(n), self.params(n, min(44 + size - n, most))) for n in sorted(lengths)]


def run(route: Route, alone: Mapping[str, Alone], change: Callable[[Engine], None] | None = None) -> tuple:
    """The engine of a route after its workload, and the answers; `change` may do something to the engine before."""
    engine = poisoned_engine(alone[route.levels["model"]].model, route.config)
    if change is not None:
        change(engine)
    return engine, serve(engine, route.asks())


def problems(route: Route, answers: list[list[Answer]], alone: Mapping[str, Alone]) -> list[str]:
    """What is wrong with the answers of a route, a line each."""
    reference = alone[route.levels["model"]]
    said = []
    for ask, family in zip(route.asks(), answers, strict=True):
        for index, found in enumerate(family):
            wrong = difference(found, reference.answer(ask.prompt_ids, ask.params, index))
            if wrong or (found.finish_reason == "abort") != (ask.leaves is not None):
                said.append(f"prompt of {len(ask.prompt_ids)} tokens, output {index}: {wrong or found.finish_reason}")
    return said


def routes() -> list[Route]:
    """The routes, the same every time."""
    rows = covering_rows(FACTORS, is_possible)
    return [Route(row, lengths) for row, lengths in zip(rows, spread(rows, LENGTHS, PER_ROUTE), strict=True)]
