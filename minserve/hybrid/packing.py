"""Packing a plan into one ragged batch: the tokens side by side, and where each row keeps what it remembers."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import chain
from types import MappingProxyType

import numpy as np
import torch

from minserve.batching.batcher import Slice
from minserve.hybrid.cache_memory import Places, RowParts, SharedPages
from minserve.hybrid.hybrid_cache import HybridCache
from minserve.hybrid.ticket import Ticket
from minserve.model.step import Step
from minserve.request import Request

NO_DRAFTS: Mapping[Hashable, Sequence[int]] = MappingProxyType({})


def wants_token(piece: Slice) -> bool:
    """Whether a slice ends on the request's last known token, so that the next one is chosen from it."""
    return piece.stop == piece.request.num_committed and piece.request.params.max_tokens > 0


def scores_prompt(piece: Slice) -> bool:
    """Whether a slice has prompt tokens whose successors are to be scored."""
    request = piece.request
    return request.params.prompt_logprobs is not None and piece.start < len(request.prompt_ids)


def find_shared_pages(tables: np.ndarray, starts: np.ndarray, page_size: int) -> tuple[np.ndarray, int]:
    """Which rows begin with how many of the same pages, all behind them: where that spares the most reading.

    One group is looked for: rows that begin as the longest of those with the commonest first page.

    Arguments:
        tables: the pages of each row, [rows, pages of the longest].
        starts: position of each row's first new token.

    >>> tables = np.array([[7, 3, 5], [7, 3, 9], [2, 4, 6], [7, 8, 1]])
    >>> find_shared_pages(tables, np.array([9, 11, 10, 9]), page_size=4)
    (array([0, 1]), 2)
    """
    if len(starts) < 2:
        return np.arange(0), 0
    computed = starts // page_size
    first, count = np.unique(tables[computed > 0, 0], return_counts=True)
    if not len(first) or count.max() < 2:
        return np.arange(0), 0
    begins_so = (tables[:, 0] == first[count.argmax()]) & (computed > 0)
    longest = int(np.where(begins_so, computed, 0).argmax())
    same = (tables[:, : computed[longest]] == tables[longest, : computed[longest]]).cumprod(1).sum(1)
    same = np.where(begins_so, np.minimum(same, computed), 0)
    most_first = np.sort(same)[::-1]
    num_pages = int(most_first[(np.arange(len(same)) * most_first).argmax()])  # read once instead of by each of k rows
    return (same >= num_pages).nonzero()[0], num_pages


def pack(
    slices: Sequence[Slice], ticket: Ticket, cache: HybridCache, device: str | torch.device = "cpu",
    drafts: Mapping[Hashable, Sequence[int]] = NO_DRAFTS,
) -> tuple[Step, Places]:  # fmt: skip
    """The step and the places of a plan's slices, row by row in their order.

    Logits are wanted for the last token of each slice that `wants_token` and for its drafts, and for all of one that
    `scores_prompt`.

    Arguments:
        slices: at least one; their pages and slots are on the ticket.
        ticket: the step's; it takes slots for the states that are to be kept inside slices.
        cache: where the page tables are.
        drafts: by request id, those of the slices that have some.
    Errors: StateError when a request's state is not the one that its slice continues from.
    """
    starts = np.array([piece.start for piece in slices])
    lengths = np.array([piece.num_tokens for piece in slices])
    row_starts, row, positions = lay_out(starts, lengths)
    tokens: list[int] = []
    for piece in slices:
        tokens += piece.request.tokens[piece.start : piece.stop]
        tokens += drafts[piece.request.id] if piece.num_drafts else ()
    tables = page_tables([piece.request for piece in slices], cache)
    slots = page_slots(tables, row, positions, cache.page_size)
    bounds = row_starts.tolist()
    for piece in slices:
        ticket.keep_states(piece.request, piece.stop + piece.num_drafts)
    read = [ticket.state_read(piece.request) for piece in slices]
    write = [ticket.state_write[piece.request.id][-1] for piece in slices]
    tensors = [
        torch.as_tensor(np.asarray(values, dtype=np.int64), device=device)
        for values in (tokens, positions, row_starts, _chosen(slices, bounds), tables, starts + lengths, read, write,
                       slots)
    ]  # fmt: skip
    sharing, num_pages = find_shared_pages(tables, starts, cache.page_size)
    shared = SharedPages(torch.as_tensor(sharing, device=device), num_pages)
    return Step(*tensors[:4]), Places(*tensors[4:], shared, _parts(slices, ticket, bounds, device))


