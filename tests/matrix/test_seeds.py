"""A seeded request draws the same tokens whatever runs beside it: fault I3."""

from __future__ import annotations

import pytest
from alone import difference
from erratic import Erratic
from log_rules import forked_ids
from plain_drafts import drawn_answer, note_drafts
from poisoned_engine import Ask, poisoned_engine, request_of, serve
from routes import prompt

from minserve.engine_config import EngineConfig
from minserve.events import EventKind
from minserve.request import SamplingParams

SEEDED = SamplingParams(max_tokens=12, temperature=0.8, top_p=0.9, seed=42, ignore_eos=True, logprobs=258)
GREEDY = SamplingParams(max_tokens=9, ignore_eos=True, logprobs=258)
NEIGHBOURS = {
    "nobody": (),
    "greedy": (GREEDY,) * 3,
    "unseeded": (SamplingParams(max_tokens=9, temperature=1.3, ignore_eos=True, logprobs=258),) * 3,
    "seeded": tuple(SamplingParams(max_tokens=9, temperature=0.8, top_k=5, seed=42 + i, ignore_eos=True, logprobs=258)
                    for i in range(3)),
    "penalised": (SamplingParams(max_tokens=9, repetition_penalty=1.3, logit_bias={7: 2.0}, min_p=0.1, seed=1,
                                 temperature=0.9, ignore_eos=True, logprobs=258),) * 3,
}  # fmt: skip


@pytest.mark.parametrize("neighbours", NEIGHBOURS)
@pytest.mark.parametrize("place", ["first", "in the middle", "last"])
def test_a_seeded_request_draws_alike_beside_anybody_in_any_order(neighbours, place, alone):
    reference = alone["mixture"]
    asks = [Ask(prompt(6 + 5 * i, 2), params) for i, params in enumerate(NEIGHBOURS[neighbours])]
    at = {"first": 0, "in the middle": len(asks) // 2, "last": len(asks)}[place]
    asks.insert(at, Ask(prompt(13, 2), SEEDED))
    config = EngineConfig(dtype="float64", batch_tokens=8, page_size=4, num_pages=40)
    engine = poisoned_engine(reference.model, config)
    for ask, (found,) in zip(asks, serve(engine, asks), strict=True):
        said = difference(found, reference.answer(ask.prompt_ids, ask.params))
        assert not said, f"prompt of {len(ask.prompt_ids)} tokens: {said}"


@pytest.mark.parametrize("neighbours", NEIGHBOURS)
@pytest.mark.parametrize("draft", ["mtp", "erratic"])
@pytest.mark.parametrize("place", ["first", "last"])
def test_a_seeded_request_draws_alike_with_drafts(neighbours, draft, place, alone):
    """Where there is room for all of its drafts it has as many in each step, whatever the others have.

    Which of them are kept, and what follows, is what its own numbers say.
    """
    reference, mine = alone["mixture"], Ask(prompt(13, 2), SEEDED)
    asks = [Ask(prompt(6 + 5 * i, 2), params) for i, params in enumerate(NEIGHBOURS[neighbours])]
    asks.insert(0 if place == "first" else len(asks), mine)
    found, counts = [], []
    for company in ([mine], asks):
        drafter = Erratic(reference.model, {}) if draft == "erratic" else draft
        config = EngineConfig(dtype="float64", batch_tokens=64, page_size=4, num_pages=60, draft=drafter)
        engine = poisoned_engine(reference.model, config)
        drafts, number = note_drafts(engine), company.index(mine)
        found += serve(engine, company)[number]
        counts.append([len(row.ids) for (request_id, _), row in drafts.items() if request_id == f"{number}.0"])
        wanted = drawn_answer(reference.model, request_of(number, mine), found[-1], drafts)
        assert not difference(found[-1], wanted)
    assert counts[0] == counts[1] and sum(counts[0]) > 5
    assert not difference(found[1], found[0])


def test_a_drafter_without_ideas_changes_no_draw(alone):
    reference, asks = alone["mixture"], [Ask(prompt(13, 2), SEEDED), Ask(prompt(6, 2), GREEDY)]
    drafter = Erratic(reference.model, {}, counts=(0,))
    engine = poisoned_engine(reference.model, EngineConfig(dtype="float64", num_pages=60, draft=drafter))
    for ask, (found,) in zip(asks, serve(engine, asks), strict=True):
        assert not difference(found, reference.answer(ask.prompt_ids, ask.params))


def test_the_draws_vary_at_all(alone):
    tokens = {tuple(alone["mixture"].answer(prompt(13, 2), params).token_ids)
              for params in (SEEDED, *NEIGHBOURS["seeded"], GREEDY)}  # fmt: skip
    assert len({first[:5] for first in tokens}) == 5


@pytest.mark.parametrize("name", ["mixture", "attention"])
@pytest.mark.parametrize("outputs", [1, 3])
def test_a_seeded_request_draws_alike_after_preemption(name, outputs, alone):
    """Thrown out in the middle of its output, it reads again what it drew, and its draws go on where they were."""
    params = SamplingParams(max_tokens=16, temperature=0.8, top_p=0.9, seed=5, n=outputs, ignore_eos=True, logprobs=258)
    asks = [Ask(prompt(14 - i, 3), params) for i in range(3)]
    config = EngineConfig(dtype="float64", batch_tokens=8, page_size=4, num_pages=12)
    engine = poisoned_engine(alone[name].model, config)
    for ask, family in zip(asks, serve(engine, asks), strict=True):
        for index, found in enumerate(family):
            assert not difference(found, alone[name].answer(ask.prompt_ids, ask.params, index))
    thrown_out = {event.request_id for event in engine.log
                  if event.kind is EventKind.PREEMPTED and event.data["num_computed"] > 14 + 1}  # fmt: skip
    assert thrown_out and (outputs == 1 or thrown_out & forked_ids(engine.log))
