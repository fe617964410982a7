"""A model of some of another's layers: the same weights, the layers that were asked for, and the other as it was."""

import pytest
import torch

from minserve.draft_model import DraftModel
from minserve.errors import InvalidValue
from minserve.llm import shipped_checkpoint
from minserve.model.hybrid_lm import HybridLM
from minserve.model.layers import rotary_table
from minserve.model.naive import NaiveMemory
from minserve.model.skipped_layers import skip_layers
from minserve.model.step import Step

TOKENS = list(b"def area(w,")


@pytest.fixture(scope="module", params=["tiny", "tiny_attention"])
def whole(request):
    return HybridLM.from_checkpoint(shipped_checkpoint(request.param), torch.float64)


@torch.inference_mode()
def by_hand(model: HybridLM, keep: list[int]) -> torch.Tensor:
    """The scores after each token, with the layers of the whole model called one by one."""
    step = Step.one_row(TOKENS, 0)
    x, memory = model.model.embed_tokens(step.tokens), NaiveMemory(model.config, len(TOKENS), torch.float64)
    for i in keep:
        x, _ = model.model.layers[i](x, rotary_table(step.positions, model.config, x.dtype), memory)
    return model.logits(model.model.norm(x))


@torch.inference_mode()
def token_by_token(model: HybridLM) -> torch.Tensor:
    """The scores after each token, with a memory of the model's own."""
    memory = NaiveMemory(model.config, len(TOKENS), torch.float64)
    return torch.cat([model(Step.one_row([token], i), memory).logits for i, token in enumerate(TOKENS)])


@pytest.mark.parametrize("keep", [None, [0], [1, 3], [2, 3]])
def test_the_layers_that_are_kept_are_run(whole, keep):
    keep = list(range(whole.config.num_hidden_layers)) if keep is None else keep
    before = token_by_token(whole)
    skipped = skip_layers(whole, keep)
    torch.testing.assert_close(token_by_token(skipped), by_hand(whole, keep), rtol=0, atol=1e-9)
    torch.testing.assert_close(DraftModel(skipped).logits([TOKENS])[0], by_hand(whole, keep)[-1], rtol=0, atol=1e-9)
    assert torch.equal(token_by_token(whole), before)
    if len(keep) == whole.config.num_hidden_layers:
        assert torch.equal(token_by_token(skipped), before)


def test_the_weights_are_the_very_same(whole):
    keep = [1, 3]
    theirs, skipped = dict(whole.named_parameters()), skip_layers(whole, keep)
    names = dict(skipped.named_parameters())
    assert len(names) > 20 and not any(name.startswith("mtp") for name in names)
    for name, parameter in names.items():
        for index, i in enumerate(keep):
            if name.startswith(f"model.layers.{index}."):
                name = name.replace(f"layers.{index}.", f"layers.{i}.", 1)
                break
        assert parameter is theirs[name]
    for mine, other in zip(skipped.model.layers, (whole.model.layers[i] for i in keep), strict=True):
        assert mine.mlp is other.mlp, "projections that were joined stay so"


def test_the_whole_model_is_as_it_was(whole):
    names = [name for name, _ in whole.named_modules()]
    skip_layers(whole, [1, 2])
    assert [name for name, _ in whole.named_modules()] == names
    mixers = [getattr(layer, "self_attn", None) or layer.linear_attn for layer in whole.model.layers]
    assert [mixer.index for mixer in mixers] == list(range(whole.config.num_hidden_layers))


def test_some_of_some(whole):
    twice = skip_layers(skip_layers(whole, [0, 1, 3]), [0, 2])
    assert torch.equal(token_by_token(twice), token_by_token(skip_layers(whole, [0, 3])))


@pytest.mark.parametrize("keep", [[], [1, 1], [2, 1], [-1, 2], [0, 99]])
def test_layers_that_are_none(whole, keep):
    with pytest.raises(InvalidValue, match="keep"):
        skip_layers(whole, keep)
