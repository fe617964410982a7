"""The batcher: which slice of which request runs in the next step.

There is no batch that requests are put into. Before every step the batch is chosen afresh, token by token, up to one
budget: first each decoding request's one token, then slices of prompts that are being read, then new requests, and
drafts for the decoding ones out of what is left. So a request joins when there is room and leaves when it is done, and
a long prompt is read in slices beside decoding rows instead of in front of them. Yu et al., Orca (OSDI 2022),
iteration-level scheduling; Agrawal et al., Sarathi-Serve (arXiv 2403.02310), chunked prefill beside decodes.

When pages run out, the request that was let in last gives its pages back and is computed again later. It returns only
once somebody has left, so two requests never take pages from each other in turn; and the one let in first (of those
with the highest priority, if that is the policy) is never asked, so somebody always gets done.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

from minserve.batching.queue_order import by_longest_prefix
from minserve.errors import InvalidValue, MinserveError

POLICIES = ("fcfs", "priority", "longest_prefix")


class BatcherError(MinserveError):
    """A batcher whose queues contradict one another."""


class Phase(Enum):
    """What a running request is doing. It is state: a one-token slice may be a prompt's last, and is no decode."""

    PREFILL = "prefill"
    DECODE = "decode"


class Entry(Enum):
    """What a request that wants to be let in is told: yes; that there is no room; or that others may go first."""

    IN = "in"
    FULL = "full"
    LATER = "later"


class Asked(Protocol):
    """What the batcher reads of a request; it writes nothing there."""

    id: Hashable
    num_computed: int
    priority: int

    @property
    def num_committed(self) -> int:
        """Tokens that belong to the request."""


class Room(Protocol):
    """What a step may take from the caches, and gives back when it fails."""

    free_pages: int
    page_size: int

    def cached_tokens(self, request: Asked) -> int:
        """How many tokens of a request that waits would not have to be computed."""

    def admit(self, request: Asked, spare_pages: int) -> Entry:
        """Let a request in if all its tokens and one more fit beside `spare_pages` others; cached ones are computed."""

    def grow(self, request: Asked, stop: int) -> bool:
        """Take pages for the tokens up to stop, or nothing."""

    def look_ahead(self, request: Asked, most: int) -> int:
        """Take room for drafts behind a planned slice: as many as are wanted and fit, <= most; how many."""

    def missing(self, request: Asked, stop: int) -> int:
        """How many pages are to be taken yet for the tokens up to stop."""

    def pages_held(self, request: Asked) -> int:
        """How many pages the request holds."""

    def preempt(self, request: Asked) -> None:
        """Give back all that the request holds."""


class Slice(NamedTuple):
    """Tokens start .. stop - 1 of a request, to be computed in one step, and behind a single one so many drafts."""

    request: Asked
    start: int
    stop: int
    phase: Phase
    num_drafts: int = 0

    @property
    def num_tokens(self) -> int:
        """Positions that this slice computes."""
        return self.stop - self.start + self.num_drafts


@dataclass
class Plan:
    """What the next step does: the slices, decode rows first, who was let in, who was put back, and who is stuck.

    Who was put back comes with the count of tokens that are to be computed again. A stuck request runs alone, and there
    is still no page for its next token: it can only be ended.
    """

    slices: list[Slice] = field(default_factory=list)
    admitted: list[Asked] = field(default_factory=list)
    preempted: list[tuple[Asked, int]] = field(default_factory=list)
    stuck: list[Asked] = field(default_factory=list)


