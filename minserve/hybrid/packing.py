"""Packing a plan into one ragged batch: the tokens side by side, and where each row keeps what it remembers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch

from minserve.batching.batcher import Slice
from minserve.hybrid.cache_memory import Places
from minserve.hybrid.hybrid_cache import HybridCache
from minserve.hybrid.ticket import Ticket
from minserve.model.step import Step


def wants_token(piece: Slice) -> bool:
    """Whether a slice ends on the request's last known token, so that the next one is chosen from it."""
    return piece.stop == piece.request.num_committed and piece.request.params.max_tokens > 0


def scores_prompt(piece: Slice) -> bool:
    """Whether a slice has prompt tokens whose successors are to be scored."""
    request = piece.request
    return request.params.prompt_logprobs is not None and piece.start < len(request.prompt_ids)


def num_shared_pages(tables: np.ndarray, starts: np.ndarray, page_size: int) -> int:
    """How many pages all rows begin with, of those that all rows' new tokens stand behind.

    Arguments:
        tables: the pages of each row, [rows, pages of the longest].
        starts: position of each row's first new token.

    >>> num_shared_pages(np.array([[7, 3, 5], [7, 3, 9]]), np.array([9, 11]), page_size=4)
    2
    """
    computed = starts.min() // page_size
    shared = (tables[:, :computed] == tables[0, :computed]).all(0)
    return int(computed if shared.all() else shared.argmin())


def pack(
    slices: Sequence[Slice], ticket: Ticket, cache: HybridCache, device: str | torch.device = "cpu"
) -> tuple[Step, Places]:
    """The step and the places of a plan's slices, row by row in their order.

    Logits are wanted for the last token of each slice that `wants_token`, and for all of one that `scores_prompt`.

    Arguments:
        slices: at least one; their pages and slots are on the ticket.
        ticket: the step's.
        cache: where the page tables are.
    Errors: StateError when a request's state is not the one that its slice continues from.
    """
    starts = np.array([piece.start for piece in slices])
    stops = np.array([piece.stop for piece in slices])
    row_starts = np.concatenate([[0], np.cumsum(stops - starts)])
    row = np.repeat(np.arange(len(slices)), stops - starts)
    positions = np.arange(row_starts[-1]) - row_starts[row] + starts[row]
    tokens = list(chain.from_iterable(piece.request.tokens[piece.start : piece.stop] for piece in slices))
    tables = _page_tables(slices, cache)
    slots = tables[row, positions // cache.page_size] * cache.page_size + positions % cache.page_size
    chosen: list[int] = []
    bounds = row_starts.tolist()
    for piece, begin, end in zip(slices, bounds, bounds[1:], strict=False):
        if scores_prompt(piece):
            chosen += range(begin, end)
        elif wants_token(piece):
            chosen.append(end - 1)
    read = [ticket.state_read(piece.request) for piece in slices]
    write = [ticket.state_write[piece.request.id] for piece in slices]
    tensors = [
        torch.as_tensor(np.asarray(values, dtype=np.int64), device=device)
        for values in (tokens, positions, row_starts, chosen, tables, stops, read, write, slots)
    ]
    return Step(*tensors[:4]), Places(*tensors[4:], num_shared_pages(tables, starts, cache.page_size))


def _page_tables(slices: Sequence[Slice], cache: HybridCache) -> np.ndarray:
    """The page tables of the rows, [rows, pages of the longest]; -1 beyond a row's last page."""
    tables = [cache.tables[piece.request.id].pages for piece in slices]
    counts = np.array([len(pages) for pages in tables])
    filled = np.full((len(tables), counts.max()), -1)
    filled[np.arange(counts.max()) < counts[:, None]] = np.fromiter(chain.from_iterable(tables), np.int64, counts.sum())
    return filled
