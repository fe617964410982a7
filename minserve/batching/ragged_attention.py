"""Attention over rows of unequal length, packed one after the other: no padding, and no row sees another.

    out_i = sum_j softmax_j( q_i . k_j / sqrt(head_dim) ) v_j       j in the row of i, j <= i
    lse_i = log sum_j exp( q_i . k_j / sqrt(head_dim) )

Vaswani et al., Attention Is All You Need (arXiv 1706.03762), section 3.2. Query head h reads key head
h // (heads / kv_heads): Ainslie et al., GQA (arXiv 2305.13245).
"""

from __future__ import annotations

from itertools import pairwise

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from minserve.errors import InvalidValue

QUERIES_AT_A_TIME = 64  # so many queries skip the keys after the last of them, and their scores stay in a cache


def ragged_attention(
    q: Float[Tensor, "tokens heads head_dim"],
    k: Float[Tensor, "tokens kv_heads head_dim"],
    v: Float[Tensor, "tokens kv_heads head_dim"],
    row_starts: Int[Tensor, " rows_plus_1"],
) -> tuple[Float[Tensor, "tokens heads head_dim"], Float[Tensor, "tokens heads"]]:
    """Let every token attend to itself and to the tokens before it in its own row.

    Arguments:
        q: queries, packed; heads is a multiple of kv_heads.
        k, v: keys and values of the same tokens.
        row_starts: where each row begins, and the end: from 0 to the number of tokens. A row may be empty.
    Returns the attention in q's dtype, and each query's log-sum-exp in float32, or float64 for float64 inputs.
    Errors: InvalidValue for row_starts that leave tokens out.

    >>> q = k = torch.zeros(3, 1, 2)
    >>> v = torch.tensor([2.0, 4.0, 9.0]).view(3, 1, 1).expand(3, 1, 2)
    >>> out, lse = ragged_attention(q, k, v, torch.tensor([0, 2, 3]))
    >>> out[:, 0, 0].tolist(), lse[:, 0].exp().round().tolist()
    ([2.0, 3.0, 9.0], [1.0, 2.0, 1.0])
    """
    bounds = row_starts.tolist()
    if not bounds or bounds[0] != 0 or bounds[-1] != len(q):
        raise InvalidValue("row_starts", bounds, f"from 0 to {len(q)}, the number of tokens")
    wide = torch.promote_types(q.dtype, torch.float32)
    keys, values = k.to(wide), v.to(wide)
    outs, lses = [q[:0]], [q.new_zeros(0, q.shape[1], dtype=wide)]
    for start, stop in pairwise(bounds):
        for first in range(start, stop, QUERIES_AT_A_TIME):
            last = min(first + QUERIES_AT_A_TIME, stop)
            out, lse = _attend(q[first:last].to(wide), keys[start:last], values[start:last])
            outs.append(out.to(q.dtype))
            lses.append(lse)
    return torch.cat(outs), torch.cat(lses)


def _attend(
    q: Float[Tensor, "queries heads head_dim"],
    k: Float[Tensor, "keys kv_heads head_dim"],
    v: Float[Tensor, "keys kv_heads head_dim"],
) -> tuple[Float[Tensor, "queries heads head_dim"], Float[Tensor, "queries heads"]]:
    """Attend from the last tokens of a sequence to all of it: the causal triangle is aligned to the bottom right."""
    (num_queries, heads, head_dim), (num_keys, kv_heads, _) = q.shape, k.shape
    q = rearrange(q * head_dim**-0.5, "n (kv group) d -> kv (n group) d", kv=kv_heads)
    scores = (q @ rearrange(k, "m kv d -> kv d m")).unflatten(1, (num_queries, heads // kv_heads))
    hidden = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q.device).triu(num_keys - num_queries + 1)
    scores = scores.masked_fill(hidden[:, None], -torch.inf)
    # The highest score only keeps exp in range; it cancels, and no gradient flows through it.
    peak = scores.detach().amax(-1, keepdim=True)
    weights = (scores - peak).exp_()
    total = weights.sum(-1, keepdim=True)
    out = (weights.flatten(1, 2) @ v.transpose(0, 1)).unflatten(1, weights.shape[1:3]) / total
    lse = (peak + total.log()).squeeze(-1)
    return rearrange(out, "kv n group d -> n (kv group) d"), rearrange(lse, "kv n group -> n (kv group)")