def _chosen(slices: Sequence[Slice], bounds: list[int]) -> list[int]:
    """At which packed tokens logits are wanted; row r's begin at bounds[r]."""
    chosen: list[int] = []
    for piece, begin, end in zip(slices, bounds, bounds[1:], strict=False):
        if scores_prompt(piece):
            chosen += range(begin, end)
        elif wants_token(piece):
            chosen += range(end - 1 - piece.num_drafts, end)
    return chosen


def _parts(
    slices: Sequence[Slice], ticket: Ticket, bounds: list[int], device: str | torch.device
) -> tuple[RowParts, ...]:
    """The step in parts, where a row passes states that are to be kept: the first part of each row, then the second.

        row 0     |-----------8----------16--|        parts  [0, 8)  [8, 16)  [16, 19)
        row 1     |--------------|                            [0, 10)

    Rows with drafts are a part of their own, of which every state is kept. Nothing where no row passes one.
    """
    if not (ticket.state_between or any(piece.num_drafts for piece in slices)):
        return ()
    # A row that has a slot for the state after each of its tokens: with drafts, or decoding without.
    every = [row for row, p in enumerate(slices) if len(ticket.state_write[p.request.id]) == p.num_tokens]
    others = [row for row in range(len(slices)) if row not in {*every}]
    cuts = {}
    for row in others:
        piece, begin = slices[row], bounds[row]
        slots = ticket.state_write[piece.request.id]
        ends = [*ticket.state_between.get(piece.request.id, ()), (piece.stop, slots[-1])]
        starts = [piece.start, *(stop for stop, _ in ends)]
        cuts[row] = [
            (begin + a - piece.start, begin + b - piece.start, slot)
            for a, (b, slot) in zip(starts, ends, strict=False)
        ]  # fmt: skip
    parts = []
    if every:
        of_every = [(bounds[row], bounds[row + 1], ticket.state_write[slices[row].request.id]) for row in every]
        parts.append(_part(every, of_every, [slot for *_, slots in of_every for slot in slots], device, True))
    for number in range(max((len(cuts[row]) for row in others), default=0)):
        rows = [row for row in others if len(cuts[row]) > number]
        of_rows = [cuts[row][number] for row in rows]
        parts.append(_part(rows, of_rows, [slot for *_, slot in of_rows], device, False))
    return tuple(parts)


def _part(
    rows: list[int], of_rows: list[tuple], state_write: list[int], device: str | torch.device, every_state: bool
) -> RowParts:
    """A part of some rows: from where to where in the packing each goes, and the slots that get its states."""
    tokens = np.concatenate([np.arange(start, stop) for start, stop, _ in of_rows])
    row_starts = np.concatenate([[0], np.cumsum([stop - start for start, stop, _ in of_rows])])
    arrays = (rows, tokens, row_starts, state_write)
    tensors = (torch.as_tensor(np.asarray(x, dtype=np.int64), device=device) for x in arrays)
    return RowParts(*tensors, every_state)


def lay_out(starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pack rows side by side: where each begins and the end; and of each packed token its row and its position.

    >>> [x.tolist() for x in lay_out(np.array([4, 0]), np.array([1, 3]))]
    [[0, 1, 4], [0, 1, 1, 1], [4, 0, 1, 2]]
    """
    row_starts = np.concatenate([[0], np.cumsum(lengths)])
    rows = np.repeat(np.arange(len(lengths)), lengths)
    return row_starts, rows, np.arange(row_starts[-1]) - row_starts[rows] + starts[rows]


def page_tables(requests: Sequence[Request], cache: HybridCache) -> np.ndarray:
    """The page tables of requests, [rows, pages of the longest]; -1 beyond a row's last page."""
    tables = [cache.tables[request.id].pages for request in requests]
    counts = np.array([len(pages) for pages in tables])
    filled = np.full((len(tables), counts.max()), -1)
    filled[np.arange(counts.max()) < counts[:, None]] = np.fromiter(chain.from_iterable(tables), np.int64, counts.sum())
    return filled


def page_slots(tables: np.ndarray, rows: np.ndarray, positions: np.ndarray, page_size: int) -> np.ndarray:
    """Where in a pool of pages the tokens at these positions of these rows are."""
    return tables[rows, positions // page_size] * page_size + positions % page_size
