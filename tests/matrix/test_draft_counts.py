"""Any number of drafts in any step, none and unequal ones side by side: fault E4."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import cycle

import pytest
from alone import difference
from erratic import Erratic
from gated_models import MODELS
from log_rules import check_slices, check_steps, verified
from poisoned_engine import Ask, poisoned_engine, serve
from routes import answer_ids, prompt

from minserve.engine_config import EngineConfig
from minserve.events import EventKind
from minserve.request import SamplingParams

GREEDY = SamplingParams(max_tokens=14, ignore_eos=True, logprobs=258)
PENALISED = replace(GREEDY, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.4, logit_bias={7: 2.0})
COUNTS = ((3, 0, 2, 0), (0, 0, 0, 5), (1, 0), (4,), (2, 3, 0, 1, 0))
SPOILED = {"all right": (None,), "the first wrong": (0,), "the last wrong": (None, 1, 2, 3), "now and then": (None, 0)}


def serve_drafted(reference, asks, drafter, **config):
    """Serve a workload with drafts; fail unless each answer is what the request gets alone. Returns the engine."""
    own = {"page_size": 4, "num_pages": 80, "snapshot_every": 3, "draft_tokens": 5, "adapt_drafts": False}
    engine = poisoned_engine(reference.model, EngineConfig(dtype="float64", draft=drafter, **own | config))
    for ask, (found,) in zip(asks, serve(engine, asks), strict=True):
        said = difference(found, reference.answer(ask.prompt_ids, ask.params))
        assert not said, f"prompt of {len(ask.prompt_ids)} tokens: {said}"
    for request_id in engine.log.request_ids:
        check_slices(engine.log, request_id)
    return engine


def told(reference, asks):
    """What comes behind each prompt."""
    return {ask.prompt_ids: answer_ids(reference, ask) for ask in asks}


def row_counts(log):
    """By step, how many drafts each decoding row had."""
    drafted, rows = {}, defaultdict(list)
    for event in reversed([*log]):
        if event.kind is EventKind.DRAFTS:
            drafted[event.request_id] = event.data["drafted"]
        elif event.kind is EventKind.SLICE:
            num_drafts = drafted.pop(event.request_id, 0)
            if event.data["phase"] == "decode":
                rows[event.data["step"]].append(num_drafts)
    return rows


@pytest.mark.parametrize("name, counts", [("dense", COUNTS[0]), *zip(cycle(MODELS), COUNTS, strict=False)], ids=str)
def test_any_pattern_of_counts_and_of_right_drafts(name, counts, alone):
    reference, asks = alone[name], [Ask(prompt(n, 4), GREEDY, n) for n in (3, 9, 4)]
    for number, spoiled in enumerate(SPOILED.values()):
        drafter = Erratic(reference.model, told(reference, asks), counts, spoiled)
        log = serve_drafted(reference, asks, drafter, page_size=(1, 4, 3, 16)[number]).log
        seen = {drafted for drafted, _ in verified(log)}
        assert seen and (len(counts) == 1 or max(counts) in seen)
        if spoiled == (None,):
            assert all(kept == drafted for drafted, kept in verified(log))
        if spoiled == (0,):
            assert not any(kept for _, kept in verified(log))


@pytest.mark.parametrize("name", MODELS)
def test_rows_of_one_step_have_counts_of_their_own(name, alone):
    reference, asks = alone[name], [Ask(prompt(n, 4), GREEDY) for n in (3, 9, 4, 14)]
    drafter = Erratic(reference.model, told(reference, asks), (3, 0, 2, 0, 1))
    rows = row_counts(serve_drafted(reference, asks, drafter).log)
    assert any(0 in counts and len({*counts} - {0}) > 1 for counts in rows.values())


@pytest.mark.parametrize("draft", ["erratic", "mtp"])
@pytest.mark.parametrize("name", MODELS)
def test_penalties_count_the_drafts_before(name, draft, alone):
    """A draft that repeats a token lowers it for the drafts behind, as it would if it had been said."""
    reference, asks = alone[name], [Ask(prompt(n, 4), PENALISED) for n in (3, 9, 4)]
    drafter = Erratic(reference.model, told(reference, asks)) if draft == "erratic" else draft
    counts = verified(serve_drafted(reference, asks, drafter).log)
    assert 0 < sum(kept for _, kept in counts) < sum(drafted for drafted, _ in counts)
    assert any(kept > 1 for _, kept in counts)


@pytest.mark.parametrize("name", ["dense", "attention"])
@pytest.mark.parametrize("draft", ["erratic", "mtp"])
@pytest.mark.parametrize("batch_tokens", [2, 3, 6, 9])
def test_a_budget_that_leaves_little_room_for_drafts(name, draft, batch_tokens, alone):
    """A long prompt is read beside two that speak: their drafts come and go with what is left of each step."""
    reference = alone[name]
    asks = [Ask(prompt(2, 4), GREEDY), Ask(prompt(3, 4), GREEDY), *(Ask(prompt(n, 4), GREEDY, 4) for n in (30, 17))]
    drafter = Erratic(reference.model, told(reference, asks), (9,)) if draft == "erratic" else draft
    log = serve_drafted(reference, asks, drafter, batch_tokens=batch_tokens).log
    check_steps(log, batch_tokens)
    assert 0 < max(drafted for drafted, _ in verified(log)) <= batch_tokens - 1
