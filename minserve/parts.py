"""What a reader may replace in the engine: `LLM(parts=Parts(page_allocator=MyAllocator))`.

A part is handed in as the exercise has it. Where that works on one sequence, the engine's loop over rows is here, so
that a plain function serves a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from minserve.batching.batcher import Asked, Batcher, BatcherError, Entry, Phase, Plan, Room, Slice
from minserve.deltanet.state_pool import StatePool
from minserve.errors import InvalidValue
from minserve.hybrid.reuse import match_hybrid
from minserve.model.implementations import Implementation
from minserve.paging.page_table import Allocator, PageAllocator
from minserve.radix.radix_tree import RadixTree


@dataclass(frozen=True)
class Parts:
    """The engine's replaceable parts.

    Fields:
        page_allocator: makes the allocator of a pool of num_pages pages (exercise 4.2).
        plan: chooses the slices of a step (exercise 3.4); None takes the library's batcher.
        paged_attention: attends for one row (exercise 4.5); None takes the library's.
        radix_tree: makes the tree of shared prefixes from an allocator and a page size: a `PrefixTree` with lock,
            unlock, evict and num_evictable (exercise 5.3).
        state_pool: makes the pool of num_slots state slots.
        gated_delta: runs the delta rule on the tokens of one row (exercise 6.5); None takes the library's.
        verify: keeps the drafts of one row and chooses the token that follows (exercise 8.3); None takes the library's.
        match_hybrid: chooses how many tokens are reused (exercise 7.1); see `minserve.hybrid.reuse.match_hybrid`.
    """

    page_allocator: Callable[[int], Allocator] = PageAllocator
    plan: Callable[..., list[tuple[int, int, int, str]]] | None = None
    paged_attention: Callable | None = None
    radix_tree: Callable[[Allocator, int], RadixTree] = RadixTree
    state_pool: Callable[[int], StatePool] = StatePool
    gated_delta: Callable | None = None
    verify: Callable | None = None
    match_hybrid: Callable[[int, Sequence[int], int], int] = match_hybrid

    def make_batcher(self, batch_tokens: int, max_running: int, policy: str) -> Batcher:
        """The batcher, with the reader's plan in it."""
        kind = Batcher if self.plan is None else partial(PlannedBatcher, self.plan)
        return kind(batch_tokens, max_running, policy)

    def put_into(self, implementation: Implementation) -> Implementation:
        """The implementation, with the reader's functions in it."""
        if self.paged_attention is not None:
            implementation = implementation._replace(paged_attention=row_by_row(self.paged_attention))
        if self.gated_delta is not None:
            implementation = implementation._replace(gated_delta_ragged=delta_row_by_row(self.gated_delta))
        if self.verify is not None:
            implementation = implementation._replace(verify=verify_row_by_row(self.verify))
        return implementation


def row_by_row(attend_one: Callable) -> Callable:
    """A batched paged attention made of one for a row: (q, k_pages, v_pages, page table, tokens) -> (out, lse)."""

    def paged_attention(
        q: Tensor, k_pages: Tensor, v_pages: Tensor, page_tables: Tensor, row_starts: Tensor, context_lens: Tensor
    ) -> tuple[Tensor, Tensor]:
        starts, parts = row_starts.tolist(), []
        for row, (pages, context) in enumerate(zip(page_tables.tolist(), context_lens.tolist(), strict=True)):
            parts.append(attend_one(q[starts[row] : starts[row + 1]], k_pages, v_pages, pages, context))
        outs, lses = zip(*parts, strict=True)
        return torch.cat(outs), torch.cat(lses)

    return paged_attention


def delta_row_by_row(run_one: Callable) -> Callable:
    """A ragged delta rule made of one for a row: (q, k, v, g, beta, state) -> (out, state), heads all of one number."""

    def gated_delta_ragged(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, row_starts: Tensor,
        *, every_state: bool = False,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], dim=1) for x in (q, k))
        bounds, out, states = row_starts.tolist(), torch.zeros_like(v), []
        for row, (start, stop) in enumerate(zip(bounds, bounds[1:], strict=False)):
            memory = state[row]
            for first in range(start, stop, 1 if every_state else max(1, stop - start)):
                here = slice(first, first + 1 if every_state else stop)
                out[here], memory = run_one(*(x[here] for x in (q, k, v, g, beta)), memory)
                states += [memory] if every_state else []
            states += [] if every_state else [memory]
        return out, torch.stack(states)

    return gated_delta_ragged


