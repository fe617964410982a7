# Write your code where it says YOUR CODE, in place of the line that raises. Check it with: pytest tests/exercises
# ruff: noqa: F401
"""Chapter 2, the model: what each kind of layer computes for one request, and what it must remember.

Tensors hold one sequence; [tokens, heads, dim] says what their axes are.
"""

from dataclasses import dataclass

import torch


def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """RoPE, ready to use: turn each head of x [tokens, heads, dim] by its token's position (int, [tokens])."""
    half = x.shape[-1] // 2
    angles = positions[:, None, None] * 10_000.0 ** (-torch.arange(half, dtype=x.dtype) / half)
    left, right = x[..., :half], x[..., half:]
    return torch.cat([left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()], dim=-1)


def attend_cached(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Let new tokens attend to everything cached and, causally, to one another.

    The result must not depend on how a sequence was cut into chunks. The cache holds rotated keys.

    Args:
        q: [tokens, heads, dim], not rotated yet.
        k, v: [tokens, kv_heads, dim], k not rotated yet. Heads 0..n-1 share KV head 0, the next n KV head 1, and so on.
        k_cache, v_cache: [context, kv_heads, dim], what the tokens before these have left; context may be 0.

    Returns:
        The output [tokens, heads, dim], scores scaled by dim ** -0.5, and both caches with the new tokens appended,
        [context + tokens, kv_heads, dim].

    >>> one, empty = torch.ones(1, 1, 2), torch.zeros(0, 1, 2)
    >>> out, k_cache, v_cache = attend_cached(one, one, 3 * one, empty, empty)
    >>> out.tolist(), v_cache.shape
    ([[[3.0, 3.0]]], torch.Size([1, 1, 2]))
    """
    # YOUR CODE (30 min, medium): positions first; rotate; append; share KV heads; what may each token see?
    raise NotImplementedError("exercise 2.1")


def split_query_gate(projected: torch.Tensor, num_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Take apart what q_proj makes in a gated attention layer: a query and a gate, side by side in each head.

    Args:
        projected: [tokens, num_heads * 2 * dim], head after head: the query's dim numbers, then the gate's.
        num_heads: query heads.

    Returns:
        Query and gate, each [tokens, num_heads, dim].

    >>> query, gate = split_query_gate(torch.tensor([[1.0, 2.0, 3.0, 4.0]]), num_heads=2)
    >>> query.tolist(), gate.tolist()
    ([[[1.0], [3.0]]], [[[2.0], [4.0]]])
    """
    # YOUR CODE (5 min, easy): heads first, then halves
    raise NotImplementedError("exercise 2.2")


def gate_output(attended: torch.Tensor, gate: torch.Tensor, w_out: torch.Tensor) -> torch.Tensor:
    """Finish a gated attention layer: the gate decides how much of each number reaches the output projection.

    Args:
        attended: [tokens, heads, dim], what attention gave.
        gate: [tokens, heads, dim], as `split_query_gate` gives it; its sigmoid is the share that passes.
        w_out: [hidden, heads * dim], the weight of o_proj, which computes x @ w_out.T.

    Returns:
        [tokens, hidden].

    >>> gate_output(torch.tensor([[[6.0], [4.0]]]), torch.zeros(1, 2, 1), torch.tensor([[1.0, 10.0]])).tolist()
    [[23.0]]
    """
    # YOUR CODE (5 min, easy): gate, then put the heads side by side, then project
    raise NotImplementedError("exercise 2.3")


def delta_step(
    state: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: float, beta: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the gated delta rule for one token of one head: forget a little, correct what is stored under k, then read.

        S <- e^g S;   delta = beta (v - k^T S);   S <- S + k delta^T;   o = q^T S

    Args:
        state: [key_dim, value_dim], S; it belongs to the caller and is not changed.
        q, k: [key_dim], k of length 1, q scaled already.
        v: [value_dim].
        g: log of the share that survives, <= 0.
        beta: how much of what is found under k is replaced, 0 to 1.

    Returns:
        The output [value_dim] and the new state.

    >>> key = torch.tensor([1.0, 0.0])
    >>> out, state = delta_step(torch.zeros(2, 3), key, key, torch.tensor([4.0, 5.0, 6.0]), g=0.0, beta=0.5)
    >>> out.tolist()
    [2.0, 2.5, 3.0]
    """
    # YOUR CODE (15 min, medium): four lines, in the order of the formula
    raise NotImplementedError("exercise 2.4")


def route(
    router_logits: torch.Tensor, shared_logit: torch.Tensor, num_chosen: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Choose a token's experts, and how much each of them and the shared expert counts.

    An expert's probability is its softmax among all experts. The chosen ones' are renormalised to sum to 1.

    Args:
        router_logits: [experts], one per routed expert.
        shared_logit: [], the logit of the shared expert's gate, a sigmoid of its own.
        num_chosen: how many experts a token uses.

    Returns:
        Ids [num_chosen] of the likeliest experts, in any order; their weights [num_chosen]; the shared weight [].

    >>> ids, weights, shared = route(torch.tensor([0.0, 5.0, 5.0]), torch.tensor(0.0), num_chosen=2)
    >>> sorted(ids.tolist()), weights.tolist(), shared.item()
    ([1, 2], [0.5, 0.5], 0.5)
    """
    # YOUR CODE (10 min, easy): softmax, topk, renormalise; there is a second way that gives the same
    raise NotImplementedError("exercise 2.5")


@dataclass(frozen=True)
class Shape:
    """The sizes of a hybrid model that its memory depends on."""

    num_full_layers: int  # gated attention
    num_linear_layers: int  # Gated DeltaNet
    num_mtp_layers: int  # attention layers too, which draft tokens
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    num_key_heads: int  # of a DeltaNet layer, as all that follows
    num_value_heads: int
    key_dim: int  # per head
    value_dim: int  # per head
    conv_kernel: int  # the convolution runs over q, k and v side by side, one channel per number


def bytes_to_remember(
    shape: Shape, num_tokens: int, dtype_bytes: int = 2, state_dtype_bytes: int = 4
) -> dict[str, int]:
    """Count what a server must keep for one request between two steps.

    Args:
        shape: the model; every attention layer caches, the MTP layers included.
        num_tokens: tokens so far.
        dtype_bytes: bytes per number in the KV cache and in the convolution's tail.
        state_dtype_bytes: bytes per number in the recurrent state, one [key_dim, value_dim] per value head.

    Returns:
        "kv_bytes" (keys and values), "state_bytes" (recurrent states), "conv_bytes" (the last conv_kernel - 1 inputs of
        every channel: the queries and keys of all key heads, the values of all value heads).

    >>> bytes_to_remember(Shape(1, 3, 0, 4, 2, 8, 2, 4, 8, 16, 4), num_tokens=10)
    {'kv_bytes': 640, 'state_bytes': 6144, 'conv_bytes': 1728}
    """
    # YOUR CODE (20 min, medium): which of the three depends on num_tokens? Which heads does each of them count?
    raise NotImplementedError("exercise 2.6")


def sample(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float, uniform: float) -> int:
    """Choose the next token as a server does: temperature, then top_k, then top_p, then min_p, then one random number.

    Args:
        logits: [vocab], of any float type; -inf marks a token that must not come.
        temperature: divides the logits; below 1e-5 the likeliest token is taken, of equal ones the lowest id.
        top_k: keep that many of the likeliest tokens, the lower id first among equal ones; 0 keeps all.
        top_p: of what is left, renormalised, keep the likeliest until their sum reaches top_p, the one that reaches it
            included.
        min_p: of what is left, keep tokens at least min_p times as likely as the likeliest.
        uniform: a random number in [0, 1).

    Returns:
        The token id: counting up from id 0, the first at which the sum of the kept probabilities, renormalised, exceeds
        uniform.

    >>> sample(torch.tensor([1.0, 3.0, 2.0]), temperature=1.0, top_k=2, top_p=1.0, min_p=0.0, uniform=0.74)
    2
    """
    # YOUR CODE (40 min, hard): a list of the ids that are still in, likeliest first, is all you need
    raise NotImplementedError("exercise 2.7")


def write_gates(state: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chance: float) -> tuple[float, float]:
    """Decide what a state that is too small should keep: this one is scored, and there is no best answer.

    60 pairs of key and value go by, and `delta_step` writes each with the g and beta that you return. A 16 x 16 state
    cannot hold them all. Then each key is asked, with its chance; the answer counts when the value that is read is the
    right one among 64. The score is the share of questions answered; writing all with beta 1 reaches about 0.37. A
    trained model decides this from the token alone, with its projections a and b.

    Args:
        state: [16, 16], what is stored now.
        k, v: [16], each of length 1, about to be written; a key may come again, with another value.
        chance: how likely it is that this key will be asked, 0 to 1; most are near 0.

    Returns:
        g, <= 0, and beta, 0 to 1.

    >>> g, beta = write_gates(torch.zeros(16, 16), torch.ones(16) / 4, torch.ones(16) / 4, chance=0.9)
    >>> g <= 0 and 0.3 < beta <= 1
    True
    """
    # YOUR CODE (30 min, open): what does a firm write of something unimportant do to what is already there?
    raise NotImplementedError("exercise 2.8")
