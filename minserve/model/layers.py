"""The layers of the Qwen3.5 decoder, each a box that computes and remembers nothing.

All work on packed tokens [tokens, hidden]; what must be remembered goes through `memory`. Parameter names are those of
the published checkpoints. Gated attention: Qiu et al., arXiv 2505.06708. Gated DeltaNet: Yang et al., arXiv 2412.06464.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from minserve.model.config import FULL, ModelConfig
from minserve.model.implementations import choose_implementation
from minserve.model.joined_projections import JoinedProjections
from minserve.model.memory import Memory


class Routing(NamedTuple):
    """What a router decided in one layer: its logits, and the experts and weights of each token."""

    logits: Float[Tensor, "tokens experts"]
    expert_ids: Int[Tensor, "tokens top_k"]
    weights: Float[Tensor, "tokens top_k"]


def widen(x: Tensor) -> Tensor:
    """x in the dtype for sums and exponentials: float32, or float64 for a float64 tensor."""
    return as_dtype(x, torch.promote_types(x.dtype, torch.float32))


def as_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in a dtype. A `to` that has nothing to do costs as much as a small product: a decode step has hundreds."""
    return x if x.dtype == dtype else x.to(dtype)


def rms_normalize(x: Float[Tensor, "*rows dim"], eps: float) -> Float[Tensor, "*rows dim"]:
    """x / sqrt(mean(x^2) + eps) along the last axis; the result stays wide."""
    return _shorten(widen(x), eps, x.shape[-1])


def l2_normalize(x: Float[Tensor, "*rows dim"]) -> Float[Tensor, "*rows dim"]:
    """Divide x by its length along the last axis; the result stays wide. The 1e-6 stands under the root."""
    return _shorten(widen(x), 1e-6, 1)


def _shorten(x: Float[Tensor, "*rows dim"], eps: float, share: int) -> Float[Tensor, "*rows dim"]:
    """x / sqrt(|x|^2 / share + eps) along the last axis, in few calls."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * torch.addcmul(x.new_full((), eps), length, length, value=1 / share).rsqrt()


def rotary_table(positions: Int[Tensor, " tokens"], config: ModelConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of RoPE's angles, each [tokens, rotary_dim / 2]; position p turns pair i by p theta^(-2i/dim)."""
    wide = torch.promote_types(dtype, torch.float32)
    pair = torch.arange(0, config.rotary_dim, 2, dtype=wide, device=positions.device) / config.rotary_dim
    angle = positions.to(wide)[:, None] / config.rope_theta**pair
    return as_dtype(angle.cos(), dtype), as_dtype(angle.sin(), dtype)


