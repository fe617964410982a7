"""The engine makes every tensor on the device that it is configured for: no GPU is needed to see that."""

from __future__ import annotations

import pytest
import torch
from claimed_device import ClaimedDevice, MixedDevices, claim, claims
from kernel_checks import needs_triton

from minserve import EngineConfig, SamplingParams
from minserve.clock import RealClock
from minserve.engine import Engine
from minserve.events import EventLog
from minserve.llm import shipped_checkpoint
from minserve.model.hybrid_lm import HybridLM
from minserve.model.joined_projections import JoinedProjections
from minserve.model.tokenizer import ByteTokenizer
from minserve.request import FinishReason, Request

PROMPTS = (b"def area(", b"import os", b"class A:\n", b"x = 1\n", b"f", b" for i in range(10):\n    print(i)")
KNOBS = {"repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1, "logit_bias": {65: 1.0}}
PARAMS = (
    SamplingParams(max_tokens=4, ignore_eos=True),
    SamplingParams(
        max_tokens=3, ignore_eos=True, temperature=0.8, top_p=0.9, top_k=20, min_p=0.01, logprobs=3, **KNOBS
    ),
    SamplingParams(max_tokens=3, ignore_eos=True, temperature=1.0, n=3, prompt_logprobs=2),
    SamplingParams(max_tokens=0, prompt_logprobs=0),
    SamplingParams(max_tokens=3, ignore_eos=True, **KNOBS),
    SamplingParams(max_tokens=2, ignore_eos=True, temperature=1.0, seed=4),
)


@pytest.fixture(scope="module")
def model():
    """The shipped model, whose weights claim to lie on a GPU."""
    model = HybridLM.from_checkpoint(shipped_checkpoint())
    claim(list(model.parameters()))
    for module in model.modules():
        claim([one._side_by_side for one in vars(module).values() if isinstance(one, JoinedProjections)])
    return model


def serve(model, **config) -> list[list[int]]:
    """The output tokens of all requests: short steps, small pages, so that rows are of every kind."""
    log, tokenizer = EventLog(RealClock()), ByteTokenizer()
    config = {"batch_tokens": 24, "max_context": 64, "num_pages": 40, "page_size": 4, "check": True} | config
    engine = Engine(model, model.config, EngineConfig(device="cuda", **config), log, tokenizer.incremental)
    requests = []
    for number, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        family = [Request((number, index), list(prompt), params, index, index) for index in range(params.n)]
        engine.add(family[0], family[1:])
        requests += family
    assert all(map(claims, (*engine.memory.k_pages.values(), *engine.memory.states.values())))
    while engine.has_work:
        for progress in engine.step():
            assert progress.finish_reason in (None, FinishReason.LENGTH), progress.error
    return [request.output_ids for request in requests]


@pytest.mark.parametrize("draft", ["none", "ngram", "mtp"])
def test_the_reference_stays_on_the_device(model, draft):
    with ClaimedDevice():
        outputs = serve(model, draft=draft, adapt_drafts=False)
    assert [len(output) for output in outputs] == [params.max_tokens for params in PARAMS for _ in range(params.n)]


@needs_triton
@pytest.mark.parametrize("draft", ["none", "mtp"])
def test_the_kernels_stay_on_the_device(model, monkeypatch, draft):
    from minserve.deltanet import conv_tail_triton, gated_delta_triton
    from minserve.paging import paged_attention_triton
    from minserve.speculation import verify_triton

    with ClaimedDevice() as mode:
        for module in (paged_attention_triton, conv_tail_triton, gated_delta_triton, verify_triton):
            for name in [name for name in vars(module) if name.endswith("_kernel")]:
                monkeypatch.setattr(module, name, mode.launching(getattr(module, name)))
        outputs = serve(model, impl="triton", draft=draft, adapt_drafts=False)
        wanted = serve(model, draft=draft, adapt_drafts=False)
    assert mode.num_launched and outputs == wanted


@pytest.mark.parametrize("name", ["as_tensor", "arange", "ones", "tensor", "zeros"])
def test_a_tensor_made_elsewhere_is_found(model, name):
    """Each way of making a tensor in a step, made to forget its device."""
    make = getattr(torch, name)

    class Forgetful(ClaimedDevice):
        def _call(self, func, args, kwargs):
            if func is make and "device" in kwargs:
                return make(*args, **kwargs | {"device": "cpu"})
            return super()._call(func, args, kwargs)

    with Forgetful(), pytest.raises((MixedDevices, AssertionError)):
        serve(model)


def test_mixing_is_an_error_and_numbers_are_not():
    with ClaimedDevice():
        there, here = torch.arange(3, device="cuda"), torch.arange(3)
        assert there.is_cuda and there.device.type == "cuda" and not here.is_cuda
        assert claims(there[1:] * 2 + torch.tensor(1)) and not claims(here + 1)
        assert not claims(there.cpu()) and claims(here.to(device="cuda"))
        for mix in (lambda: there + here, lambda: there[here], lambda: torch.where(here > 0, there, there)):
            with pytest.raises(MixedDevices):
                mix()
