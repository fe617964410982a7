"""Small engines in poisoned memory, the requests served by them, and what a plain forward says about each."""

from __future__ import annotations

from dataclasses import replace

import torch
from alone import Answer, difference
from poisoned_engine import WHEN_IDLE, Ask, poisoned_engine, serve
from small_engine import CONFIG, small_model

from minserve.deltanet.state_pool import StatePool
from minserve.engine_config import EngineConfig
from minserve.events import EventKind
from minserve.model.config import FULL
from minserve.model.hybrid_lm import HybridLM
from minserve.model.naive import NaiveMemory
from minserve.model.step import Step
from minserve.request import SamplingParams

VOCAB = CONFIG.vocab_size


class TrustingPool(StatePool):
    """Hands out states to whoever asks, whatever they have seen."""

    def expect(self, slot, num_tokens):
        """Trust everybody."""


def small_models():
    """The small model of the engine's tests, and one of the same size that has attention only."""
    generator = torch.Generator().manual_seed(6)
    attention = HybridLM(replace(CONFIG, layer_types=(FULL, FULL))).to(torch.float64).requires_grad_(False).eval()
    for _, weight in attention.named_parameters():
        weight.copy_(0.5 * torch.randn(weight.shape, generator=generator, dtype=torch.float64))
    return {"hybrid": small_model(), "attention": attention}


def make_engine(model, parts=None, **config):
    """An engine with P = 4, S = 8, B = 8, 32 pages and 24 state slots, unless the test says otherwise."""
    own = {"page_size": 4, "snapshot_every": 8, "batch_tokens": 8, "num_pages": 32, "num_states": 24, "max_running": 4}
    return poisoned_engine(model, EngineConfig(dtype="float64", **{**own, **config}), parts)


def params(max_tokens=2, **more):
    """Greedy, every log-probability reported, no end token."""
    return SamplingParams(**{"max_tokens": max_tokens, "logprobs": VOCAB, "ignore_eos": True, **more})


def tokens(length, seed=0):
    """Random tokens, unlike those of any other seed."""
    return tuple(torch.randint(0, VOCAB - 1, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


def one_by_one(prompts, *args, **more):
    """A workload of prompts that come one after the other."""
    return [Ask(tuple(prompt), params(*args, **more), WHEN_IDLE) for prompt in prompts]


def cached_tokens(engine):
    """How many tokens each admission reused, in order: (request, tokens)."""
    return [(e.request_id, e.data["cached_tokens"]) for e in engine.log if e.kind is EventKind.ADMITTED]


def slices(engine, request_id):
    """What was computed for a request: (start, stop) of each slice."""
    found = [event.data for event in engine.log if event.kind is EventKind.SLICE and event.request_id == request_id]
    return [(data["start"], data["stop"]) for data in found]


class Plain:
    """What a model says in one plain forward of a request's tokens by itself. REF.

    Arguments:
        model: any; what it said about a sequence it has said about its beginnings.
    """

    def __init__(self, model):
        self._model, self._known = model, {}

    @torch.inference_mode()
    def logprobs(self, ids):
        """The log-probabilities of what follows each token of a sequence."""
        prefixes = [tuple(ids[: i + 1]) for i in range(len(ids))]
        if prefixes[-1] not in self._known:
            memory = NaiveMemory(self._model.config, len(ids), torch.float64)
            rows = self._model(Step.one_row(list(ids), 0, every_logit=True), memory).logits.log_softmax(-1).tolist()
            self._known.update(zip(prefixes, rows, strict=True))
        return [dict(enumerate(self._known[prefix])) for prefix in prefixes]

    def wrong(self, ask, answer):
        """What is wrong with a greedy answer, in words; nothing when it is right."""
        said = self.logprobs([*ask.prompt_ids, *answer.token_ids])
        rows = said[len(ask.prompt_ids) - 1 :][: len(answer.token_ids)]
        scores = None if ask.params.prompt_logprobs is None else [None, *said[: len(ask.prompt_ids) - 1]]
        wanted = Answer([max(row, key=row.get) for row in rows], rows, scores, "length")
        short = len(answer.token_ids) != ask.params.max_tokens and answer.finish_reason != "abort"
        return difference(answer, wanted) or ("it is too short" if short else "")


def serve_right(engine, plain, asks):
    """Serve a workload to its end; fail unless every answer is that of the request by itself."""
    answers = [family[0] for family in serve(engine, asks)]
    wrong = [(len(ask.prompt_ids), plain.wrong(ask, answer)) for ask, answer in zip(asks, answers, strict=True)]
    assert not [said for said in wrong if said[1]]
    return answers


def num_wrong(engine, plain, asks):
    """Serve a workload to its end; how many answers are wrong."""
    answers = [family[0] for family in serve(engine, asks)]
    return sum(bool(plain.wrong(ask, answer)) for ask, answer in zip(asks, answers, strict=True))


def check_idle(engine):
    """Fail unless nobody is left, and all that is not free is the tree's, to be evicted. CONS."""
    cache = engine.cache
    engine.check()
    assert not engine.has_work and not cache.holders and not cache.tree.num_protected
    assert cache.num_takeable == cache.allocator.num_pages
    assert sorted(cache.states.held) == sorted([] if cache.snapshots is None else cache.snapshots.slots)
