"""The measuring: each byte scored once, drafts aligned with what they speak of, loops and recall as defined."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from small_checkpoints import SPARSE

from minserve.model.evaluate import (
    CONTEXT_TOKENS,
    acceptance_sampled,
    bits_per_byte,
    draft_probs,
    loops,
    recall_prompt,
    windows,
)
from minserve.model.hybrid_lm import HybridLM
from minserve.model.naive import NaiveMemory
from minserve.model.practice import Practice
from minserve.model.step import Step

BYTES = replace(SPARSE, vocab_size=264, max_position_embeddings=8192)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(2)
    model = HybridLM(BYTES).double().requires_grad_(False)
    for p in model.parameters():
        torch.nn.init.normal_(p, 0, 0.4)
    return model


@pytest.mark.parametrize("length", [1, 100, 2047, 2048, 2049, 5000])
def test_every_byte_is_scored_once_with_its_context(length):
    text = "".join(chr(97 + i % 26) for i in range(length))
    scored = [token for tokens, context in windows(text) for token in tokens[context:]]
    assert bytes(scored).decode() == text
    assert all(context == CONTEXT_TOKENS for _, context in list(windows(text))[1:])


def test_bits_per_byte_of_a_model_that_knows_nothing(model):
    flat = HybridLM(BYTES).requires_grad_(False)
    for p in flat.parameters():
        torch.nn.init.zeros_(p)
    assert bits_per_byte(flat, ["some text", "x"]) == (pytest.approx(math.log2(264), abs=1e-5), 10)
    assert bits_per_byte(model, ["some text"])[0] > math.log2(264)


def test_drafts_are_those_that_a_server_would_make(model):
    """Depth by depth at one place: committed entries from the trunk, then the head's own output along the chain."""
    tokens, depth, place = list(b"a text of some length"), 3, 7
    target, draft = draft_probs(model, tokens, depth, temperature=0.8)
    memory = NaiveMemory(BYTES, 40, torch.float64)
    with torch.inference_mode():
        trunk = model(Step.one_row(tokens, 0, every_logit=True), memory)
        hidden, _ = model.draft_hidden(Step.one_row(tokens[1 : place + 2], 1), trunk.hidden[: place + 1], memory)
        for d in range(depth):
            torch.testing.assert_close(
                draft[d][place], (model.logits(hidden[-1:])[0] / 0.8).softmax(-1), rtol=0, atol=1e-9
            )
            at = place + d + 1
            torch.testing.assert_close(target[d][place], (trunk.logits[at] / 0.8).softmax(-1), rtol=0, atol=1e-9)
            hidden, _ = model.draft_hidden(Step.one_row(tokens[at + 1 : at + 2], at + 1), hidden[-1:], memory)


def test_a_draft_that_is_the_target_is_always_accepted(model, monkeypatch):
    def perfect(model, tokens, depth, temperature):
        p = torch.rand(len(tokens) - depth - 1, 264).softmax(-1)
        return [p] * depth, [p] * depth

    monkeypatch.setattr("minserve.model.evaluate.draft_probs", perfect)
    assert acceptance_sampled(model, ["x" * 20]) == pytest.approx([1.0, 1.0, 1.0], abs=1e-6)


def test_loops_are_four_equal_8_grams():
    gram = list(range(8))
    assert not loops(gram * 3 + [99] * 3) and loops(gram + [50] + gram + [51] + gram + [52] + gram)


@pytest.mark.parametrize("chat", [False, True])
def test_a_recall_prompt_states_the_value_once_and_far_away(chat):
    practice = Practice(np.full(5000, ord("."), np.uint16), np.random.default_rng(4))
    prompt, answer = recall_prompt(practice, 500, chat)
    value = bytes(t for t in answer if t < 256).decode().strip().split()[-1]
    text = bytes(t for t in prompt if t < 256).decode()
    assert text.count(f" = {value}") == 1 and len(text) - text.index(value) > 500
    assert answer[-1] == (258 if chat else ord("\n"))
