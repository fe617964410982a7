"""Faults of speculation that show on models with states and heads: each is put in and seen, and the library is free."""

from __future__ import annotations

import pytest
import torch
from faulty_drafts import (
    KnowsTheAnswer,
    OwnCache,
    acceptance,
    before_the_norm,
    counted,
    held_out_prompts,
    read_the_first_column_after_a_plain_step,
    tokens_by_step,
    with_trunk_output_before_its_norm,
)
from gated_models import build
from small_engine import alone, run_all
from watched_drafts import Wrapped, check_drafts, difference, request, serve, watched_engine

from minserve.draft_model import DraftModel
from minserve.events import EventKind
from minserve.llm import shipped_checkpoint
from minserve.model.hybrid_lm import HybridLM
from minserve.model.shuffled_head import shuffle_head
from minserve.mtp_drafts import MTPDrafts
from minserve.step_costs import CostTable

pytestmark = pytest.mark.usefixtures("shapes_unchecked")


# --- E4: the state after a step without drafts


@pytest.fixture(scope="module")
def answers(dense):
    """Greedy answers to some prompts by the plain loop, and how likely each token of the vocabulary was each time."""
    generator = torch.Generator().manual_seed(4)
    prompts = [torch.randint(0, 256, (n,), generator=generator).tolist() for n in (5, 8, 11)]
    return {tuple(tokens): alone(dense, request("alone", tokens, 20, logprobs=258)) for tokens in prompts}


def off_by(dense, answers, pattern, spoilt, monkeypatch=None) -> float:
    """How far answers are from those of the plain loop, drafted for by this pattern, perhaps with the fault. REF."""
    drafter = KnowsTheAnswer([[*tokens, *output] for tokens, (output, _) in answers.items()], pattern, spoilt)
    engine, _ = watched_engine(dense, draft=drafter, prefix_cache=False)
    if monkeypatch is not None:
        read_the_first_column_after_a_plain_step(monkeypatch, engine, drafter)
    requests, found = [request(str(n), tokens, 20, logprobs=258) for n, tokens in enumerate(answers)], {}
    for one in requests:
        engine.add(one)
    for progress in run_all(engine):
        found.setdefault(progress.request.id, []).extend(progress.logprobs)
    drafted = counted(engine, EventKind.DRAFTS, "drafted")
    assert max(drafted, default=0) == max(pattern) and (not spoilt or not drafted or acceptance(engine) < 1)
    off = 0.0
    for one, (output, wanted) in zip(requests, answers.values(), strict=True):
        off = max(off, torch.inf if one.output_ids != output else 0.0)
        for mine, right in zip(found[one.id], wanted, strict=True):
            off = max(off, *(abs(mine[token] - score) for token, score in right.items()))
    return off


@pytest.mark.parametrize("pattern", [(3, 0, 2, 0), (0, 3, 0, 1, 2), (3, 2), (0,), (1, 0), (0, 0, 3)], ids=str)
@pytest.mark.parametrize("spoilt", [0, 2, 3, 5])
def test_any_pattern_of_drafts(dense, answers, pattern, spoilt):  # fault E4
    assert off_by(dense, answers, pattern, spoilt) < 1e-9


@pytest.mark.parametrize("pattern, spoilt", [((3, 0, 2, 0), 0), ((3, 0, 2, 0), 3), ((0, 3, 0, 1, 2), 5)])
def test_a_plain_step_that_reads_the_first_column_is_seen(dense, answers, monkeypatch, pattern, spoilt):  # fault E4
    assert off_by(dense, answers, pattern, spoilt, monkeypatch) > 1e-6


# --- E12: a draft model's own memory


def rounds_of(target, draft, num_rows=1, draft_tokens=3) -> list[tuple[int, int]]:
    """(drafted, accepted) of 50 rounds or more of some requests that draw their tokens."""
    engine, _ = watched_engine(target, draft=draft, num_pages=400, max_running=num_rows, draft_tokens=draft_tokens)
    num_tokens = 50 * (1 + draft_tokens) + 1
    serve(engine, *(request(str(n), [7, n, 9], num_tokens, temperature=1.0) for n in range(num_rows)))
    rounds = [*zip(*(counted(engine, EventKind.DRAFTS, field) for field in ("drafted", "accepted")), strict=True)]
    assert len(rounds) >= 50 * num_rows
    return rounds


@pytest.mark.parametrize("name, num_rows", [("dense", 2), ("attention", 1)])
def test_a_draft_model_that_is_the_target_is_always_right(name, num_rows):  # fault E12
    model = build(name)
    assert rounds_of(model, DraftModel(model), num_rows) == [(3, 3)] * 50 * num_rows


def test_a_draft_model_without_an_entry_for_its_last_draft_is_seen():  # fault E12
    model = build("attention")
    for draft_tokens in (1, 2):
        assert rounds_of(model, OwnCache(model), draft_tokens=draft_tokens) == [(draft_tokens, draft_tokens)] * 50
        wrong = rounds_of(model, OwnCache(model, covers_the_last_draft=False), draft_tokens=draft_tokens)
        assert sum(accepted for _, accepted in wrong) < sum(drafted for drafted, _ in wrong)


# --- E17, E18: what the head is given


@pytest.fixture(scope="module")
def tiny():
    """The shipped model, in float64."""
    return HybridLM.from_checkpoint(shipped_checkpoint(), torch.float64)


@pytest.fixture(scope="module")
def prompts():
    return held_out_prompts(2, 64)


NUM_TOKENS = 40


def greedy_on(model, prompts, **config):
    """The outputs of held-out prompts, served together; the engine, and the drafts as seen."""
    engine, seen = watched_engine(model, page_size=16, batch_tokens=128, **config)
    requests = [request(str(n), tokens, NUM_TOKENS) for n, tokens in enumerate(prompts)]
    serve(engine, *requests)
    return [one.output_ids for one in requests], engine, seen


