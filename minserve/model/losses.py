"""What training minimizes, on the layers that serve, with a memory that forgets when the step ends."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from minserve.deltanet.conv_tail import conv_tail
from minserve.deltanet.gated_delta import across_chunks, within_chunks
from minserve.model.hybrid_lm import HybridLM
from minserve.model.layers import Routing, widen
from minserve.model.step import Step

CHUNK = 64
# The loop over chunks is left out of the compiled layers: unrolled, it takes minutes to compile and gains nothing.
carry_state = torch.compiler.disable(across_chunks)


class TrainMemory:
    """The memory of a training step: rows of equal length, all starting from nothing, none kept."""

    def __init__(self, num_rows: int, row_tokens: int):
        self.num_rows, self.row_tokens = num_rows, row_tokens

    def rows(self, x: Tensor) -> Tensor:
        """Packed tokens as [rows, tokens of a row, ...]."""
        return x.unflatten(0, (self.num_rows, self.row_tokens))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention within each row."""
        q, k, v = (self.rows(x).transpose(1, 2).to(v.dtype) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)

    def convolve(self, layer: int, x: Tensor, weight: Tensor) -> Tensor:
        """The convolution of each row, from an empty tail."""
        tail = x.new_zeros(self.num_rows, weight.shape[1] - 1, x.shape[1])
        return conv_tail(self.rows(x), weight, tail)[0].flatten(0, 1)

    def recur(self, layer: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        """The delta rule over each row, from a zero state."""
        state = g.new_zeros(self.num_rows, v.shape[1], k.shape[2], v.shape[2])
        with torch.autocast("cpu", enabled=False):  # differences of sums of g want float32
            terms = within_chunks(*(self.rows(x) for x in (q, k, v, g, beta)), CHUNK)
            out, _ = carry_state(terms, state)
        return out[:, : self.row_tokens].flatten(0, 1).to(v.dtype)  # the last chunk may be padded


def balance_loss(routing: Routing) -> Float[Tensor, ""]:
    """Switch Transformers' load-balancing loss (arXiv 2101.03961): experts x sum(tokens share x mean probability)."""
    probs = routing.logits.softmax(-1)
    num_experts = probs.shape[-1]
    chosen = F.one_hot(routing.expert_ids, num_experts).to(probs.dtype).sum(1).mean(0) / routing.expert_ids.shape[1]
    return num_experts * (chosen * probs.mean(0)).sum()


def losses(model: HybridLM, rows: Int[Tensor, "rows t"], deep: bool) -> dict[str, Tensor]:
    """All losses of a batch in nats: main, MTP at depth 1 and (when `deep`) 2; with experts, balance and router."""
    num_rows, row_tokens = rows.shape[0], rows.shape[1] - 3
    positions, every = torch.arange(row_tokens).repeat(num_rows), torch.arange(num_rows * row_tokens)
    starts = torch.arange(num_rows + 1) * row_tokens

    def shifted(by: int) -> tuple[Step, Tensor]:
        tokens, targets = (rows[:, by + i : by + i + row_tokens].flatten() for i in (0, 1))
        return Step(tokens, positions + by, starts, every), targets

    memory = TrainMemory(num_rows, row_tokens)
    step, targets = shifted(0)
    output = model(step, memory)
    parts = {"main": F.cross_entropy(widen(output.logits), targets)}
    routings, hidden = list(output.routing), output.hidden
    for depth in range(1, (2 if deep else 1) + 1 if model.mtp else 1):
        step, targets = shifted(depth)
        hidden, routing = model.draft_hidden(step, hidden, memory)
        logits = model.logits(hidden)
        parts[f"mtp{depth}"] = F.cross_entropy(widen(logits), targets)
        routings += [routing] if depth == 1 else []
    if model.config.is_moe:
        parts["balance"] = sum(balance_loss(r) for r in routings) / len(routings)
        parts["router"] = sum(widen(r.logits).logsumexp(-1).square().mean() for r in routings) / len(routings)
    return parts
