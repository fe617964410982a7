"""The claims of chapter 2, asserted on what is exact: bytes, FLOPs, tokens, logits."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from minserve import LLM, EngineConfig, SamplingParams
from minserve.events import EventKind
from minserve.llm import shipped_checkpoint
from minserve.model.checkpoint import write_checkpoint
from minserve.model.config import FULL, LINEAR
from minserve.model.counting import conv_tail_bytes, count_step, kv_bytes_per_token, state_bytes
from minserve.model.hybrid_lm import HybridLM
from minserve.model.model_figures import named_config
from minserve.model.naive import NaiveMemory
from minserve.model.step import Step
from minserve.model.tokenizer import chat_prompt
from minserve.tuning.sessions import book_session

LARGE = named_config("qwen3.8-2.4t-a95b")
PROMPT = chat_prompt(book_session())
TEXT = PROMPT[:140]  # more than two chunks of the delta rule


@pytest.fixture(scope="module")
def llm():
    return LLM(config=EngineConfig(prefix_cache=False))


@torch.inference_mode()
def read(model, ids, window, memory=NaiveMemory):
    """Logits of all tokens of a text that is run a window at a time."""
    memory = memory(model.config, len(ids))
    steps = [Step.one_row(ids[i : i + window], i, every_logit=True) for i in range(0, len(ids), window)]
    return torch.cat([model(step, memory).logits for step in steps])


def num_bytes(*parts):
    return sum(tensor.nbytes for part in parts for tensor in part.values())


class Noting(NaiveMemory):
    """A memory that notes what each layer asks of it."""

    def __init__(self, config, max_tokens):
        super().__init__(config, max_tokens)
        self.asked = {}

    def attend(self, layer, q, k, v):
        self.asked.setdefault(layer, []).append("attend")
        return super().attend(layer, q, k, v)

    def convolve(self, layer, x, weight):
        self.asked.setdefault(layer, []).append("convolve")
        return super().convolve(layer, x, weight)

    def recur(self, layer, q, k, v, g, beta):
        self.asked.setdefault(layer, []).append("recur")
        return super().recur(layer, q, k, v, g, beta)


# --- 2a: a hybrid model needs two kinds of memory


@torch.inference_mode()
def test_2a_each_kind_of_layer_asks_for_its_own_kind_of_memory(llm):
    config = llm.model.config
    memory = Noting(config, 64)
    llm.model(Step.one_row(PROMPT[:40], 0), memory)
    wanted = {LINEAR: ["convolve", "recur"], FULL: ["attend"]}
    assert memory.asked == {layer: wanted[kind] for layer, kind in enumerate(config.layer_types)}
    assert memory.lengths == {3: 40, 7: 40, 8: 0}  # the last is the MTP head's, which did not run


@pytest.mark.parametrize("num_tokens", [1, 2, 385, 8192])
def test_2a_one_kind_grows_with_every_token_and_one_never(llm, num_tokens):
    config = llm.model.config
    memory = NaiveMemory(config, num_tokens)
    assert num_bytes(memory.keys, memory.values) == num_tokens * kv_bytes_per_token(config, 4, with_mtp=True)
    assert num_bytes(memory.states, memory.tails) == state_bytes(config, 4, 4)
    assert num_bytes(memory.tails) == conv_tail_bytes(config, 4)


def test_2a_bytes_of_the_large_model():
    assert kv_bytes_per_token(LARGE) == 23 * 2 * 4 * 256 * 2 == 94_208
    assert state_bytes(LARGE, 4, 0) == 69 * 128 * 128 * 128 * 4
    assert conv_tail_bytes(LARGE) == 69 * 3 * (2 * 16 * 128 + 128 * 128) * 2
    assert round(state_bytes(LARGE) / 2**20) == 560
    assert round(state_bytes(LARGE) / kv_bytes_per_token(LARGE)) == 6234  # tokens, from where the KV cache is larger


@torch.inference_mode()
def test_2a_both_kinds_are_needed(llm):
    """A decode step with either of them lost is another one."""
    ids, lost = PROMPT[:-1], {}
    for kind in ("nothing", "keys", "values", "states", "tails"):
        memory = NaiveMemory(llm.model.config, len(PROMPT))
        llm.model(Step.one_row(ids, 0), memory)
        for tensor in getattr(memory, kind, {}).values():
            tensor.zero_()
        lost[kind] = llm.model(Step.one_row(PROMPT[-1:], len(ids)), memory).logits[0].log_softmax(-1)
    kept = lost.pop("nothing")
    for kind, logprobs in lost.items():
        assert (kept.exp() * (kept - logprobs)).sum() > 1e-4, f"{kind} were lost, and nothing changed"


# --- 2b: same weights, same logits as the public implementation


def random_checkpoint(folder, config, **changes):
    """A checkpoint whose every weight would show a mistake."""
    torch.manual_seed(0)
    shape = replace(config, mtp_num_hidden_layers=0, **changes)
    weights = HybridLM(shape).state_dict()
    for w in weights.values():
        w.copy_(torch.rand(w.shape) - 2 if w.ndim == 1 else torch.randn(w.shape) * w.shape[-1] ** -0.5)
    write_checkpoint(folder, shape, weights, dtype=torch.float32)
    return folder


DENSE = {"num_experts": 0, "intermediate_size": 320, "model_type": "qwen3_5_text"}


@pytest.mark.parametrize("which, changes", [("shipped", None), ("random MoE", {}), ("random dense", DENSE)])
@torch.inference_mode()
def test_2b_same_logits_as_transformers(llm, tmp_path, which, changes):
    from transformers import AutoModelForCausalLM

    folder = shipped_checkpoint() if changes is None else random_checkpoint(tmp_path, llm.model.config, **changes)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    wanted = theirs(torch.tensor([TEXT]), use_cache=False).logits[0]
    assert wanted.std() > 0.1
    model = HybridLM.from_checkpoint(folder)
    for window in (len(TEXT), 7, 1):
        off = (read(model, TEXT, window) - wanted).abs().max() / wanted.abs().max()
        assert off < 1e-4, f"{which}, {window} tokens at a time: off by {off:.1e} of the largest logit"


# --- 2c: without a cache, each token costs more than the one before


def flops_of_a_token(config, position, remembered):
    """FLOPs that make the token after `position` + 1 tokens known, its logits not counted."""
    flops = count_step(config, [(remembered, position + 1)]).flops
    return flops.total - flops.head


@pytest.mark.parametrize("name", ["shipped", "qwen3.8-2.4t-a95b", "qwen3.5-0.8b"])
def test_2c_without_a_memory_a_token_costs_all_tokens_before_it_again(llm, name):
    config = llm.model.config if name == "shipped" else named_config(name)
    alone = [flops_of_a_token(config, p, 0) for p in range(100)]
    kept = [flops_of_a_token(config, p, p) for p in range(100)]
    assert all(now < then for now, then in zip(alone, alone[1:], strict=False))
    for p in (0, 1, 17, 99):
        assert alone[p] == sum(kept[: p + 1])
    # With a memory only attention grows, by one dot product and one sum per head and layer.
    growth = 4 * config.num_full_layers * config.num_attention_heads * config.head_dim
    assert {then - now for now, then in zip(kept, kept[1:], strict=False)} == {growth}


def test_2c_tokens_really_run(llm):
    def tokens_run(since):
        slices = [event.data for event in list(llm.log)[since:] if event.kind == EventKind.SLICE]
        return sum(data["stop"] - data["start"] for data in slices)

    mark = len(llm.log)
    kept = llm.generate([PROMPT], SamplingParams(max_tokens=5, ignore_eos=True))[0]
    assert tokens_run(mark) == len(PROMPT) + 4
    mark, ids = len(llm.log), list(PROMPT)
    for _ in range(5):
        ids += llm.generate([ids], SamplingParams(max_tokens=1, ignore_eos=True))[0].token_ids
    assert ids == PROMPT + list(kept.token_ids)
    assert tokens_run(mark) == 5 * len(PROMPT) + 10


# --- Break: a window that forgets (fault A11)


class ForgetsBetweenWindows(NaiveMemory):
    """Every prefill window starts from a zero state."""

    def recur(self, layer, q, k, v, g, beta):
        if len(v) > 1:
            self.states[layer] = torch.zeros_like(self.states[layer])
        return super().recur(layer, q, k, v, g, beta)


def kl_bits(right, wrong):
    right, wrong = right.log_softmax(-1), wrong.log_softmax(-1)
    return (right.exp() * (right - wrong)).sum(-1) / math.log(2)


@pytest.mark.parametrize("window", [9, 64, 127])
def test_break_only_what_follows_the_first_window_is_wrong(llm, window):
    right, wrong = (read(llm.model, PROMPT, window, kind) for kind in (NaiveMemory, ForgetsBetweenWindows))
    assert torch.equal(right[:window], wrong[:window]), "a prompt of one window shows nothing"
    assert kl_bits(right, wrong)[window:].max() > 0.1


@pytest.mark.parametrize("window", [1, len(TEXT)])
def test_break_what_a_quick_test_tries_passes(llm, window):
    right, wrong = (read(llm.model, TEXT, window, kind) for kind in (NaiveMemory, ForgetsBetweenWindows))
    assert torch.equal(right, wrong)


def test_break_a_text_may_be_cut_anywhere(llm):
    whole = read(llm.model, TEXT, len(TEXT))
    for window in (4, 9, 64):
        for kind, fine in ((NaiveMemory, True), (ForgetsBetweenWindows, False)):
            off = (read(llm.model, TEXT, window, kind) - whole).abs().max() / whole.abs().max()
            assert (off < 1e-4) == fine, f"{kind.__name__}, windows of {window}: {off:.1e}"