def rotate(x: Float[Tensor, "tokens heads head_dim"], rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Turn the first rotary_dim dimensions of each head (dimension i pairs with i + rotary_dim / 2), keep the rest."""
    cos, sin = rotation[0][:, None], rotation[1][:, None]
    half = cos.shape[-1]
    first, second, rest = torch.split_with_sizes(x, [half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


class RMSNorm(nn.Module):
    """Root-mean-square norm whose weight counts from one: x / rms(x) * (1 + weight)."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(size)), eps

    def forward(self, x: Float[Tensor, "*rows dim"]) -> Float[Tensor, "*rows dim"]:
        """Normalize the last axis; the result has x's dtype."""
        normed = rms_normalize(x, self.eps)
        return as_dtype(torch.addcmul(normed, normed, widen(self.weight)), x.dtype)

    __call__ = forward  # without the hooks of nn.Module, which cost a norm of one row a third of its time


class GatedRMSNorm(nn.Module):
    """The norm after the delta rule: x / rms(x) * weight * silu(gate); here the weight does not count from one."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Float[Tensor, "*rows dim"], gate: Float[Tensor, "*rows dim"]) -> Float[Tensor, "*rows dim"]:
        """Normalize the last axis of x and gate it; the result has the gate's dtype."""
        normed = rms_normalize(x, self.eps) * widen(self.weight)
        return as_dtype(normed * F.silu(widen(gate)), gate.dtype)

    __call__ = forward  # as above


class GatedAttention(nn.Module):
    """Full attention with normed queries and keys, partial RoPE, and a sigmoid gate on its output."""

    def __init__(self, config: ModelConfig, index: int):
        super().__init__()
        hidden, dim = config.hidden_size, config.head_dim
        self.index, self.head_dim = index, dim
        self.q_proj = nn.Linear(hidden, config.num_attention_heads * 2 * dim, bias=False)
        self.k_proj = nn.Linear(hidden, config.num_key_value_heads * dim, bias=False)
        self.v_proj = nn.Linear(hidden, config.num_key_value_heads * dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * dim, hidden, bias=False)
        self.q_norm, self.k_norm = RMSNorm(dim, config.rms_norm_eps), RMSNorm(dim, config.rms_norm_eps)
        self.projections = JoinedProjections(self.q_proj, self.k_proj, self.v_proj)

    def forward(self, x: Float[Tensor, "tokens hidden"], rotation: tuple[Tensor, Tensor], memory: Memory) -> Tensor:
        """Attend from each token to its own sequence. q_proj is laid out per head as [query | gate]."""
        q, k, v = self.projections(x)
        q, gate = q.unflatten(1, (-1, 2, self.head_dim)).unbind(2)
        k, v = k.unflatten(1, (-1, self.head_dim)), v.unflatten(1, (-1, self.head_dim))
        q, k = rotate(self.q_norm(q), rotation), rotate(self.k_norm(k), rotation)
        out = memory.attend(self.index, q, k, v)
        return F.linear((out * gate.sigmoid()).flatten(1), self.o_proj.weight)


class GatedDeltaNet(nn.Module):
    """Linear attention whose memory is one matrix per head, corrected by the gated delta rule."""

    def __init__(self, config: ModelConfig, index: int):
        super().__init__()
        hidden, heads = config.hidden_size, config.linear_num_value_heads
        self.index = index
        self.key_head_dim, self.value_head_dim = config.linear_key_head_dim, config.linear_value_head_dim
        self.widths = [config.key_dim, config.key_dim, config.value_dim]
        self.in_proj_qkv = nn.Linear(hidden, config.conv_channels, bias=False)
        self.in_proj_z = nn.Linear(hidden, config.value_dim, bias=False)
        self.in_proj_b = nn.Linear(hidden, heads, bias=False)
        self.in_proj_a = nn.Linear(hidden, heads, bias=False)
        self.conv1d = nn.Conv1d(config.conv_channels, config.conv_channels, config.linear_conv_kernel_dim,
                                groups=config.conv_channels, bias=False)  # fmt: skip
        self.A_log, self.dt_bias = nn.Parameter(torch.zeros(heads)), nn.Parameter(torch.ones(heads))
        self.norm = GatedRMSNorm(self.value_head_dim, config.rms_norm_eps)
        self.out_proj = nn.Linear(config.value_dim, hidden, bias=False)
        self.projections = JoinedProjections(self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a)

    def forward(self, x: Float[Tensor, "tokens hidden"], memory: Memory) -> Float[Tensor, "tokens hidden"]:
        """Convolve, apply the delta rule, gate; g = -exp(A_log) softplus(a + dt_bias), beta = sigmoid(b)."""
        qkv, z, b, a = self.projections(x)
        qkv = memory.convolve(self.index, qkv, self.conv1d.weight.squeeze(1))
        qk, v = torch.split_with_sizes(qkv, [2 * self.widths[0], self.widths[2]], dim=-1)
        q, k = l2_normalize(qk.unflatten(1, (-1, self.key_head_dim))).chunk(2, dim=1)
        v, z = v.unflatten(1, (-1, self.value_head_dim)), z.unflatten(1, (-1, self.value_head_dim))
        g = -widen(self.A_log).exp() * F.softplus(widen(a) + self.dt_bias)
        out = memory.recur(self.index, q * self.key_head_dim**-0.5, k, v, g, widen(b).sigmoid())
        return F.linear(self.norm(out, z).flatten(1), self.out_proj.weight)


class GatedMLP(nn.Module):
    """The weights of down(silu(gate x) * up x), for an owner who multiplies x itself, along with other things."""

    def __init__(self, hidden: int, intermediate: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def mix(self, gate: Float[Tensor, "tokens inner"], up: Float[Tensor, "tokens inner"]) -> Tensor:
        """Go on from gate x and up x: the MLP's output, [tokens hidden]."""
        return F.linear(F.silu(gate) * up, self.down_proj.weight)

    def forward(self, x: Float[Tensor, "tokens hidden"]) -> Float[Tensor, "tokens hidden"]:
        """Apply the MLP to each token."""
        return self.mix(self.gate_proj(x), self.up_proj(x))


class DenseMLP(GatedMLP):
    """A gated MLP by itself, its two projections of x in one product."""

    def __init__(self, hidden: int, intermediate: int):
        super().__init__(hidden, intermediate)
        self.projections = JoinedProjections(self.gate_proj, self.up_proj)

    def forward(self, x: Float[Tensor, "tokens hidden"]) -> Float[Tensor, "tokens hidden"]:
        """Apply the MLP to each token."""
        return self.mix(*self.projections(x))


class Experts(nn.Module):
    """The routed experts' weights, stacked: one tensor for all gate and up rows, one for all down rows."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        experts, hidden, inner = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * inner, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, inner))


class MixtureOfExperts(nn.Module):
    """A few routed experts per token, and one shared expert behind a gate of its own."""

    def __init__(self, config: ModelConfig, impl: str):
        super().__init__()
        self.top_k, self.mix = config.num_experts_per_tok, choose_implementation(impl).expert_mix
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = Experts(config)
        self.shared_expert = GatedMLP(config.hidden_size, config.shared_expert_intermediate_size)
        self.shared_expert_gate = nn.Linear(config.hidden_size, 1, bias=False)
        shared = self.shared_expert
        self.projections = JoinedProjections(self.gate, self.shared_expert_gate, shared.gate_proj, shared.up_proj)

    def forward(self, x: Float[Tensor, "tokens hidden"]) -> tuple[Float[Tensor, "tokens hidden"], Routing]:
        """Route each token: softmax over all experts, renormalized over the top k, which is the softmax of these."""
        logits, share, gate, up = self.projections(x)
        highest, expert_ids = logits.topk(self.top_k, dim=-1)
        weights = as_dtype(widen(highest).softmax(-1), x.dtype)
        out = self.mix(x, expert_ids, weights, self.experts.gate_up_proj, self.experts.down_proj)
        out = out + share.sigmoid() * self.shared_expert.mix(gate, up)
        return out, Routing(logits, expert_ids, weights)


class DecoderLayer(nn.Module):
    """Norm, mix tokens, add; norm, mix channels, add."""

    def __init__(self, config: ModelConfig, index: int, kind: str, impl: str):
        super().__init__()
        if kind == FULL:
            self.self_attn = GatedAttention(config, index)
        else:
            self.linear_attn = GatedDeltaNet(config, index)
        self.kind = kind
        self.mlp = (
            MixtureOfExperts(config, impl) if config.is_moe else DenseMLP(config.hidden_size, config.intermediate_size)
        )
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, x: Float[Tensor, "tokens hidden"], rotation: tuple[Tensor, Tensor], memory: Memory
    ) -> tuple[Float[Tensor, "tokens hidden"], Routing | None]:
        """Run the layer; a dense one has no routing to report."""
        normed = self.input_layernorm(x)
        x = x + (self.self_attn(normed, rotation, memory) if self.kind == FULL else self.linear_attn(normed, memory))
        out = self.mlp(self.post_attention_layernorm(x))
        out, routing = out if isinstance(out, tuple) else (out, None)
        return x + out, routing
