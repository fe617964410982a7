"""Joining partial attentions: what was computed over parts of the keys becomes what all keys together would have given.

    lse = log sum_p exp(lse_p)          out = sum_p exp(lse_p - lse) out_p

out_p is attention over the keys of part p alone, and lse_p the logarithm of the sum that its softmax divided by.
Milakov and Gimelshein, Online normalizer calculation for softmax (arXiv 1805.02867).
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def merge_attention(
    outs: Float[Tensor, "parts tokens heads head_dim"], lses: Float[Tensor, "parts tokens heads"]
) -> tuple[Float[Tensor, "tokens heads head_dim"], Float[Tensor, "tokens heads"]]:
    """Join attentions over disjoint parts of the keys, so that parts can be computed apart and in any order.

    Arguments:
        outs: the attention over each part.
        lses: natural log of each part's sum of exponentials; -inf for a part in which a query sees no key. Such a part
            counts nothing, whatever its out holds.
    Returns the attention over all parts in the dtype of `outs`, and its log-sum-exp in that of `lses`. A query that
    sees no key in any part gets 0 and -inf.

    >>> outs, lses = torch.tensor([1.0, 5.0]).view(2, 1, 1, 1), torch.tensor([3.0, 1.0]).log().view(2, 1, 1)
    >>> out, lse = merge_attention(outs, lses)
    >>> round(out.item(), 6), round(lse.exp().item(), 6)
    (2.0, 4.0)
    """
    unseen = lses == -torch.inf
    lse = lses.logsumexp(0)
    weights = (lses - lse).masked_fill(unseen, -torch.inf).exp()
    wide = torch.promote_types(outs.dtype, lses.dtype)
    # 0 times what an unseen part holds would not be 0 if that is NaN.
    out = (weights[..., None] * outs.to(wide).masked_fill(unseen[..., None], 0)).sum(0)
    return out.to(outs.dtype), lse
