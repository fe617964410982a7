"""The routes of the matrix: on each, an engine with some configuration serves some workload.

A factor more is a line more in `FACTORS`: its name is a field of `EngineConfig`, or `Route` knows what it means. Rows
are chosen so that every two levels meet; prompts of every length are spread over them so that each meets every level.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType

import torch
from alone import Alone, Answer, difference
from covering import Row, covering_rows, spread
from erratic import Erratic
from gated_models import MODELS
from plain_drafts import Drafts, drawn_answer, note_drafts, wrong_drafts
from poisoned_engine import WHEN_IDLE, Ask, poisoned_engine, request_of, serve

from minserve.engine import Engine
from minserve.engine_config import EngineConfig
from minserve.paging.page_table import pages_needed
from minserve.request import SamplingParams
from minserve.step_costs import CostTable

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
        "prompts": ("unlike", "alike", "twice", "continued"),
        "snapshot_every": (1, 3, 8, 64),
        "share_reads_from": (1, 4096),  # whether rows read what they share together, as soon as there is anything
        "states": ("many", "few"),  # slots for snapshots beside those of the requests that run
        "draft": ("none", "ngram", "mtp", "erratic"),
        "draft_tokens": (1, 2, 4),
        "depth": ("fixed", "by prices", "as measured"),  # of drafts
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

    def config(self, reference: Alone) -> EngineConfig:
        """How the engine runs: pages for everybody, or as few as the longest request needs by itself."""
        size, asks = self.levels["page_size"], self.asks(reference)
        own = {name: level for name, level in self.levels.items() if name in {f.name for f in fields(EngineConfig)}}
        if own["draft"] == "erratic":
            told = {} if self.levels["outputs"] > 1 else {ask.prompt_ids: answer_ids(reference, ask) for ask in asks}
            own["draft"] = Erratic(reference.model, told)
        if self.levels["depth"] == "by prices":
            own["step_costs"] = CostTable(lambda rows, tokens: 1 + 0.1 * tokens, lambda rows: 0.05)
        longest = max(len(ask.prompt_ids) + ask.params.max_tokens for ask in asks)
        tight = self.levels["company"] == "preempted"
        num_pages = pages_needed(longest, size) if tight else MAX_RUNNING * pages_needed(LONGEST, size)
        num_states = MAX_RUNNING + (64 if self.levels["states"] == "many" else 2)
        own |= {"num_states": num_states, "adapt_drafts": self.levels["depth"] != "fixed"}
        return EngineConfig(dtype="float64", num_pages=num_pages, max_running=MAX_RUNNING, **own)

    def params(self, length: int, max_tokens: int) -> SamplingParams:
        """What a request asks for: every log-probability, and outputs as the route has them."""
        outputs = self.levels["outputs"]
        drawn = {"temperature": 0.8, "top_p": 0.9, "n": outputs, "seed": 100 * length} if outputs > 1 else {}
        scored = {"prompt_logprobs": 5} if self.levels["scored"] else {}
        return SamplingParams(
            max_tokens=max_tokens, logprobs=258, ignore_eos=True, priority=length % 3, **drawn, **scored
        )

    def asks(self, reference: Alone) -> list[Ask]:
        """The workload: one request per length or two, and the company that the route says."""
        make = alike if self.levels["prompts"] == "alike" else prompt
        prompts = [make(n) for n in self.lengths]
        match self.levels["prompts"]:
            case "twice":
                prompts *= 2
            case "continued":  # prompt and answer, and as the prompt ends: it goes on as before, more often than not
                answers = [answer_ids(reference, Ask(ids, self.params(len(ids), 1 + len(ids) % 5))) for ids in prompts]
                spoken = [(*ids, *answer, *ids[-3:]) for ids, answer in zip(prompts, answers, strict=True)]
                prompts += [ids for ids in spoken if len(ids) <= 44]
        match self.levels["company"]:
            case "alone":  # one after the other: each finds what the one before left behind
                return [Ask(ids, self.params(len(ids), 2 + len(ids) % 4), WHEN_IDLE) for ids in prompts]
            case "joining":  # at different steps, to leave at different steps; two of them in the middle of it
                asks, at, left = [], 0, max(1, self.levels["batch_tokens"] - self.levels["outputs"])
                for ids in prompts:
                    asks.append(Ask(ids, self.params(len(ids), 2 + len(ids) % 6), at))
                    at += 3 + len(ids) // left  # when it has been read beside another one, and speaks
                guests = ((23, 1, 9), (7, 3, 2))
                return [*asks, *(Ask(prompt(n, 1), self.params(n, 16), at, leaves) for n, at, leaves in guests)]
            case "preempted":  # all at once, and each outgrows the pages that were free when it was let in
                size = self.levels["page_size"]
                most = 12 if self.levels["outputs"] > 1 else 17 + size + size // 2
                prompts = sorted(prompts, key=len)
                return [Ask(ids, self.params(len(ids), min(44 + size - len(ids), most))) for ids in prompts]


def answer_ids(reference: Alone, ask: Ask) -> list[int]:
    """What a request gets alone."""
    return reference.answer(ask.prompt_ids, ask.params).token_ids


@dataclass
class Ran:
    """A route that has been run: its engine, the answers, and the drafts of every step."""

    engine: Engine
    answers: list[list[Answer]]
    drafts: Drafts


def run(route: Route, alone: Mapping[str, Alone], change: Callable[[Engine], None] | None = None) -> Ran:
    """Serve a route's workload; `change` may do something to the engine before."""
    reference = alone[route.levels["model"]]
    engine = poisoned_engine(reference.model, route.config(reference))
    drafts = note_drafts(engine)
    if change is not None:
        change(engine)
    return Ran(engine, serve(engine, route.asks(reference)), drafts)


def problems(route: Route, ran: Ran, alone: Mapping[str, Alone]) -> list[str]:
    """What is wrong with the answers of a route, a line each, and with the drafts of a model's own head."""
    reference, said = alone[route.levels["model"]], []
    for number, (ask, family) in enumerate(zip(route.asks(reference), ran.answers, strict=True)):
        for index, found in enumerate(family):
            request = request_of(number, ask, index)
            wanted = reference.answer(ask.prompt_ids, ask.params, index)
            rows = {at: row for (name, at), row in ran.drafts.items() if name == request.id}
            if rows and not ask.params.is_greedy:  # the drafts have a say in what is drawn, and in nothing else
                drawn = drawn_answer(reference.model, request, found, ran.drafts)
                wanted = replace(drawn, prompt_logprobs=wanted.prompt_logprobs)
            wrong = difference(found, wanted)
            if route.levels["draft"] == "mtp" and not wrong:
                wrong = wrong_drafts(reference.model, [*ask.prompt_ids, *found.token_ids], rows)
            if wrong or (found.finish_reason == "abort") != (ask.leaves is not None):
                said.append(f"prompt of {len(ask.prompt_ids)} tokens, output {index}: {wrong or found.finish_reason}")
    return said


def routes() -> list[Route]:
    """The routes, the same every time."""
    rows = covering_rows(FACTORS, is_possible)
    return [Route(row, lengths) for row, lengths in zip(rows, spread(rows, LENGTHS, PER_ROUTE), strict=True)]