class Batcher:
    """Two queues, and a plan for every step.

    Arguments:
        batch_tokens: tokens of one step, at most, decode rows and prompt slices together.
        max_running: requests that are let in at the same time, at most.
        policy: "fcfs", in order of arrival; "priority", the highest first; or "longest_prefix", the one with the most
            cached tokens first, see `by_longest_prefix`. Equals go in order of arrival.
    Attributes:
        waiting: requests not let in, in the order in which they will be.
        running: requests let in, in order of admission, each with its phase.
    """

    def __init__(self, batch_tokens: int, max_running: int, policy: str = "fcfs"):
        for name, value in (("batch_tokens", batch_tokens), ("max_running", max_running)):
            if value < 1:
                raise InvalidValue(name, value, "at least 1", f"EngineConfig.{name}")
        if policy not in POLICIES:
            raise InvalidValue("policy", policy, "one of " + ", ".join(POLICIES), "EngineConfig.policy")
        self.batch_tokens, self.max_running, self.policy = batch_tokens, max_running, policy
        self.running: dict[Hashable, tuple[Asked, Phase]] = {}
        self._queue: list[tuple[tuple[int, int], Asked]] = []
        self._arrival: dict[Hashable, int] = {}
        self._num_arrived = 0
        self._overtaken: dict[Hashable, int] = {}  # how many later ones were let in first
        self._full = False  # somebody was put back, and nobody has left since

    @property
    def waiting(self) -> list[Asked]:
        """Requests not let in, in the order in which they will be."""
        return [request for _, request in self._queue]

    @property
    def has_work(self) -> bool:
        """Whether anybody waits or runs."""
        return bool(self._queue or self.running)

    def add(self, request: Asked) -> None:
        """Let a request queue. Changes: waiting. Errors: InvalidValue for an id that is in here already."""
        if request.id in self._arrival:
            raise InvalidValue("request.id", request.id, "one that no waiting or running request has")
        self._arrival[request.id] = self._num_arrived
        self._num_arrived += 1
        insort(self._queue, (self._rank(request), request))

    def adopt(self, request: Asked, phase: Phase) -> bool:
        """Let a request run without having queued: a fork, whose tokens are computed already.

        Changes: running; or nothing, where no place is free, and then False.
        """
        if len(self.running) >= self.max_running or self._full:
            return False
        self._arrival[request.id] = self._num_arrived
        self._num_arrived += 1
        self.running[request.id] = (request, phase)
        return True

    def remove(self, request: Asked) -> None:
        """Forget a request, wherever it is: it ended. Changes: waiting or running."""
        if self.running.pop(request.id, None):
            self._full = False
        elif request.id in self._arrival:
            self._queue.remove((self._rank(request), request))
        self._arrival.pop(request.id, None)
        self._overtaken.pop(request.id, None)

    def starts_decoding(self, request: Asked) -> None:
        """Note that a request has all its prompt computed and its next token chosen. Changes: its phase."""
        if request.id in self.running:
            self.running[request.id] = (request, Phase.DECODE)

    def plan(self, room: Room) -> Plan:
        """Choose the next step's slices, taking the pages for them. Changes: the queues and the room."""
        plan = Plan()
        budget = self.batch_tokens
        for request, phase in self._decodes_first():
            if budget and request.id in self.running:
                budget -= self._plan_running(request, phase, budget, room, plan)
        if self._queue and not (plan.preempted or self._full):
            budget = self._admit(budget, room, plan)
        self._look_ahead(budget, room, plan)
        return plan

    def check(self) -> None:
        """Raise BatcherError unless every known request is in one queue, and no limit is passed."""
        waiting = [request.id for request in self.waiting]
        if sorted(map(repr, [*waiting, *self.running])) != sorted(map(repr, self._arrival)):
            raise BatcherError(f"waiting {waiting} and running {[*self.running]} are not those known: {self._arrival}")
        if self._queue != sorted(self._queue, key=lambda entry: entry[0]):
            raise BatcherError(f"the waiting requests {waiting} are out of order")
        if len(self.running) > self.max_running:
            raise BatcherError(f"{len(self.running)} requests run; max_running is {self.max_running}")

    def _rank(self, request: Asked) -> tuple[int, int]:
        """A request's place in the queue: the lowest first."""
        return (-request.priority if self.policy == "priority" else 0, self._arrival[request.id])

    def _decodes_first(self) -> Iterator[tuple[Asked, Phase]]:
        """The running requests, as they are now: decoding ones, then those still reading their prompts."""
        running = list(self.running.values())
        yield from (entry for entry in running if entry[1] is Phase.DECODE)
        yield from (entry for entry in running if entry[1] is Phase.PREFILL)

    def _plan_running(self, request: Asked, phase: Phase, budget: int, room: Room, plan: Plan) -> int:
        """Plan a running request's slice, making room if need be; the budget that this costs. Changes: as `plan`."""
        start = request.num_computed
        stop, refund = min(request.num_committed, start + budget), 0
        while not room.grow(request, stop):
            victim = self._victim()
            if victim is request:  # nobody came later: wait for those who came before, or give up
                plan.stuck += [request] if len(self.running) == 1 else []
                return -refund
            refund += self._put_back(victim, room, plan)
        plan.slices.append(Slice(request, start, stop, phase))
        return stop - start - refund

    def _victim(self) -> Asked:
        """Who gives way first: the lowest priority, where that is the policy, and of equals the one let in last."""
        running = [request for request, _ in reversed(self.running.values())]
        return min(running, key=lambda request: request.priority) if self.policy == "priority" else running[0]

    def _put_back(self, victim: Asked, room: Room, plan: Plan) -> int:
        """Make a running request wait again; the budget that its slice, if planned already, sets free. Changes: all."""
        del self.running[victim.id]
        insort(self._queue, (self._rank(victim), victim))
        self._full = bool(self.running)
        plan.preempted.append((victim, victim.num_computed))
        room.preempt(victim)
        undone = [piece for piece in plan.slices if piece.request is victim]
        plan.slices = [piece for piece in plan.slices if piece.request is not victim]
        return sum(piece.stop - piece.start for piece in undone)

    def _look_ahead(self, budget: int, room: Room, plan: Plan) -> None:
        """Give decoding rows drafts out of what is left: guesses take nobody's place. Changes: as `plan`."""
        for at, piece in enumerate(plan.slices):
            if not budget:
                return
            if piece.phase is Phase.DECODE and piece.stop == piece.request.num_committed:
                num_drafts = room.look_ahead(piece.request, budget)
                if num_drafts:
                    plan.slices[at] = piece._replace(num_drafts=num_drafts)
                    budget -= num_drafts

    def _admit(self, budget: int, room: Room, plan: Plan) -> int:
        """Let waiting ones in, in order; where one does not fit, nobody overtakes it. Returns the budget left."""
        if not budget or len(self.running) >= self.max_running:
            return budget
        # Those let in keep what they need to be read to the end, and one page each for the tokens to come.
        spare = sum(room.missing(request, request.num_committed + 1) for request, _ in self.running.values())
        spare += len(self.running)
        for request in self._in_order(room):
            if not budget or len(self.running) >= self.max_running:
                return budget
            entry = room.admit(request, spare)
            if entry is Entry.FULL:
                return budget
            if entry is Entry.LATER:
                continue
            self._let_in(request, plan)
            start = request.num_computed
            stop = min(request.num_committed, start + budget)
            if not room.grow(request, stop):
                raise BatcherError(f"request {request.id!r} was let in, and its first pages are not there")
            plan.slices.append(Slice(request, start, stop, Phase.PREFILL))
            spare += room.missing(request, request.num_committed + 1) + 1
            budget -= stop - start
        return budget

    def _in_order(self, room: Room) -> list[Asked]:
        """The waiting requests, in the order in which they are to be let in."""
        if self.policy != "longest_prefix":
            return self.waiting
        return by_longest_prefix(self.waiting, room.cached_tokens, lambda request: self._overtaken.get(request.id, 0))

    def _let_in(self, request: Asked, plan: Plan) -> None:
        """Move a request from waiting to running. Changes: the queues, the plan."""
        place = self._queue.index((self._rank(request), request))
        del self._queue[place]
        if self.policy == "longest_prefix":
            for _, earlier in self._queue[:place]:
                self._overtaken[earlier.id] = self._overtaken.get(earlier.id, 0) + 1
            self._overtaken.pop(request.id, None)
        self.running[request.id] = (request, Phase.PREFILL)
        plan.admitted.append(request)
