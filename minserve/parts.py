"""What a reader may replace in the engine: `LLM(parts=Parts(page_allocator=MyAllocator))`.

A part is handed in as the exercise has it. Where that works on one sequence, the engine's loop over rows is here, so
that a plain function serves a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from minserve.batching.batcher import Batcher
from minserve.model.implementations import Implementation
from minserve.paging.page_table import Allocator, PageAllocator


@dataclass(frozen=True)
class Parts:
    """The engine's replaceable parts; None keeps the library's.

    Fields:
        page_allocator: makes the allocator of a pool of num_pages pages (chapter 04).
        batcher: makes the batcher from (batch_tokens, max_running, policy) (chapter 03).
        paged_attention: attends for one row: (q [tokens heads dim], k_pages, v_pages, its page table, tokens in its
            context) -> out [tokens heads dim] (chapter 04).
    """

    page_allocator: Callable[[int], Allocator] = PageAllocator
    batcher: Callable[[int, int, str], Batcher] = Batcher
    paged_attention: Callable | None = None

    def replace(self, implementation: Implementation) -> Implementation:
        """The implementation with the reader's functions in it."""
        if self.paged_attention is None:
            return implementation
        return implementation._replace(paged_attention=row_by_row(self.paged_attention))


def row_by_row(attend_one: Callable) -> Callable:
    """A batched paged attention made of one that works on a single row; see `Parts.paged_attention`."""

    def paged_attention(
        q: Tensor, k_pages: Tensor, v_pages: Tensor, page_tables: Tensor, row_starts: Tensor, context_lens: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        outs = []
        for row, context in enumerate(context_lens.tolist()):
            start, stop = row_starts[row : row + 2].tolist()
            pages = page_tables[row][: -(-context // k_pages.shape[1])]
            outs.append(attend_one(q[start:stop], k_pages, v_pages, pages, context))
        return torch.cat(outs), None

    return paged_attention
