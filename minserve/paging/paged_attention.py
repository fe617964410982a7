"""Attention over keys and values that lie in pages, and the writing of them.

    slot(t) = page_tables[row, t // page_size] * page_size + t % page_size       of token t of the row's context
    out_i = sum_j softmax_j( q_i . k[slot(j)] / sqrt(head_dim) ) v[slot(j)]      j <= i
    lse_i = log sum_j exp( q_i . k[slot(j)] / sqrt(head_dim) )

The page table is the only thing that knows where a token lies: pages of a row are in no order, and may be shared.
Kwon et al., Efficient Memory Management for Large Language Model Serving with PagedAttention (arXiv 2309.06180),
section 4.1.

The reference copies the pages of some rows side by side and multiplies them at once. Where memory is fresh, copying is
slow, so the copies of a call share one piece of memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor

from minserve.errors import InvalidValue
from minserve.paging.page_table import pages_needed

# How much is gathered, and how many scores are held, at a time: small enough to stay in a processor's cache.
TOKENS_AT_A_TIME = 4096
SCORES_AT_A_TIME = 1 << 18


@torch.no_grad()
def paged_attention(
    q: Float[Tensor, "tokens heads head_dim"],
    k_pages: Float[Tensor, "pages page_size kv_heads head_dim"],
    v_pages: Float[Tensor, "pages page_size kv_heads head_dim"],
    page_tables: Int[Tensor, "rows max_pages"],
    row_starts: Int[Tensor, " rows_plus_1"],
    context_lens: Int[Tensor, " rows"],
) -> tuple[Float[Tensor, "tokens heads head_dim"], Float[Tensor, "tokens heads"]]:
    """Let the queries of each row, which are the last tokens of its context, attend to its pages.

    Arguments:
        q: queries, packed; heads is a multiple of kv_heads.
        k_pages, v_pages: the pools; the row's own new tokens have been written to them already.
        page_tables: the pages of each row in the order of its tokens; entries beyond the context are not looked at.
        row_starts: where each row begins in q, and the end; a row may be empty.
        context_lens: how many tokens of a row lie in pages, its queries' own included.
    Returns the attention in q's dtype, and each query's log-sum-exp in float32, or float64 for float64 inputs. No
    gradient flows: pages remember numbers, not how they were made.
    Errors: InvalidValue for a context shorter than the row's queries or longer than its page table.
    """
    starts, contexts = row_starts.tolist(), context_lens.tolist()
    num_queries = [stop - start for start, stop in pairwise(starts)]
    page_size, kv_heads = k_pages.shape[1:3]
    _check_contexts(num_queries, contexts, page_tables.shape[1] * page_size)
    wide = torch.promote_types(q.dtype, torch.float32)
    q_scaled = q.to(wide) * q.shape[-1] ** -0.5
    if len(contexts) == 1 and 0 < num_queries[0] * contexts[0] * q.shape[1] <= SCORES_AT_A_TIME:
        out, lse = _attend_alone(q_scaled, k_pages, v_pages, page_tables[0], contexts[0])
        return out.to(q.dtype), lse
    queries = q_scaled.unflatten(1, (kv_heads, -1)).transpose(0, 1)  # kv t group d
    begins = torch.arange(page_tables.shape[1], device=q.device) * page_size
    page_tables = page_tables.masked_fill(begins >= context_lens[:, None], 0)  # any page will do: it is not looked at
    groups = list(_alike(num_queries, contexts))
    room = max((len(rows) * pages_needed(contexts[rows[-1]], page_size) for rows in groups), default=0)
    copied = k_pages.new_empty(2, room, *k_pages.shape[1:])
    out, lse = torch.zeros_like(queries), queries.new_full(queries.shape[:-1], -torch.inf)
    for rows in groups:
        lens, num = [contexts[row] for row in rows], num_queries[rows[0]]
        page_ids = page_tables[rows, : pages_needed(lens[-1], page_size)]
        k, v = (x.to(wide) for x in _gather(k_pages, v_pages, page_ids, lens, copied))
        first_tokens = torch.tensor([[starts[row]] for row in rows], device=q.device)
        step = max(1, SCORES_AT_A_TIME // (len(rows) * lens[-1] * q.shape[1]))
        for first in range(0, num, step):
            tokens = first_tokens + torch.arange(first, min(first + step, num), device=q.device)
            sees = [length - num + first + 1 for length in lens]
            out[:, tokens], lse[:, tokens] = _attend(queries[:, tokens], k, v, sees)
    return out.transpose(0, 1).flatten(1, 2).to(q.dtype), lse.transpose(0, 1).flatten(1)


def _attend_alone(
    q: Float[Tensor, "tokens heads head_dim"],
    k_pages: Float[Tensor, "pages page_size kv_heads head_dim"],
    v_pages: Float[Tensor, "pages page_size kv_heads head_dim"],
    pages: Int[Tensor, " max_pages"],
    context: int,
) -> tuple[Float[Tensor, "tokens heads head_dim"], Float[Tensor, "tokens heads"]]:
    """Attend from the last tokens of the only row there is, in as few calls as it takes: what a user alone feels."""
    num, kv_heads, page_ids = len(q), k_pages.shape[2], pages[: pages_needed(context, k_pages.shape[1])]
    k, v = (x.index_select(0, page_ids).flatten(0, 1)[:context].transpose(0, 1).to(q.dtype) for x in (k_pages, v_pages))
    queries = q.unflatten(1, (kv_heads, -1)).transpose(0, 1)  # kv t group d
    scores = torch.bmm(queries.flatten(1, 2), k.mT)
    if num > 1:
        later = torch.ones(num, num, dtype=torch.bool, device=q.device).triu(1)
        scores.unflatten(1, (num, -1))[..., context - num :].masked_fill_(later[:, None], -torch.inf)
    lse = scores.logsumexp(-1)
    out = torch.bmm(scores.sub_(lse[..., None]).exp_(), v)
    out, lse = (x.unflatten(1, (num, -1)).transpose(0, 1).flatten(1, 2) for x in (out, lse))
    return out, lse


def _check_contexts(num_queries: list[int], contexts: list[int], capacity: int) -> None:
    """Refuse a context that its row's queries or its page table contradict."""
    for row, context in enumerate(contexts):
        if not num_queries[row] <= context <= capacity:
            limit = f"{num_queries[row]}, its queries, to {capacity}, what its page table holds"
            raise InvalidValue(f"context_lens[{row}]", context, limit)


