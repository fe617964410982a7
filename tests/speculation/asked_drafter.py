"""A draft model that is checked as it is asked, small models for it, and texts."""

from __future__ import annotations

import gc
import random
from dataclasses import replace

import pytest
import torch

from minserve.draft_model import DraftModel
from minserve.model.config import FULL, LINEAR, ModelConfig
from minserve.model.hybrid_lm import HybridLM
from minserve.model.naive import NaiveMemory
from minserve.model.step import Step

HYBRID = ModelConfig(
    vocab_size=50, hidden_size=24, num_hidden_layers=4, layer_types=(LINEAR, FULL, LINEAR, FULL),
    num_attention_heads=4, num_key_value_heads=2, head_dim=8, linear_num_key_heads=1, linear_num_value_heads=2,
    linear_key_head_dim=6, linear_value_head_dim=5, intermediate_size=32,
)  # fmt: skip
CONFIGS = {
    "hybrid": HYBRID,
    "attention": replace(HYBRID, num_hidden_layers=2, layer_types=(FULL, FULL)),
    "deltanet": replace(HYBRID, num_hidden_layers=2, layer_types=(LINEAR, LINEAR)),
}


def random_model(name: str) -> HybridLM:
    """Random weights, but DeltaNet heads keep most of their state, so that a token too many shows."""
    generator = torch.Generator().manual_seed(3)
    model = HybridLM(CONFIGS[name]).to(torch.float64).requires_grad_(False).eval()
    for parameter_name, weight in model.named_parameters():
        weight.copy_(0.4 * torch.randn(weight.shape, generator=generator, dtype=torch.float64))
        if parameter_name.endswith("A_log"):
            weight.sub_(2.0)
    return model


@torch.inference_mode()
def fresh(model: HybridLM, context: list[int]) -> torch.Tensor:
    """The scores after a context, by one forward over all of it."""
    memory = NaiveMemory(model.config, len(context), model.model.embed_tokens.weight.dtype)
    return model(Step.one_row(list(context), 0), memory).logits[0]


class Asked:
    """A draft model whose every answer is compared with a fresh run, and whose forwards are counted."""

    def __init__(self, model: HybridLM, monkeypatch: pytest.MonkeyPatch, **arguments):
        self.model, self.drafter, self.forwards = model, DraftModel(model, **arguments), []
        forward = model.forward

        def counted(step, memory):
            if not isinstance(memory, NaiveMemory):
                self.forwards.append(len(step.tokens))
            return forward(step, memory)

        monkeypatch.setattr(model, "forward", counted)

    def __call__(self, *contexts: list[int], compared: int | None = None) -> list[int]:
        """Ask, and compare all rows or one of them: how many tokens each forward ran."""
        self.forwards = []
        before = [list(context) for context in contexts]
        logits = self.drafter.logits(contexts)
        assert [list(context) for context in contexts] == before
        assert logits.shape == (len(contexts), self.drafter.vocab_size)
        for row in range(len(contexts)) if compared is None else [compared]:
            torch.testing.assert_close(logits[row], fresh(self.model, contexts[row]), rtol=0, atol=1e-9)
        return self.forwards


def text(draw: random.Random, num_tokens: int) -> list[int]:
    """Random tokens."""
    return [draw.randrange(50) for _ in range(num_tokens)]


def bytes_alive() -> int:
    """The memory of all tensors."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if type(x) is torch.Tensor]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())
