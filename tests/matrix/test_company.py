"""Routes that need a scene of their own: the same request again after others, one among very many, and long prompts."""

from __future__ import annotations

from itertools import product

import pytest
from alone import TOLERANCE, Alone, difference
from gated_models import MODELS
from log_rules import cached_tokens, verified
from plain_drafts import note_drafts, wrong_drafts
from poisoned_engine import WHEN_IDLE, Ask, poisoned_engine, serve
from routes import prompt

from minserve.engine_config import EngineConfig
from minserve.request import SamplingParams

PARAMS = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=258, prompt_logprobs=5)
CHAT = SamplingParams(max_tokens=14, ignore_eos=True, logprobs=258)
LONG = SamplingParams(max_tokens=20, ignore_eos=True, logprobs=258, prompt_logprobs=5)


def check_answers(asks, answers, reference: Alone):
    """Every answer is what the request gets alone."""
    for ask, (found,) in zip(asks, answers, strict=True):
        said = difference(found, reference.answer(ask.prompt_ids, ask.params))
        assert not said, f"prompt of {len(ask.prompt_ids)} tokens: {said}"


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("leaves", [None, 2, 9], ids=["ends", "leaves in its prompt", "leaves in its output"])
def test_the_same_request_again_after_another(name, leaves, alone):
    """A, then B, then A, in a pool that fits one: B takes the pages and the slot of A, and A those of B."""
    first, other = Ask(prompt(11), PARAMS, WHEN_IDLE), Ask(prompt(23), LONG, WHEN_IDLE, leaves)
    asks = [first, other, first, other, first]
    config = EngineConfig(dtype="float64", page_size=4, num_pages=11, batch_tokens=5, max_running=1)
    answers = serve(poisoned_engine(alone[name].model, config), asks)
    check_answers(asks, answers, alone[name])
    assert {found.finish_reason for (found,) in answers[1::2]} == {"length" if leaves is None else "abort"}
    for again in answers[2::2]:
        assert not difference(again[0], answers[0][0], TOLERANCE)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("draft, prefix_cache", [*product(["none", "mtp"], [True, False])])
def test_a_conversation_again_after_another_that_began_alike(name, draft, prefix_cache, alone):  # fault A6
    """A, then B, which begins as A and its answer do, then A and more of it: alike in all four cells."""
    reference, begin = alone[name], prompt(19)
    spoken = (*begin, *reference.answer(begin, CHAT).token_ids)
    words = [begin, (*spoken[:15], *prompt(9, 3)), begin, (*spoken[:27], *prompt(3, 3)), spoken, (*spoken, 7), begin]
    asks = [Ask(ids, CHAT, WHEN_IDLE) for ids in words]
    config = EngineConfig(dtype="float64", page_size=4, num_pages=80, num_states=60, snapshot_every=3, draft=draft,
                          batch_tokens=7, prefix_cache=prefix_cache, adapt_drafts=False)  # fmt: skip
    engine = poisoned_engine(reference.model, config)
    drafts = note_drafts(engine)
    answers = serve(engine, asks)
    check_answers(asks, answers, reference)
    assert all(hit > 0 for hit in cached_tokens(engine.log)[1:]) if prefix_cache else not any(cached_tokens(engine.log))
    counts = verified(engine.log)
    assert bool(counts) == (draft == "mtp")
    if counts:
        assert 0 < sum(kept for _, kept in counts) < sum(drafted for drafted, _ in counts)
    for number, (ask, (found,)) in enumerate(zip(asks, answers, strict=True)):
        rows = {at: row for (request_id, at), row in drafts.items() if request_id == f"{number}.0"}
        # With a state the model's last output was kept; where there are no states nobody knows it behind a hit.
        assert bool(rows) == (draft == "mtp" and not (number and prefix_cache and name == "attention"))
        assert not wrong_drafts(reference.model, [*ask.prompt_ids, *found.token_ids], rows)


@pytest.mark.parametrize("name", MODELS)
def test_five_requests_among_forty_five_others(name, alone):  # fault J1
    short = SamplingParams(max_tokens=3, ignore_eos=True, logprobs=258)
    others = [Ask(prompt(1 + i % 9, 5), short, i % 4) for i in range(45)]
    asks = [ask for i in range(5) for ask in (*others[9 * i : 9 * i + 9], Ask(prompt(8 + 7 * i), PARAMS, i))]
    config = EngineConfig(dtype="float64", page_size=4, num_pages=300, batch_tokens=64, max_running=50)
    engine = poisoned_engine(alone[name].model, config)
    check_answers(asks, serve(engine, asks), alone[name])
    assert max(event.data.get("num_rows", 0) for event in engine.log) > 30


@pytest.mark.parametrize("name", ["mixture", "dense"])
@pytest.mark.parametrize("batch_tokens", [65, 512])
def test_prompts_about_as_long_as_chunks_of_the_delta_rule(name, batch_tokens, alone):  # fault A10
    """A slice is cut into chunks of 64 tokens, the last of which is padded; slices of several lengths run together."""
    asks = [Ask(prompt(n), PARAMS) for n in (63, 128, 64, 129, 65, 3, 127, 192)]
    config = EngineConfig(dtype="float64", page_size=16, num_pages=80, batch_tokens=batch_tokens)
    check_answers(asks, serve(poisoned_engine(alone[name].model, config), asks), alone[name])