def verify_row_by_row(verify_one: Callable) -> Callable:
    """A batched `verify` made of one for a row: (p, drafts, q, accept_u, sample_u) -> its drafts kept, and a token."""

    def verify(
        p: Tensor, draft_ids: Tensor, q: Tensor | None, row_starts: Tensor, accept_u: Tensor, sample_u: Tensor
    ) -> tuple[Tensor, Tensor]:
        bounds, drafts, u = row_starts.tolist(), draft_ids.tolist(), accept_u.tolist()
        num_accepted, next_ids = [], []
        for row, (start, stop) in enumerate(zip(bounds, bounds[1:], strict=False)):
            here = slice(start - row, stop - row - 1)  # this row's drafts
            of_q = None if q is None else q[here]
            found = verify_one(p[start:stop], drafts[here], of_q, u[here], float(sample_u[row]))
            tokens = [] if found is None else [int(token) for token in found]
            if not tokens or tokens[:-1] != drafts[here][: len(tokens) - 1] or not 0 <= tokens[-1] < p.shape[1]:
                limit = f"some of its first drafts, {drafts[here]}, and one token of 0 to {p.shape[1] - 1} more"
                raise InvalidValue(f"verify of row {row}", tokens, limit, "Parts.verify")
            num_accepted.append(len(tokens) - 1)
            next_ids.append(tokens[-1])
        return torch.tensor(num_accepted, device=p.device), torch.tensor(next_ids, device=p.device)

    return verify


@dataclass(frozen=True)
class Standing:
    """Where a request stands, as a reader's plan sees it: the `Request` of exercise 3.4."""

    id: object
    arrived_s: float
    num_tokens: int
    num_computed: int
    num_pages: int
    phase: str


class PlannedBatcher(Batcher):
    """A batcher whose slices a function of the reader chooses.

    Where the function leaves out a decoding row with budget left, or everybody, pages are short, and the library's own
    plan is used for this step: it knows whom to put back. It also asks for one token's room more before it lets a
    request in; one for which there is none waits.

    Arguments:
        choose: (running, waiting, batch_tokens, max_running, free_pages, page_size) -> (id, start, stop, phase) of each
            slice. One with the phase "refused" waits: the engine has turned away whoever could never run.
        batch_tokens, max_running, policy: as for `Batcher`.
    """

    def __init__(self, choose: Callable, batch_tokens: int, max_running: int, policy: str = "fcfs"):
        super().__init__(batch_tokens, max_running, policy)
        self._choose = choose

    def plan(self, room: Room) -> Plan:
        """See Batcher.plan. Errors: BatcherError for a slice that cannot be. Changes: the queues and the room."""
        running = [self._standing(request, phase, room) for request, phase in self.running.values()]
        waiting = [self._standing(request, Phase.PREFILL, room) for request in self.waiting]
        limits = (self.batch_tokens, self.max_running, room.free_pages, room.page_size)
        chosen = [entry for entry in self._choose(running, waiting, *limits) if entry[-1] != "refused"]
        decoding = {request.id for request, phase in self.running.values() if phase is Phase.DECODE}
        names, spent = [request_id for request_id, *_ in chosen], sum(stop - start for _, start, stop, _ in chosen)
        if not chosen or (decoding - set(names) and spent < self.batch_tokens):
            return super().plan(room)
        if len(set(names)) < len(names):
            raise BatcherError(f"plan names a request twice: {names}")
        if spent > self.batch_tokens:
            raise BatcherError(f"plan has {spent} tokens in all; batch_tokens is {self.batch_tokens}")
        plan, is_full = Plan(), False
        for request_id, start, stop, _ in chosen:
            request = self._find(request_id)
            if not request.num_computed == start < stop <= request.num_committed:
                said = f"from {request.num_computed} to {request.num_committed} at most"
                raise BatcherError(f"plan has tokens {start} to {stop} of request {request_id!r}; it may have {said}")
        for request_id, start, stop, _ in chosen:
            request = self._find(request_id)
            is_full = is_full or not self._is_in(request, room, plan)
            if request_id not in self.running:
                continue
            # It may have found tokens in the cache: then it runs as many as it was given, from there on.
            start, stop = request.num_computed, min(request.num_committed, request.num_computed + stop - start)
            if not room.grow(request, stop):
                raise BatcherError(f"plan has request {request_id!r} run to {stop}, and there are no pages for that")
            plan.slices.append(Slice(request, start, stop, self.running[request_id][1]))
        self._look_ahead(self.batch_tokens - sum(piece.num_tokens for piece in plan.slices), room, plan)
        return plan

    def _standing(self, request: Asked, phase: Phase, room: Room) -> Standing:
        """The request as the reader's function sees it; arrivals are numbered instead of timed."""
        arrived, num_pages = self._arrival[request.id], room.pages_held(request)
        return Standing(request.id, float(arrived), request.num_committed, request.num_computed, num_pages, phase.value)

    def _find(self, request_id: object) -> Asked:
        """A known request. Errors: BatcherError for any other id."""
        for request in (*(entry[0] for entry in self.running.values()), *self.waiting):
            if request.id == request_id:
                return request
        raise BatcherError(f"plan has request {request_id!r}, which neither runs nor waits")

    def _is_in(self, request: Asked, room: Room, plan: Plan) -> bool:
        """Let a waiting request in; whether it runs. Errors: BatcherError without a place. Changes: as `plan`."""
        if request.id in self.running:
            return True
        if len(self.running) >= self.max_running:
            raise BatcherError(f"plan lets request {request.id!r} in; max_running is {self.max_running}")
        if room.admit(request, 0) is not Entry.IN:
            return False
        self._let_in(request, plan)
        return True