def _alike(num_queries: list[int], contexts: list[int]) -> Iterator[list[int]]:
    """Rows to compute together: equally many queries, contexts of like length, the longest last."""
    rows: list[int] = []
    for row in sorted(range(len(contexts)), key=lambda row: (num_queries[row], contexts[row])):
        full = contexts[row] * (len(rows) + 1) > TOKENS_AT_A_TIME
        if rows and (full or num_queries[row] != num_queries[rows[-1]]):
            yield rows
            rows = []
        if num_queries[row]:
            rows.append(row)
    if rows:
        yield rows


def _gather(
    k_pages: Float[Tensor, "pages page_size kv_heads head_dim"],
    v_pages: Float[Tensor, "pages page_size kv_heads head_dim"],
    page_ids: Int[Tensor, "rows row_pages"],
    lens: list[int],
    copied: Float[Tensor, "2 room page_size kv_heads head_dim"],
) -> list[Float[Tensor, "rows longest kv_heads head_dim"]]:
    """The keys and values of some rows, the longest last. Changes: `copied`, into which their pages go, whole."""
    gathered = []
    for pages, room in zip((k_pages, v_pages), copied[:, : page_ids.numel()], strict=True):
        torch.index_select(pages, 0, page_ids.flatten(), out=room)
        gathered.append(room.view(len(lens), -1, *pages.shape[2:])[:, : lens[-1]])
    # What follows a shorter context is another row's, or NaN. The score of such a key is masked later on; such a value
    # is multiplied by 0, and 0 times NaN is NaN.
    for values, length in zip(gathered[1], lens, strict=True):
        if length < lens[-1]:
            values[length:].zero_()
    return gathered


def _attend(
    q: Float[Tensor, "kv_heads rows queries group head_dim"],
    k: Float[Tensor, "rows longest kv_heads head_dim"],
    v: Float[Tensor, "rows longest kv_heads head_dim"],
    sees: list[int],
) -> tuple[Float[Tensor, "kv_heads rows queries group head_dim"], Float[Tensor, "kv_heads rows queries group"]]:
    """Attend from equally many queries of each row. The first sees `sees` tokens, each one more than the last."""
    (_, _, queries, group, _), stop = q.shape, sees[-1] + q.shape[2] - 1
    # One product per key head, on views: heads lie side by side in a page, and one product of all would copy them.
    scores = q.new_empty(*q.shape[:2], queries * group, stop)
    for query, key, score in zip(q.flatten(2, 3), k[:, :stop].unbind(2), scores, strict=True):
        torch.bmm(query, key.mT, out=score)
    if sees[0] < stop:
        limit = torch.tensor(sees, device=q.device)[:, None] + torch.arange(queries, device=q.device)
        hidden = torch.arange(sees[0], stop, device=q.device) >= limit[..., None]
        scores.unflatten(2, (queries, group))[..., sees[0] :].masked_fill_(hidden[:, :, None], -torch.inf)
    peak = scores.amax(-1, keepdim=True)
    weights = scores.sub_(peak).exp_()
    total = weights.sum(-1, keepdim=True)
    out = q.new_empty(*q.shape[:2], queries * group, q.shape[-1])
    for weight, value, mixed in zip(weights, v[:, :stop].unbind(2), out, strict=True):
        torch.bmm(weight, value, out=mixed)
    return out.div_(total).view_as(q), total.log_().add_(peak).view(q.shape[:-1])


@torch.no_grad()
def write_pages(
    k: Float[Tensor, "tokens kv_heads head_dim"],
    v: Float[Tensor, "tokens kv_heads head_dim"],
    k_pages: Float[Tensor, "pages page_size kv_heads head_dim"],
    v_pages: Float[Tensor, "pages page_size kv_heads head_dim"],
    slots: Int[Tensor, " tokens"],
) -> None:
    """Put each token's key and value where its page table says.

    Arguments:
        k, v: the tokens, packed, in the dtype of the pages.
        slots: page * page_size + offset, no slot twice; -1 for a token that nobody will look back on.
    Changes: the given slots of k_pages and v_pages.

    >>> k, pages = torch.tensor([7.0, 8.0]).view(2, 1, 1), torch.zeros(2, 3, 1, 1)
    >>> write_pages(k, k, pages, pages.clone(), torch.tensor([4, -1]))
    >>> pages.flatten(1).tolist()
    [[0.0, 0.0, 0.0], [0.0, 7.0, 0.0]]
    """
    kept = slots >= 0
    if not kept.all():
        slots, k, v = slots[kept], k[kept], v[kept]
    k_pages.view(-1, *k.shape[1:]).index_copy_(0, slots.long(), k)
    v_pages.view(-1, *v.shape[1:]).index_copy_(0, slots.long(), v)
