"""Attention of many rows whose page tables begin with the same pages: these are read once, for all queries together.

    prefix_i = attention of query i to the shared pages     every query sees all of them: one product, and no mask
    tail_i   = attention of query i to the rest of its row  paged attention, with what is left of tables and contexts
    lse_i    = log( e^lse(prefix_i) + e^lse(tail_i) )
    out_i    = e^(lse(prefix_i) - lse_i) prefix_i + e^(lse(tail_i) - lse_i) tail_i

A decode step is as fast as its keys and values are read. Plain paged attention reads a prefix that 32 rows share 32
times; this one reads it once, and each row's own tail.
Juravsky et al., Hydragen: High-Throughput LLM Inference with Shared Prefixes (arXiv 2402.05099), section 3.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from minserve.attention_merge import merge_attention
from minserve.errors import InvalidValue

SCORES_AT_A_TIME = 1 << 18  # small enough to stay in a processor's cache


@torch.no_grad()
def shared_prefix_attention(
    q: Float[Tensor, "tokens heads head_dim"],
    k_pages: Float[Tensor, "pages page_size kv_heads head_dim"],
    v_pages: Float[Tensor, "pages page_size kv_heads head_dim"],
    page_tables: Int[Tensor, "rows max_pages"],
    row_starts: Int[Tensor, " rows_plus_1"],
    context_lens: Int[Tensor, " rows"],
    num_shared_pages: int,
    paged_attention: Callable[..., tuple[Tensor, Tensor]],
) -> tuple[Float[Tensor, "tokens heads head_dim"], Float[Tensor, "tokens heads"]]:
    """Let the queries of each row, which are the last tokens of its context, attend to its pages.

    Arguments:
        q: queries, packed; heads is a multiple of kv_heads.
        k_pages, v_pages: the pools; the row's own new tokens have been written to them already.
        page_tables: the pages of each row in the order of its tokens; entries beyond the context are not looked at.
        row_starts: where each row begins in q, and the end; a row may be empty.
        context_lens: how many tokens of a row lie in pages, its queries' own included.
        num_shared_pages: how many pages, from the first on, are the same in the table of each row that has queries.
            All queries stand behind them. 0 makes this plain paged attention.
        paged_attention: attends to the tails; it takes the six tensors, and returns what this returns. Its results are
            in q's dtype, so narrow numbers are rounded once more than there.
    Returns the attention in q's dtype, and each query's log-sum-exp in float32, or float64 for float64 inputs. No
    gradient flows.
    Errors: InvalidValue for a row whose first pages are not those of the others, whose queries stand inside them, or
    whose context is longer than its page table.
    """
    num_shared = num_shared_pages * k_pages.shape[1]
    asking = row_starts.diff().nonzero().flatten()  # rows without queries may have any table, and any context
    _check_shared_pages(page_tables[asking], num_shared_pages, asking)
    _check_contexts(context_lens, row_starts.diff(), num_shared, page_tables.shape[1] * k_pages.shape[1])
    rest = page_tables[:, num_shared_pages:], row_starts, (context_lens - num_shared).clamp(min=0)
    tail, tail_lse = paged_attention(q, k_pages, v_pages, *rest)
    if not num_shared or not len(q):
        return tail, tail_lse
    wide = torch.promote_types(q.dtype, torch.float32)
    shared_pages = page_tables[asking[0], :num_shared_pages]
    k, v = (
        rearrange(pages.index_select(0, shared_pages), "pages size kv d -> kv (pages size) d").to(wide)
        for pages in (k_pages, v_pages)
    )
    step = max(1, SCORES_AT_A_TIME // (num_shared * q.shape[1]))
    parts = [_attend_to_all(queries.to(wide), k, v) for queries in q.split(step)]
    prefix, prefix_lse = (torch.cat(part) for part in zip(*parts, strict=True))
    out, lse = merge_attention(torch.stack([prefix, tail.to(wide)]), torch.stack([prefix_lse, tail_lse]))
    return out.to(q.dtype), lse


def _check_shared_pages(
    asking_tables: Int[Tensor, "rows max_pages"], num_shared_pages: int, asking: Int[Tensor, " rows"]
) -> None:
    """Refuse tables of which one has not the pages that the first has, or not so many."""
    if not 0 <= num_shared_pages <= asking_tables.shape[1]:
        limit = f"0 to {asking_tables.shape[1]}, what a page table holds"
        raise InvalidValue("num_shared_pages", num_shared_pages, limit)
    shared = asking_tables[:, :num_shared_pages]
    for at in (shared != shared[:1]).any(1).nonzero().flatten().tolist():
        page = (shared[at] != shared[0]).nonzero()[0].item()
        limit = f"{shared[0, page].item()}, as in row {asking[0].item()}: {num_shared_pages} pages are shared"
        raise InvalidValue(f"page_tables[{asking[at].item()}, {page}]", shared[at, page].item(), limit)


def _check_contexts(
    context_lens: Int[Tensor, " rows"], num_queries: Int[Tensor, " rows"], num_shared: int, capacity: int
) -> None:
    """Refuse a row with queries inside the shared pages, or with more tokens than its page table has room for."""
    least = num_shared + num_queries
    for row in ((num_queries > 0) & ((context_lens < least) | (context_lens > capacity))).nonzero().flatten().tolist():
        limit = f"{least[row].item()}, the {num_shared} shared tokens and its queries, to {capacity}, what its page "
        raise InvalidValue(f"context_lens[{row}]", context_lens[row].item(), f"{limit}table holds")


def _attend_to_all(
    q: Float[Tensor, "tokens heads head_dim"],
    k: Float[Tensor, "kv_heads keys head_dim"],
    v: Float[Tensor, "kv_heads keys head_dim"],
) -> tuple[Float[Tensor, "tokens heads head_dim"], Float[Tensor, "tokens heads"]]:
    """Attend from all queries, whosever they are, to all keys."""
    kv_heads, group = len(k), q.shape[1] // len(k)
    queries = rearrange(q * q.shape[-1] ** -0.5, "t (kv group) d -> kv (t group) d", kv=kv_heads)
    scores = queries @ k.mT
    lse = scores.logsumexp(-1, keepdim=True)
    out = scores.sub_(lse).exp_() @ v
    shape = "kv (t group) d -> t (kv group) d"
    return rearrange(out, shape, group=group), rearrange(lse, shape, group=group).squeeze(-1)


def positions_read(
    row_starts: Int[Tensor, " rows_plus_1"], context_lens: Int[Tensor, " rows"], num_shared: int = 0
) -> int:
    """Count the positions whose keys and values an attention reads, so that reading once can be weighed.

    A position is 2 * kv_heads * head_dim numbers. Where queries are so many that a processor takes them in turns, each
    turn reads again: what is counted is what must be read at least.

    Arguments:
        row_starts, context_lens: as in the attention; a row without queries reads nothing.
        num_shared: how many tokens, from the first on, are read once for all rows; 0 for plain paged attention.

    >>> row_starts, context_lens = torch.arange(5), torch.tensor([103, 110, 104, 101])   # four decode rows
    >>> positions_read(row_starts, context_lens), positions_read(row_starts, context_lens, num_shared=100)
    (418, 118)
    """
    contexts = context_lens[row_starts.diff() > 0]
    return int((contexts - num_shared).sum()) + (num_shared if len(contexts) else 0)
