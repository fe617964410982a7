"""A room of pages that only counts, and a batcher that is played step by step with every plan checked."""

from dataclasses import dataclass

from minserve.batching.batcher import Batcher, Entry, Phase


@dataclass(eq=False)
class Asked:
    """A request for `num_out` tokens.

    `cached` of its tokens are in the room whenever it is let in; `later` times it is told to wait while others run.
    It wants `drafts` in each step, of which the first `right` ones are kept.
    """

    id: object
    num_committed: int
    num_out: int = 100
    priority: int = 0
    cached: int = 0
    later: int = 0
    num_computed: int = 0
    drafts: int = 0
    right: int = 0


class Room:
    """So many pages, held by request."""

    def __init__(self, num_pages=10**6, page_size=1):
        self.num_pages, self.page_size, self.pages = num_pages, page_size, {}

    @property
    def free_pages(self):
        return self.num_pages - sum(self.pages.values())

    def pages_held(self, request):
        return self.pages.get(request.id, 0)

    def missing(self, request, stop):
        return max(0, -(-stop // self.page_size) - self.pages_held(request))

    def cached_tokens(self, request):
        return min(request.cached, request.num_committed - 1)

    def admit(self, request, spare_pages):
        if request.later and self.pages:
            request.later -= 1
            return Entry.LATER
        if spare_pages + self.missing(request, request.num_committed + 1) > self.free_pages:
            return Entry.FULL
        request.num_computed = self.cached_tokens(request)
        self.pages[request.id] = -(-request.num_computed // self.page_size)
        return Entry.IN

    def grow(self, request, stop):
        missing = self.missing(request, stop)
        if missing > self.free_pages:
            return False
        self.pages[request.id] += missing
        return True

    def look_ahead(self, request, most):
        capacity = (self.pages_held(request) + self.free_pages) * self.page_size
        num_drafts = max(0, min(most, request.drafts, capacity - request.num_committed))
        self.pages[request.id] += self.missing(request, request.num_committed + num_drafts)
        return num_drafts

    def shrink(self, request):
        """Keep the pages of the tokens that are computed."""
        self.pages[request.id] = min(self.pages[request.id], -(-request.num_computed // self.page_size))

    def preempt(self, request):
        del self.pages[request.id]
        request.num_computed = 0


class Play:
    """A batcher and its room. Attributes: `done` the requests in order of their end, `put_back` those preempted."""

    def __init__(self, *requests, batch_tokens=8, max_running=8, policy="fcfs", **room):
        self.batcher, self.room = Batcher(batch_tokens, max_running, policy), Room(**room)
        self.done, self.put_back, self._num_departed = [], [], {}
        self.add(*requests)

    @property
    def running(self):
        return [request for request, _ in self.batcher.running.values()]

    def add(self, *requests):
        for request in requests:
            self.batcher.add(request)

    def step(self):
        """Plan, check the plan, and run it; returns it."""
        before = list(self.batcher.running.values())
        plan = self.batcher.plan(self.room)
        self.batcher.check()
        self.check(plan, before)
        for piece in plan.slices:
            self.run(piece)
        for request in plan.stuck:
            self.end(request)
        return plan

    def steps(self, num):
        """The slices of the next steps, each as (id, start, stop, first letter of the phase)."""
        return [shown(self.step()) for _ in range(num)]

    def run_all(self, max_steps=1000):
        """Step until everybody is done; the ids in order of their end."""
        for _ in range(max_steps):
            if not self.batcher.has_work:
                return [request.id for request in self.done]
            self.step()
        raise AssertionError(f"{self.batcher.waiting} wait and {self.running} run after {max_steps} steps")

    def check(self, plan, before):
        """Fail unless a plan keeps what the batcher promises of every plan."""
        requests = [piece.request for piece in plan.slices]
        assert len(set(requests)) == len(requests) and plan.slices + plan.stuck
        assert sum(piece.num_tokens for piece in plan.slices) <= self.batcher.batch_tokens
        assert len(self.batcher.running) <= self.batcher.max_running
        for piece in plan.slices:
            assert piece.start == piece.request.num_computed < piece.stop <= piece.request.num_committed
            assert piece.stop + piece.num_drafts <= self.room.pages_held(piece.request) * self.room.page_size
            assert not piece.num_drafts or (piece.phase is Phase.DECODE and piece.stop == piece.request.num_committed)
        decodes = [request for request, phase in before if phase is Phase.DECODE]
        order = decodes + [request for request, phase in before if phase is Phase.PREFILL] + plan.admitted
        assert requests == [request for request in order if request in requests]
        assert all((piece.phase is Phase.DECODE) == (piece.request in decodes) for piece in plan.slices)
        self.check_put_back(plan)

    def check_put_back(self, plan):
        """Fail unless those put back hold nothing, run no more, and come back only after somebody has left."""
        gone = [request for request, _ in plan.preempted]
        assert not {*gone} & {piece.request for piece in plan.slices}
        assert {*gone} <= {*self.batcher.waiting} and not (gone and plan.admitted)
        assert {*self.room.pages} == {*self.batcher.running}
        for request in plan.admitted:
            assert self._num_departed.get(request, -1) < len(self.done)
        self._num_departed.update(dict.fromkeys(gone, len(self.done)))
        self.put_back += gone

    def run(self, piece):
        """Compute a slice; behind the last known token the request gets the right drafts and one more, or is done."""
        request = piece.request
        num_new = min(1 + min(piece.num_drafts, request.right), request.num_out)
        is_last = piece.stop == request.num_committed
        request.num_computed = piece.stop + is_last * (num_new - 1)
        self.room.shrink(request)
        if is_last:
            request.num_committed, request.num_out = request.num_committed + num_new, request.num_out - num_new
            self.batcher.starts_decoding(request)
            if not request.num_out:
                self.end(request)

    def end(self, request):
        """Let a request leave."""
        self.batcher.remove(request)
        self.room.pages.pop(request.id, None)
        self.done.append(request)


def shown(plan):
    """A plan's slices in short."""
    return [(piece.request.id, piece.start, piece.stop, piece.phase.value[0]) for piece in plan.slices]
