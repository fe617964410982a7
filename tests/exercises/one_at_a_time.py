"""Other ways to what exercises should give: attention one query at a time, a plan one token at a time."""

import math

import torch


def random(*shape, seed=0):
    """Random numbers; a few are rounded, to be easy on the eye."""
    numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return numbers.round(decimals=1) if numbers.numel() <= 16 else numbers


def weighted(scores, values):
    """Softmax's output and log-sum-exp, from the definition; scores [tokens, keys], values [keys, dim]."""
    weights = torch.exp(scores - scores.max())
    return weights @ values / weights.sum(-1, keepdim=True), torch.log(weights.sum(-1)) + scores.max()


def attended(q, k, v, row_starts, context_starts):
    """Causal attention of a packed batch, one query and one head at a time; 0 and -inf where a row has no context."""
    out, lse = torch.zeros_like(q), torch.full(q.shape[:2], -math.inf, dtype=q.dtype)
    for row in range(len(row_starts) - 1):
        first, end = context_starts[row], context_starts[row + 1]
        for token in range(row_starts[row], row_starts[row + 1]):
            num_after = row_starts[row + 1] - 1 - token
            for head in range(q.shape[1] if end > first else 0):
                kv_head = head * k.shape[1] // q.shape[1]
                keys, values = k[first : end - num_after, kv_head], v[first : end - num_after, kv_head]
                scores = (keys * q[token, head]).sum(-1) / math.sqrt(q.shape[-1])
                one_out, one_lse = weighted(scores[None], values)
                out[token, head], lse[token, head] = one_out[0], one_lse[0]
    return out, lse


def planned(running, waiting, batch_tokens, max_running, free_pages, page_size):
    """The slices of a step: tokens are given out one by one, and pages when a token needs one."""
    slices, queue = [], list(waiting)
    order = sorted(running, key=lambda request: request.phase != "decode")
    num_running, pool = len(running), free_pages + sum(request.num_pages for request in running)
    while order or queue:
        if not order:
            missing = -(-queue[0].num_tokens // page_size) - queue[0].num_pages
            if missing > pool:
                slices.append((queue.pop(0).id, 0, 0, "refused"))
                continue
            if num_running >= max_running or missing > free_pages:
                break
            order, num_running = [queue.pop(0)], num_running + 1
        request = order.pop(0)
        position, num_pages = request.num_computed, request.num_pages
        while batch_tokens and position < request.num_tokens:
            if position == num_pages * page_size:
                if free_pages == 0:
                    break
                num_pages, free_pages = num_pages + 1, free_pages - 1
            position, batch_tokens = position + 1, batch_tokens - 1
        if position > request.num_computed:
            slices.append((request.id, request.num_computed, position, request.phase))
    return slices
