"""The model's own head as a drafter: one more attention layer, of the same pages, that guesses one token further.

Entry i of the head's keys and values is made of token i and of h, the model's output for token i - 1. For a request
that stands at c (tokens 0 .. c - 1 computed, token c known), entry c gives the first draft:

    model's outputs    h0  h1  h2 ... h[c-1]
    head's entries     -   1   2  ...  c-1   c      1 .. c - 1 follow what the model computes, c brings draft c + 1
                                             c+1    of the draft and the head's own output: a guess made of a guess

So after each step the head runs over what the step has left for good, its drafts that were kept and the token that
follows: `follow`. What that last one gives is the first draft of the next step. Entries made of guesses are written
over then. Entry 0 does not exist: its key and value are zeros, which the attention takes out again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from minserve.batching.batcher import Slice
from minserve.choosing import Chosen
from minserve.draft_rows import DraftRow
from minserve.errors import InvalidValue
from minserve.hybrid.cache_memory import CacheMemory, Places
from minserve.hybrid.hybrid_cache import HybridCache
from minserve.hybrid.packing import lay_out, page_slots, page_tables
from minserve.model.hybrid_lm import HybridLM
from minserve.model.step import Step
from minserve.paging.page_table import PageTable
from minserve.request import Request


class _Span(NamedTuple):
    """Entries to be made, from a position of a request on: of these tokens, its newest one perhaps among them."""

    request: Request
    start: int
    tokens: list[int]
    has_newest: bool = False


class MTPDrafts:
    """Runs the draft head beside the model.

    Arguments:
        model: with a head.
        memory: the pools, made `with_head`.
        cache: who has which pages.
    Errors: InvalidValue for a model without a head.
    """

    def __init__(self, model: HybridLM, memory: CacheMemory, cache: HybridCache):
        if model.mtp is None:
            raise InvalidValue("draft", "mtp", "another drafter, for this model has no MTP head", "EngineConfig.draft")
        self._model, self._memory, self._cache = model, memory, cache
        # What the head made of a request's newest token, where that is done already.
        # It counts only for one that stands there: the step that was followed may have failed after it.
        self._ahead: WeakKeyDictionary[PageTable, tuple[int, Tensor]] = WeakKeyDictionary()

    def can_draft(self, request: Request) -> bool:
        """Whether the head has an entry for each of the request's computed tokens, and the output for the last one."""
        known = self._cache.entries.num(self._cache.tables[request.id])
        return known >= request.num_computed > 0 and request.id in self._cache.slot_of

    def logits(self, rows: Sequence[DraftRow]) -> Float[Tensor, "rows vocab"]:
        """Score the token behind each row's drafts so far, of which all have equally many.

        Changes: the head's pages, the rows' `hidden`.
        """
        spans, before, todo = [], [], []
        for row in rows:
            request = row.request
            if row.ids:
                source, newest = row.hidden, row.ids[-1]
            else:
                num_seen, row.hidden = self._ahead.get(self._cache.tables[request.id], (0, None))
                if num_seen == request.num_committed:
                    continue
                source, newest = self._memory.hidden[self._cache.slot_of[request.id]], request.tokens[-1]
            todo.append(row)
            before.append(source)
            spans.append(_Span(request, request.num_computed + len(row.ids), [newest]))
        if todo:
            # They are not counted as there: should the step fail, their pages may be taken back.
            for row, out in zip(todo, self._run(spans, torch.stack(before)), strict=True):
                row.hidden = out
        return self._model.logits(torch.stack([row.hidden for row in rows]))

    def follow(
        self, slices: Sequence[Slice], chosen: Chosen, hidden: Float[Tensor, "tokens hidden"],
        is_wanted: Callable[[Slice], bool],
    ) -> None:  # fmt: skip
        """Make the entries of the tokens that a step has computed for good, and of those that it has chosen.

        Before these are committed, while their requests hold what they have read.

        Arguments:
            slices: the step's, in its order.
            chosen: what came of them.
            hidden: the model's output for the step's tokens.
            is_wanted: whether a slice is to be followed; where one is not, its request is not drafted for any more.
        Changes: the head's pages, the count of entries.
        """
        spans, sources, from_slots, at = [], [], [], 0
        for piece in slices:
            begin, at = at, at + piece.num_tokens
            self._ahead.pop(self._cache.tables[piece.request.id], None)
            span = self._span(piece, chosen) if is_wanted(piece) else None
            if span is None:
                continue
            if span.start == piece.start:  # the output of the token before the slice was left with the state
                from_slots.append((len(sources), self._cache.slot_of[piece.request.id]))
            first = begin + span.start - piece.start - 1
            sources += [max(begin, source) for source in range(first, first + len(span.tokens))]
            spans.append(span)
        if not spans:
            return
        before = hidden[torch.tensor(sources, device=hidden.device)]
        for place, slot in from_slots:
            before[place] = self._memory.hidden[slot]
        for span, out in zip(spans, self._run(spans, before), strict=True):
            table, stop = self._cache.tables[span.request.id], span.start + len(span.tokens)
            self._cache.entries.fill(table, stop)
            if span.has_newest:
                self._ahead[table] = stop, out

    def _span(self, piece: Slice, chosen: Chosen) -> _Span | None:
        """Which entries a slice is to be followed by; None for none, or where some are missing before it."""
        request, table = piece.request, self._cache.tables[piece.request.id]
        if request.id in chosen.errors:
            return None
        if not piece.start:
            self._leave_out_first(table)
        start = self._cache.entries.num(table)
        if start < piece.start or (piece.start and request.id not in self._cache.slot_of):
            return None
        new = [sampled.token_id for sampled in chosen.tokens.get(request.id, ())]
        stop = piece.stop + len(new)
        has_newest = bool(new) and (stop - 1) % table.page_size > 0  # else its page is not there yet
        stop -= bool(new) and not has_newest
        tokens = [*request.tokens[start : piece.stop], *new][: stop - start]
        return _Span(request, start, tokens, has_newest) if tokens else None

    def _leave_out_first(self, table: PageTable) -> None:
        """Make entry 0 of a request one that changes nothing. Changes: the head's pages, the count of entries."""
        layer = self._memory.head_layer
        for pool in (self._memory.k_pages[layer], self._memory.v_pages[layer]):
            pool[table.pages[0], 0] = 0
        self._cache.entries.fill(table, 1)

    def _run(self, spans: Sequence[_Span], before: Float[Tensor, "tokens hidden"]) -> Float[Tensor, "rows hidden"]:
        """The head's output at the last token of each span; `before` is h of the token before each of their tokens.

        Changes: the head's pages.
        """
        tables = page_tables([span.request for span in spans], self._cache)
        counts = np.array([len(span.tokens) for span in spans])
        starts = np.array([span.start for span in spans])
        row_starts, rows, positions = lay_out(starts, counts)
        slots = page_slots(tables, rows, positions, self._cache.page_size)
        tokens = [token for span in spans for token in span.tokens]
        arrays = (tokens, positions, row_starts, row_starts[1:] - 1, tables, starts + counts, 0 * counts, slots)
        tokens, positions, row_starts, last, tables, lens, none, slots = (
            torch.as_tensor(np.asarray(values, dtype=np.int64), device=before.device) for values in arrays
        )
        memory = self._memory.at(row_starts, Places(tables, lens, none, none, slots))
        return self._model.draft_hidden(Step(tokens, positions, row_starts, last), before, memory)[0][last]
