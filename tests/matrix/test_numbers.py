"""The numbers behind the matrix: models that can show a fault, nothing narrower than float64 in it, and float32."""

from __future__ import annotations

import pytest
import torch
from gated_models import BETA, DECAY, MODELS, build
from poisoned_engine import Ask, poisoned_engine, serve
from routes import prompt
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import minserve.choosing
import minserve.model.naive
import minserve.sampling
from minserve.clock import VirtualClock
from minserve.engine_config import EngineConfig
from minserve.events import EventKind, EventLog
from minserve.model.naive import NaiveMemory, run_alone
from minserve.model.step import Step
from minserve.request import Request, SamplingParams

GREEDY = SamplingParams(max_tokens=10, ignore_eos=True)


class WatchedMemory(NaiveMemory):
    """Notes the gates of the delta rule."""

    def __init__(self, config):
        super().__init__(config, 200, torch.float64)
        self.decays, self.betas = [], []

    def recur(self, layer, q, k, v, g, beta):
        """As its parent. Changes: the notes, too."""
        self.decays.append(g.exp())
        self.betas.append(beta)
        return super().recur(layer, q, k, v, g, beta)


@torch.inference_mode()
def last_logits(model, token_ids, memory=None):
    """The logits after a sequence that is run at once."""
    return model(Step.one_row(list(token_ids), 0), memory or NaiveMemory(model.config, 200, torch.float64)).logits[-1]


@pytest.mark.parametrize("name", ["mixture", "dense"])
def test_the_gates_are_those_that_show_a_fault(name):
    model = build(name)
    memory = WatchedMemory(model.config)
    for length in (40, 200):
        last_logits(model, prompt(length), memory)
        memory.lengths = dict.fromkeys(memory.lengths, 0)
    for gates, (low, high) in ((memory.decays, DECAY), (memory.betas, BETA)):
        gates = torch.cat(gates)
        assert low < gates.min() and gates.max() < high
        assert gates.quantile(0.9) - gates.quantile(0.1) > 0.2 * (high - low), "they hardly vary"


@pytest.mark.parametrize("name", MODELS)
def test_the_logits_are_worth_comparing(name):
    """They vary, and the first token of a prompt still counts at the end of the longest."""
    model, ids = build(name), prompt(40)
    logits = last_logits(model, ids)
    assert logits.std() > 1
    other = last_logits(model, ((ids[0] + 1) % 256, *ids[1:]))
    assert (other - logits).abs().max() > 1e-3 * logits.abs().max()


class NoFloat32(TorchDispatchMode):
    """Fails where an operation takes or gives a float32 tensor, and counts the float64 ones."""

    num_float64 = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves((args, kwargs, result)):
            if isinstance(value, torch.Tensor):
                assert value.dtype not in (torch.float32, torch.float16, torch.bfloat16), f"{value.dtype} in {func}"
                self.num_float64 += value.dtype == torch.float64
        return result


@pytest.mark.parametrize("name", MODELS)
def test_no_float32_appears_in_float64_mode(name):
    """Over prefill, decode, preemption and forks, with every setting that changes how a token is chosen."""
    model = build(name)
    drawn = SamplingParams(max_tokens=9, temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, seed=3, n=2, logprobs=3,
                           prompt_logprobs=3, presence_penalty=0.1, frequency_penalty=0.1, repetition_penalty=1.2,
                           logit_bias={5: 1.0}, ignore_eos=True)  # fmt: skip
    config = EngineConfig(dtype="float64", batch_tokens=6, page_size=4, num_pages=7)
    with NoFloat32() as watch:
        engine = poisoned_engine(model, config)
        serve(engine, [Ask(prompt(n), params) for n, params in ((13, GREEDY), (9, drawn), (10, drawn), (17, GREEDY))])
    assert any(event.kind is EventKind.PREEMPTED for event in engine.log) and watch.num_float64 > 1000


def note_logits(patch, noted):
    """Make both loops note the logits that they choose a token from, by request and position. Changes: noted."""

    def sample(logits, requests):
        noted.update({(r.id, r.num_committed): row.clone() for row, r in zip(logits, requests, strict=True)})
        return minserve.sampling.sample(logits, requests)

    patch.setattr(minserve.choosing, "sample", sample)
    patch.setattr(minserve.model.naive, "sample", sample)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("batch_tokens, page_size", [(3, 3), (64, 16)])
def test_logits_are_those_of_each_request_alone(name, dtype, batch_tokens, page_size, monkeypatch):
    """Within 1e-4 of the largest logit in float32, where a near tie may end the comparison; 1e-9 in float64."""
    model, wanted, found = build(name, getattr(torch, dtype)), {}, {}
    asks = [Ask(prompt(n), GREEDY, i) for i, n in enumerate((3, 40, 8, 17, 1, 26, 33, 12))]
    with monkeypatch.context() as patch:
        note_logits(patch, wanted)
        requests = [Request(f"{number}.0", ask.prompt_ids, GREEDY, seed=0) for number, ask in enumerate(asks)]
        loops = [run_alone(model, request, EventLog(VirtualClock())) for request in requests]
        tokens = [[next(loop).token_id for _ in range(GREEDY.max_tokens)] for loop in loops]
    with monkeypatch.context() as patch:
        note_logits(patch, found)
        config = EngineConfig(dtype=dtype, batch_tokens=batch_tokens, page_size=page_size, num_pages=200)
        answers = serve(poisoned_engine(model, config), asks)
    largest = max(float(logits.abs().max()) for logits in wanted.values())
    tolerance = 1e-4 * largest if dtype == "float32" else 1e-9
    num_compared = 0
    for request, alone_ids, (answer,) in zip(requests, tokens, answers, strict=True):
        for at, (token, alone_id) in enumerate(zip(answer.token_ids, alone_ids, strict=True)):
            key = (request.id, len(request.prompt_ids) + at)
            assert (found[key] - wanted[key]).abs().max() <= tolerance, key
            num_compared += 1
            if token != alone_id:
                gap = wanted[key].topk(2).values.diff().abs()
                assert dtype == "float32" and gap <= 2 * tolerance, f"corruption at {key}: the top-2 gap is {gap}"
                break
    assert num_compared > 70
