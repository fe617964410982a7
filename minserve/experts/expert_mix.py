"""What a mixture of experts computes, once the router has chosen.

    out[t] = sum_j weights[t, j] down[e] ( silu(gate[e] x[t]) * (up[e] x[t]) ),   e = expert_ids[t, j]

Two forms. `expert_mix` does the work that serving does: each expert that somebody chose is read once, for its own rows.
`expert_mix_dense` runs every expert on every token and weighs the unchosen ones by zero: many times the arithmetic, no
sorting, no gathering and fixed shapes, which is what a trainer of a tiny model wants.
Shazeer et al., Outrageously Large Neural Networks (arXiv 1701.06538), section 2.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

COPIED_AT_MOST = 1 << 17  # weights of few tokens' experts: so many stay in a processor's cache


def expert_mix(
    x: Float[Tensor, "tokens hidden"],
    expert_ids: Int[Tensor, "tokens top_k"],
    weights: Float[Tensor, "tokens top_k"],
    gate_up: Float[Tensor, "experts two_intermediate hidden"],
    down: Float[Tensor, "experts hidden intermediate"],
) -> Float[Tensor, "tokens hidden"]:
    """Mix the chosen experts' outputs, reading the weights of chosen experts only.

    Arguments:
        x: the tokens, packed.
        expert_ids: the experts of each token, 0 <= id < experts.
        weights: the share of each of them, in the order of expert_ids.
        gate_up: gate rows, then up rows, of each expert.
        down: the way back, of each expert.
    Returns the mixed rows, in x's dtype. A token that chooses an expert twice gets it twice.
    """
    if len(x) == 1:
        return _mix_one_token(x, expert_ids, weights, gate_up, down)
    if 0 < expert_ids.numel() * gate_up[0].numel() <= COPIED_AT_MOST:
        return _mix_few_tokens(x, expert_ids, weights, gate_up, down)
    # Sort the choices by expert, so that each expert's rows lie together and are two products.
    num_choices = expert_ids.shape[1]
    choice = expert_ids.flatten().argsort(stable=True)
    counts = torch.bincount(expert_ids.flatten(), minlength=len(gate_up)).tolist()
    rows = x[choice // num_choices].split(counts)
    gate, up = _per_expert(rows, gate_up).chunk(2, dim=-1)
    mixed = _per_expert((F.silu(gate) * up).split(counts), down)
    out = torch.empty_like(mixed).index_copy(0, choice, mixed).unflatten(0, (-1, num_choices))
    return (out * weights[..., None]).sum(1).to(x.dtype)


def _per_expert(rows: Sequence[Tensor], matrices: Float[Tensor, "experts out in"]) -> Float[Tensor, "choices out"]:
    """Multiply each expert's rows by its matrix; experts without rows are not read."""
    products = [F.linear(part, matrix) for part, matrix in zip(rows, matrices.unbind(), strict=True) if part.shape[0]]
    return torch.cat(products) if products else matrices.new_zeros(0, matrices.shape[1])


def _mix_one_token(x: Tensor, expert_ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """The mix of a single token, whose experts need no grouping: fewer calls, which is what decode waits for."""
    outs = []
    for expert in expert_ids[0].tolist():
        gate, up = F.linear(x, gate_up[expert]).chunk(2, dim=-1)
        outs.append(F.linear(F.silu(gate) * up, down[expert]))
    return weights.to(x.dtype) @ torch.cat(outs)


def _mix_few_tokens(x: Tensor, expert_ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """The mix of few tokens and small experts: a copy of its matrices for each choice costs less than grouping."""
    (num_tokens, num_choices), chosen = expert_ids.shape, expert_ids.flatten()
    rows = x.repeat_interleave(num_choices, 0)[:, None]
    gate, up = torch.bmm(rows, gate_up.index_select(0, chosen).mT).chunk(2, dim=-1)
    mixed = torch.bmm(F.silu(gate) * up, down.index_select(0, chosen).mT).view(num_tokens, num_choices, -1)
    return (weights.to(x.dtype)[:, None] @ mixed)[:, 0]


def expert_mix_dense(
    x: Float[Tensor, "tokens hidden"],
    expert_ids: Int[Tensor, "tokens top_k"],
    weights: Float[Tensor, "tokens top_k"],
    gate_up: Float[Tensor, "experts two_intermediate hidden"],
    down: Float[Tensor, "experts hidden intermediate"],
) -> Float[Tensor, "tokens hidden"]:
    """Mix the experts by running all of them on every token; same arguments and result as `expert_mix`."""
    num_experts, width, _ = gate_up.shape
    share = weights.new_zeros(x.shape[0], num_experts).scatter_add(1, expert_ids, weights)
    gate, up = F.linear(x, gate_up.flatten(0, 1)).view(-1, num_experts, 2, width // 2).unbind(2)
    rows = F.silu(gate) * up * share[..., None].to(gate.dtype)
    return F.linear(rows.flatten(1), down.permute(1, 0, 2).flatten(1)).to(x.dtype)
