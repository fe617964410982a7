"""What EngineConfig says of drafts: who may draft, and what room there is for it."""

from __future__ import annotations

import pytest
from small_engine import run_all

from minserve import EngineConfig, Parts, SamplingParams
from minserve.clock import RealClock
from minserve.draft_model import DraftModel
from minserve.engine import Engine
from minserve.engine_config import size_caches
from minserve.errors import InvalidValue
from minserve.events import EventLog
from minserve.llm import shipped_checkpoint
from minserve.model.hybrid_lm import HybridLM
from minserve.model.shipped_shapes import tiny_attention_config, tiny_config
from minserve.model.tokenizer import ByteTokenizer
from minserve.request import FinishReason, Request

SMALL = {"num_pages": 64, "page_size": 4, "max_context": 64, "max_running": 4, "check": True}


@pytest.fixture(scope="module")
def small():
    return HybridLM.from_checkpoint(shipped_checkpoint("tiny_draft"))


def engine_of(model, parts=None, **config) -> Engine:
    config = EngineConfig(**SMALL | config)
    return Engine(model, model.config, config, EventLog(RealClock()), ByteTokenizer().incremental, parts)


@pytest.mark.parametrize("draft", ["foo", 3, None, [1], object(), DraftModel], ids=repr)
def test_only_who_can_draft_is_taken(draft):
    with pytest.raises(InvalidValue, match=r"draft is .* must be one of none, mtp, ngram, or an object") as refused:
        EngineConfig(draft=draft)
    assert refused.value.field == "draft" and "DraftModel" in refused.value.knob


def test_a_model_is_no_drafter_until_it_is_made_one(small):
    with pytest.raises(InvalidValue, match="DraftModel makes a drafter of a model"):
        EngineConfig(draft=small)
    assert EngineConfig(draft=DraftModel(small)).draft_tokens == 3


def test_a_drafter_that_remembers_too_little_is_refused(small):
    EngineConfig(draft=DraftModel(small, max_drafts=4), draft_tokens=4)
    with pytest.raises(InvalidValue, match="draft_tokens is 5; it must be at most 4"):
        EngineConfig(draft=DraftModel(small, max_drafts=4), draft_tokens=5)


@pytest.mark.parametrize("draft_tokens", [0, -1, 1.5, True, None])
def test_there_is_at_least_one_draft(draft_tokens):
    with pytest.raises(InvalidValue, match="draft_tokens is"):
        EngineConfig(draft="ngram", draft_tokens=draft_tokens)


def test_without_drafts_the_sizes_are_what_they_were():
    for shape in (tiny_config(), tiny_attention_config()):
        sizes = size_caches(EngineConfig(), shape)
        assert sizes.num_draft_slots == 0 and sizes.num_slots == sizes.num_states + sizes.num_rows


@pytest.mark.parametrize("draft", ["ngram", "mtp"])
def test_with_room_every_row_has_a_slot_for_each_draft(draft):
    sizes = size_caches(EngineConfig(draft=draft, draft_tokens=2, max_running=8, cache_bytes=2**30), tiny_config())
    assert sizes.num_rows == 8 and sizes.num_draft_slots == 16
    assert sizes.total_bytes <= 2**30


def test_slots_cost_nothing_where_there_are_no_states():
    sizes = size_caches(EngineConfig(draft="ngram", max_running=4), tiny_attention_config())
    assert sizes.num_draft_slots == 12 and sizes.state_bytes == 0


@pytest.mark.parametrize("mib", [2, 4, 8, 16, 64])
def test_drafts_take_no_room_from_requests(mib):
    plain = size_caches(EngineConfig(cache_bytes=mib * 2**20), tiny_config())
    drafting = size_caches(EngineConfig(cache_bytes=mib * 2**20, draft="ngram"), tiny_config())
    assert drafting.num_rows == plain.num_rows and drafting.num_states >= drafting.num_rows
    assert drafting.total_bytes <= mib * 2**20


def test_the_head_has_pages_and_its_inputs_counted():
    plain, drafting = (size_caches(EngineConfig(draft=draft), tiny_config()) for draft in ("ngram", "mtp"))
    assert drafting.page_bytes == plain.page_bytes * 3 // 2  # a third attention layer
    assert drafting.state_bytes == plain.state_bytes + 160 * 4


def test_a_part_that_ends_on_no_token_is_refused(small):
    class Guess:
        def propose(self, tokens, most):
            return [65] * most

    engine = engine_of(small, Parts(verify=lambda *args: [264]), draft=Guess(), adapt_drafts=False)
    engine.add(Request("a", [65, 66], SamplingParams(max_tokens=8, ignore_eos=True), seed=0))
    with pytest.raises(InvalidValue, match="one token of 0 to 263 more"):
        run_all(engine)


def test_a_drafter_that_aborts_the_only_request(small):
    class Impatient:
        def propose(self, tokens, most):
            engine.abort("a")
            return [65]

    engine = engine_of(small, draft=Impatient(), adapt_drafts=False)
    engine.add(Request("a", [65, 66], SamplingParams(max_tokens=8, ignore_eos=True), seed=0))
    ended = [progress for _ in range(3) for progress in engine.step()]
    assert ended[-1].finish_reason is FinishReason.ABORT and not engine.has_work
    assert not engine.cache.holders


def test_scores_that_are_no_tensor_are_refused(small):
    class Listing:
        def logits(self, contexts):
            return [[0.0] * 264 for _ in contexts]

    engine = engine_of(small, draft=Listing(), adapt_drafts=False)
    engine.add(Request("a", [65, 66], SamplingParams(max_tokens=8, ignore_eos=True), seed=0))
    engine.step()
    with pytest.raises(InvalidValue, match="EngineConfig.draft"):
        engine.step()
    engine.check()
