"""Projections side by side: the same products, the same names, and never a stale copy."""

import copy

import pytest
import torch
from small_checkpoints import DENSE, SPARSE
from torch import nn

from minserve.model.hybrid_lm import HybridLM
from minserve.model.joined_projections import JoinedProjections, join_projections
from minserve.model.memory import Memory
from minserve.model.naive import NaiveMemory
from minserve.model.step import Step


def projections(*widths):
    torch.manual_seed(0)
    return JoinedProjections(*(nn.Linear(5, width, bias=False).double().requires_grad_(False) for width in widths))


def separately(joined, x):
    return [linear(x) for linear in joined.linears]


@pytest.mark.parametrize("num_tokens", [0, 1, 4])
def test_joined_equals_separate(num_tokens):
    joined, x = projections(3, 1, 6), torch.randn(num_tokens, 5, dtype=torch.float64)
    wanted = separately(joined, x)
    joined.join()
    for found, want in zip(joined(x), wanted, strict=True):
        torch.testing.assert_close(found, want, rtol=0, atol=1e-14)


def test_the_weights_are_views_of_one_tensor_and_written_through():
    joined, x = projections(3, 2), torch.randn(2, 5, dtype=torch.float64)
    joined.join()
    assert len({linear.weight.untyped_storage().data_ptr() for linear in joined.linears}) == 1
    joined.linears[1].weight.mul_(2)
    torch.testing.assert_close(joined(x)[1], separately(joined, x)[1], rtol=0, atol=1e-14)


@pytest.mark.parametrize("which", [0, 1])
def test_weights_that_were_replaced_or_converted_count(which):
    joined, x = projections(3, 2), torch.randn(2, 5, dtype=torch.float64)
    joined.join()
    replaced = joined.linears[which]
    replaced.weight = nn.Parameter(replaced.weight + 1, requires_grad=False)
    torch.testing.assert_close(joined(x)[which], separately(joined, x)[which], rtol=0, atol=1e-14)
    joined.join()
    for linear in joined.linears:
        linear.float()
    assert joined(x.float())[0].dtype == torch.float32


@pytest.mark.parametrize("config", [SPARSE, DENSE], ids=["sparse", "dense"])
def test_a_joined_model_has_the_names_and_logits_of_a_separate_one(config):
    torch.manual_seed(1)
    model = HybridLM(config).double().requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_(0, 0.3)
    joined = copy.deepcopy(model)
    join_projections(joined)
    names = {name: p.shape for name, p in model.named_parameters()}
    assert {name: p.shape for name, p in joined.named_parameters()} == names
    step = Step.one_row([3, 1, 4, 1, 5], 0, every_logit=True)
    memories: list[Memory] = [NaiveMemory(config, 8, torch.float64) for _ in range(3)]
    logits = model(step, memories[0]).logits
    torch.testing.assert_close(joined(step, memories[1]).logits, logits, rtol=0, atol=1e-12)
    torch.testing.assert_close(copy.deepcopy(joined)(step, memories[2]).logits, logits, rtol=0, atol=1e-12)
