"""A model whose draft head has forgotten everything: what a drafter costs that is never right.

Its weights are the trained ones in another order. So they are as large as before, the head takes as long as before,
and it knows nothing.
"""

from __future__ import annotations

from copy import deepcopy

import torch

from minserve.errors import InvalidValue
from minserve.model.hybrid_lm import HybridLM
from minserve.model.joined_projections import join_projections


@torch.no_grad()
def shuffle_head(model: HybridLM, seed: int) -> HybridLM:
    """A model that says what another says, on the other's own weights, with a draft head of shuffled ones.

    Arguments:
        model: with an MTP head; it is not changed.
        seed: of the order.
    Returns a model to be read, not trained. Embedding, layers and output matrix are the other's; the head is its own.
    Errors: InvalidValue for a model without a head.
    """
    if model.mtp is None:
        raise InvalidValue("model", "a model without an MTP head", "one with a head, whose weights can be shuffled")
    shared = {id(part): part for part in (model.model, model.lm_head)}
    shuffled = deepcopy(model, shared)
    generator = torch.Generator().manual_seed(seed)
    for weight in shuffled.mtp.parameters():
        order = torch.randperm(weight.numel(), generator=generator).to(weight.device)
        weight.copy_(weight.flatten()[order].view_as(weight))
    join_projections(shuffled.mtp)  # a copied weight is no view of the joined ones any more
    return shuffled