@pytest.fixture(scope="module")
def right(tiny, prompts):
    return greedy_on(tiny, prompts)


@pytest.fixture(scope="module")
def uneven():
    """The shipped model as it might be: its norms weigh some channels 9 times as much as others, as large models' do.

    The shipped one's norms are nearly flat. What reads their outputs is divided by the same weights: the model says
    what it said, and the head nearly so.
    """
    model = HybridLM.from_checkpoint(shipped_checkpoint(), torch.float64)
    generator = torch.Generator().manual_seed(0)
    scale = 3.0 ** (2 * torch.randint(0, 2, (model.config.hidden_size,), generator=generator).double() - 1)
    for norm, factor in ((model.model.norm, scale), (model.mtp.norm, scale), (model.mtp.pre_fc_norm_hidden, 1 / scale)):
        norm.weight.copy_((1 + norm.weight) * factor - 1)
    model.lm_head.weight.div_(scale)
    return model


@pytest.fixture(scope="module")
def right_of_uneven(uneven, prompts):
    return greedy_on(uneven, prompts)


def wanted_of(model, prompts, outputs) -> list[list[int]]:
    """Tokens of each step of each request, by an independent computation."""
    return [tokens_by_step(model, [*p, *out], len(p), 3) for p, out in zip(prompts, outputs, strict=True)]


def found_of(engine, prompts) -> list[list[int]]:
    """The same, as the engine had it."""
    events = ([e for e in engine.log.of(str(n)) if e.kind is EventKind.TOKENS] for n in range(len(prompts)))
    return [[event.data["count"] for event in of_one][1:] for of_one in events]


def test_acceptance_is_that_of_an_independent_computation(tiny, uneven, prompts, right, right_of_uneven):  # fault E18
    for model, (outputs, engine, seen) in ((tiny, right), (uneven, right_of_uneven)):
        assert found_of(engine, prompts) == wanted_of(model, prompts, outputs)
        check_drafts(model, seen[::6])
    assert right[0] == right_of_uneven[0] and acceptance(right[1]) > acceptance(right_of_uneven[1]) > 0.3


def test_the_trunks_output_before_its_norm_is_seen(uneven, prompts, right_of_uneven):  # fault E18
    outputs, engine, _ = greedy_on(Wrapped(uneven, with_trunk_output_before_its_norm(uneven)), prompts)
    assert outputs == right_of_uneven[0] and acceptance(engine) < acceptance(right_of_uneven[1])
    assert found_of(engine, prompts) != wanted_of(uneven, prompts, outputs)


def test_the_heads_output_before_its_norm_is_seen(uneven, prompts, right_of_uneven, monkeypatch):  # fault E18
    logits = MTPDrafts.logits

    def before_its_norm(head, rows):
        for row in rows:
            row.hidden = before_the_norm(row.hidden, uneven.mtp.norm) if row.ids else None
        return logits(head, rows)

    monkeypatch.setattr(MTPDrafts, "logits", before_its_norm)
    outputs, engine, _ = greedy_on(uneven, prompts)
    assert outputs == right_of_uneven[0] and acceptance(engine) < acceptance(right_of_uneven[1])
    assert found_of(engine, prompts) != wanted_of(uneven, prompts, outputs)


@pytest.mark.parametrize("temperature", [0.0, 3.0])
def test_a_random_output_at_the_hand_over_from_the_tree_is_seen(dense, temperature):  # fault E17
    """Who starts from the tree needs the model's output behind the last token that is found there."""
    tokens = torch.randint(0, 256, (21,), generator=torch.Generator().manual_seed(1)).tolist()
    off = []
    for is_random in (False, True):
        engine, seen = watched_engine(dense)
        serve(engine, request("before", tokens))
        admit = engine.cache.admit

        def admit_and_forget(one, hit, spare_pages, engine=engine, admit=admit):
            is_in = admit(one, hit, spare_pages)
            engine.memory.hidden[engine.cache.slot_of[one.id]].normal_(generator=torch.Generator().manual_seed(0))
            return is_in

        engine.cache.admit = admit_and_forget if is_random else admit
        seen.clear()
        one = request("after", [*tokens, 3, 4], temperature=temperature)
        serve(engine, one)
        (cached,) = (e.data["cached_tokens"] for e in engine.log.of("after") if e.kind is EventKind.ADMITTED)
        assert cached == 20 and seen
        off.append(max(difference(dense, row) for row in seen))
        if not temperature:
            assert one.output_ids == alone(dense, request("after", [*tokens, 3, 4]))[0]
    assert off[0] < 1e-9 and (off[1] > 1e-6 or not temperature), "greedy drafts may well be the same"


def test_a_head_that_knows_nothing_is_given_up(tiny, prompts, right):  # fault E17
    costs = CostTable(lambda num_rows, num_tokens: 1.0 + 0.1 * num_tokens / num_rows, lambda num_rows: 0.2)
    shuffled = shuffle_head(tiny, seed=0)
    always, engine, _ = greedy_on(shuffled, prompts[:1])
    assert always == right[0][:1] and acceptance(engine) < 0.1, "reported as it is"
    outputs, adapted, seen = greedy_on(shuffled, prompts, adapt_drafts=True, step_costs=costs)
    assert outputs == right[0] and adapted.drafting.depth == 0
    assert len(seen) < 15 and adapted.drafting.acceptance.rates()[0] < 0.3
    outputs, kept_on, _ = greedy_on(tiny, prompts[:1], adapt_drafts=True, step_costs=costs)
    assert outputs == right[0][:1] and len(counted(kept_on, EventKind.DRAFTS, "drafted")) > 5
