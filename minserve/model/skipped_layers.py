"""A model made of some of another's layers: a drafter that needs no training and no memory for weights.

A decoder layer adds to what the layers before it gave, so leaving some out changes the sum and not its meaning. Which
ones can go is found by trying: Zhang et al., Draft & Verify: Lossless LLM Acceleration via Self-Speculative Decoding
(arXiv 2309.08168), skip about half of them, chosen for most tokens per second.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import TypeVar

from torch import nn

from minserve.errors import InvalidValue
from minserve.model.config import FULL
from minserve.model.hybrid_lm import HybridLM
from minserve.model.layers import DecoderLayer

AnyModule = TypeVar("AnyModule", bound=nn.Module)


def skip_layers(model: HybridLM, keep: Sequence[int]) -> HybridLM:
    """A model that runs only some of another's layers, on the other's own weights.

    Arguments:
        model: the whole model; it is not changed.
        keep: the layers that are run, from 0, rising; at least one.
    Returns a model without an MTP head, which would expect what comes out of the last of all layers. Its layers are
    numbered anew, since it remembers for itself what they ask to be remembered.
    Errors: InvalidValue for layers that do not exist or do not rise.
    """
    keep, config = list(keep), model.config
    if not keep or keep != sorted(set(keep)) or keep[0] < 0 or keep[-1] >= config.num_hidden_layers:
        raise InvalidValue("keep", keep, f"layers from 0 to {config.num_hidden_layers - 1}, rising, at least one")
    skipped, trunk = _same_parts(model), _same_parts(model.model)
    trunk.layers = nn.ModuleList(_renumbered(model.model.layers[i], index) for index, i in enumerate(keep))
    skipped.model, skipped.mtp = trunk, None
    kinds = tuple(config.layer_types[i] for i in keep)
    skipped.config = replace(config, num_hidden_layers=len(keep), layer_types=kinds, mtp_num_hidden_layers=0)
    return skipped


def _renumbered(layer: DecoderLayer, index: int) -> DecoderLayer:
    """The same layer, asking the memory under another number."""
    layer, name = _same_parts(layer), "self_attn" if layer.kind == FULL else "linear_attn"
    mixer = _same_parts(getattr(layer, name))
    mixer.index = index
    setattr(layer, name, mixer)
    return layer


def _same_parts(module: AnyModule) -> AnyModule:
    """A module with the very parts and parameters of another, in which they can be replaced for itself alone."""
    same = copy(module)
    same._modules = dict(module._modules)
    same._parameters = dict(module._parameters)
    return same
