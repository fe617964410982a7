"""Several projections of one input, run as one product.

A decode step multiplies one row by dozens of small matrices, and each call costs more than its arithmetic. Projections
that read the same input can lie side by side in memory and be one call; serving engines do so when they load a model
(the "fused QKV" and "gate_up" of vLLM and others). The matrices stay parameters of their own, under the names of the
checkpoint: each is a view of its rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F


class JoinedProjections:
    """Projections of one input, separate until `join` lays their weights side by side.

    Arguments:
        linears: without biases, of one input width.
    """

    def __init__(self, *linears: nn.Linear):
        self.linears = linears
        self.widths = [linear.out_features for linear in linears]
        self._side_by_side: Tensor | None = None
        self._views: Sequence[Tensor] = ()

    def join(self) -> None:
        """Move the weights into one tensor. Changes: where the weights lie; their values, names and sizes stay."""
        self._side_by_side = torch.cat([linear.weight.detach() for linear in self.linears])
        self._views = self._side_by_side.split(self.widths)
        for linear, view in zip(self.linears, self._views, strict=True):
            linear.weight.data = view

    def __call__(self, x: Float[Tensor, "tokens hidden"]) -> Sequence[Float[Tensor, "tokens width"]]:
        """Every projection of x, in order."""
        if self._side_by_side is None or torch.is_grad_enabled() or not self._still_joined():  # a copy has no gradient
            return [F.linear(x, linear.weight) for linear in self.linears]
        return torch.split_with_sizes(F.linear(x, self._side_by_side), self.widths, dim=-1)

    def _still_joined(self) -> bool:
        """Whether every weight is still its view: one that was replaced or converted since counts, not the copy."""
        for linear, view in zip(self.linears, self._views, strict=True):
            # Not `linear.weight`: going through nn.Module's lookup costs more than all the rest here.
            if linear._parameters["weight"].data_ptr() != view.data_ptr():
                return False
        return True


def join_projections(model: nn.Module) -> None:
    """Join every group of projections in a model that will only be read. Changes: where its weights lie."""
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, JoinedProjections):
                value.join()
