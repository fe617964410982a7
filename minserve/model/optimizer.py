"""Muon for the matrices, AdamW for everything else.

Muon replaces a matrix's momentum by the nearest orthogonal matrix, so that every direction learns at one speed; a few
Newton-Schulz iterations find it with nothing but matrix products. Jordan et al., Muon (2024),
https://kellerjordan.github.io/posts/muon/.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

ADAM_NAMES = (
    "embed_tokens",
    "lm_head",
    "norm",
    "conv1d",
    "A_log",
    "dt_bias",
    "mlp.gate.",
    "shared_expert_gate",
    "in_proj_a",
    "in_proj_b",
)


def orthogonalize(
    matrix: Float[Tensor, "*stack rows columns"], num_iterations: int = 5
) -> Float[Tensor, "*stack rows columns"]:
    """Approximate U V^T of each matrix's singular value decomposition by a quintic Newton-Schulz iteration."""
    x = matrix.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(num_iterations):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return (x.mT if tall else x).to(matrix.dtype)


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalized. Matrices of one shape are stacked and handled together."""

    def __init__(self, params: list[nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.05):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update every parameter from its gradient. Changes: the parameters and their momenta."""
        for group in self.param_groups:
            shapes: dict[torch.Size, list[nn.Parameter]] = {}
            for p in group["params"]:
                shapes.setdefault(p.shape[-2:], []).append(p)
            for shape, params in shapes.items():
                updates = []
                for p in params:
                    momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    momentum.lerp_(p.grad, 1 - group["momentum"])
                    updates.append(p.grad.lerp(momentum, group["momentum"]).view(-1, *shape))
                directions = orthogonalize(torch.cat(updates)).split([len(u) for u in updates])
                scale = group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5
                for p, direction in zip(params, directions, strict=True):
                    p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(direction.view_as(p), alpha=scale)


def make_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Share out a model's parameters: matrices to Muon, embeddings, head, norms and gates to AdamW."""
    named = list(model.named_parameters())
    adam = [(name, p) for name, p in named if p.ndim < 2 or any(part in name for part in ADAM_NAMES)]
    ends = [p for name, p in adam if "embed_tokens" in name or "lm_head" in name]
    rest = [p for name, p in adam if "embed_tokens" not in name and "lm_head" not in name]
    taken = {id(p) for _, p in adam}
    groups = [{"params": ends, "lr": 3e-3}, {"params": rest, "lr": 2.1e-3}]
    return [
        Muon([p for _, p in named if id(p) not in taken], lr=0.02),
        torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.01, fused=True),
    ]
