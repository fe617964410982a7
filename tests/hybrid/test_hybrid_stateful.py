"""The hybrid cache under any sequence of admissions, steps, drafts, forks, preemptions, aborts, failures, new weights.

Contents are played: after everything that happens each running request's pages hold exactly its computed tokens, its
state has seen exactly these, and so has every path of the tree. A draft head follows some requests; of its entries none
is counted that is not there. At the end nothing is lost.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from played_cache import PlayedCache, ask

from minserve.batching.batcher import Entry

FEW = st.integers(0, 7)
PROMPT = st.tuples(st.sampled_from([1, 3, 4, 7, 8, 9, 12, 13, 16]), st.integers(0, 3))


class Broken(Exception):
    """A forward that fails."""


class CacheModel(RuleBasedStateMachine):
    """Requests of ones and then twos: they share beginnings, part inside pages, and few fit together."""

    page_size, has_states = 4, True

    @initialize(
        usable=st.integers(4, 28), every=st.integers(1, 9), num_states=st.integers(1, 7), rows=st.integers(1, 3),
        enabled=st.sampled_from([True] * 7 + [False]), num_draft_slots=st.sampled_from([4, 8, 2, 1, 0]),
    )  # fmt: skip
    def start(self, usable, every, num_states, rows, enabled, num_draft_slots):
        self.most, num_pages = num_states, -(-usable // self.page_size)
        self.played = PlayedCache(
            every, enabled, num_pages=num_pages, page_size=self.page_size, num_states=num_states,
            num_rows=min(rows, num_states), has_states=self.has_states, num_draft_slots=num_draft_slots,
        )  # fmt: skip
        self.cache, self.num_rows = self.played.cache, min(rows, num_states)
        self.waiting, self.running, self.num_asked = [], [], 0

    def pick(self, requests, index):
        return requests[index % len(requests)] if requests else None

    @rule(prompt=PROMPT, salt=st.sampled_from([None, None, None, "a"]), scored=st.sampled_from([False] * 5 + [True]))
    def add(self, prompt, salt, scored):
        room = self.played.sizes.num_pages * self.page_size
        ones, twos = prompt
        tokens = ([1] * ones + [2] * twos)[:room]
        self.waiting.append(ask(self.num_asked, tokens, room - len(tokens) + 1, salt, scored))
        self.num_asked += 1

    @rule(index=FEW, spare=st.integers(0, 2), prompt=PROMPT)
    def admit(self, index, spare, prompt):
        self.add(prompt, None, False)
        self.admit_one(self.pick(self.waiting, index), spare)
        self.check()

    def admit_one(self, request, spare=0):
        """Let a request in, if there is room. Returns whether it runs."""
        before = self.held()
        if len(self.running) == self.most:
            return False
        entry = self.played.admit(request, spare * bool(self.running))
        if entry is not Entry.IN:
            assert self.held() == before and request.num_computed == 0
            assert self.running, "the only request does not fit"
            return False
        assert request.num_computed < request.num_committed
        assert not request.num_computed or self.cache.prefixes.enabled
        assert not request.num_computed or request.params.prompt_logprobs is None
        self.waiting.remove(request)
        self.running.append(request)
        return True

    def held(self):
        """Who refers to what, as far as a failed admission may not change it."""
        cache = self.cache
        return (
            {page: cache.allocator.ref_count(page) > 0 for page in range(cache.allocator.num_pages)},
            {slot: cache.states.ref_count(slot) for slot in cache.states.held}, cache.holders,
            cache.num_takeable, cache.tree.num_protected,
        )  # fmt: skip

    @precondition(lambda self: self.running or self.waiting)
    @rule(
        order=st.permutations(range(3)), sizes=st.tuples(*[st.integers(1, 9)] * 3), num_steps=st.integers(1, 4),
        tokens=st.tuples(*[st.sampled_from([1, 2])] * 3), fate=st.sampled_from("......fapv"), who=FEW,
        drafts=st.tuples(*[st.tuples(st.integers(0, 5), st.integers(0, 5))] * 3), follows=st.integers(0, 7),
    )  # fmt: skip
    def steps(self, order, sizes, num_steps, tokens, fate, who, drafts, follows):
        """Some steps; in the last one the forward may fail, or somebody leave or give way, or the weights change."""
        for number in range(num_steps - 1):
            while self.waiting and self.admit_one(self.waiting[0]):
                pass
            self.step(order, sizes, tokens, ".", who, drafts[number:] + drafts[:number], follows)
        self.step(order, sizes, tokens, fate, who, drafts, follows)
        if fate == "v":
            self.cache.prefixes.new_version()
            assert not any(self.cache.prefixes.find(request).num_tokens for request in self.waiting)
            self.check()

    def step(self, order, sizes, tokens, fate, who, drafts, follows):
        """One step for some of those who run.

        Arguments:
            drafts: how many each decoding row wants, and how many of them are right.
            follows: whom the draft head follows, a bit each.
        """
        pages_held = self.pages_held()
        chosen = [self.running[i] for i in order if i < len(self.running)][: self.num_rows]
        given = dict(zip(chosen, zip(tokens, drafts, strict=True), strict=False))

        def wanted(request):
            return min(given[request][1][0], request.max_computed - request.num_committed)

        try:
            with self.cache.open((), wanted) as ticket:
                stops = self.planned(ticket, chosen, sizes)
                if fate == "p" and len(self.running) > 1:
                    self.preempt(ticket, self.pick(self.running, who), stops)
                guesses = self.look_ahead(ticket, stops, given)
                for request, stop in stops.items():
                    ticket.keep_states(request, stop + len(guesses[request]))
                if fate == "f":
                    raise Broken
                for request, stop in stops.items():
                    self.played.compute(ticket, request, stop, guesses[request])
                gone = self.pick(list(stops), who) if fate == "a" else None
                for number, (request, stop) in enumerate(stops.items()):
                    token, (_, num_right) = given[request]
                    new = [*guesses[request][:num_right], token] if stop == request.num_committed else []
                    self.commit(ticket, request, stop, new, request is gone, follows >> number & 1)
        except Broken:
            assert self.pages_held().items() <= pages_held.items()
        self.check()

    def look_ahead(self, ticket, stops, given):
        """Take what drafts need, of rows that decode; the drafts by request."""
        guesses = {}
        for request, stop in stops.items():
            decodes = len(request.prompt_ids) < request.num_committed == stop == request.num_computed + 1
            num_drafts = ticket.look_ahead(request, 4) if decodes else 0
            guesses[request] = [given[request][0]] * num_drafts
            assert num_drafts <= 4 and len(ticket.state_write[request.id]) == 1 + num_drafts
        return guesses

    def pages_held(self):
        """How many pages each running request holds."""
        return {request.id: len(self.cache.tables[request.id].pages) for request in self.running}

    def planned(self, ticket, chosen, sizes):
        """Take what the slices need; who gets nothing is left out, and others give way to the first one."""
        stops = {}
        for request, size in zip(chosen, sizes, strict=False):
            if request not in self.running:
                continue
            stop = min(request.num_committed, request.num_computed + size)
            grown = ticket.grow(request, stop)
            while not grown and request is self.running[0] and len(self.running) > 1:
                self.preempt(ticket, self.running[-1], stops)
                grown = ticket.grow(request, stop)
            assert grown or request is not self.running[0], "the oldest request has no room"
            if grown:
                stops[request] = stop
        return stops

    def preempt(self, ticket, victim, stops):
        stops.pop(victim, None)
        ticket.preempt(victim)
        self.running.remove(victim)
        self.waiting.append(victim)

    def commit(self, ticket, request, stop, new, is_gone, follows):
        """Commit a slice up to `stop`, and what was chosen behind it."""
        new = new[: request.max_computed + 1 - request.num_committed]
        if follows:
            self.played.follow(request, stop, new)
        if is_gone:
            ticket.abandon(request, keep=stop % 2 == 1)
            self.running.remove(request)
            return
        is_prefill = stop <= len(request.prompt_ids)
        request.commit(stop + max(0, len(new) - 1), new)
        self.cache.commit(ticket, request, publish=is_prefill)
        if request.num_committed > request.max_computed:
            self.cache.release(request, keep=True)
            self.running.remove(request)

    @precondition(lambda self: self.running)
    @rule(index=FEW, keep=st.booleans())
    def release(self, index, keep):
        request = self.pick(self.running, index)
        self.cache.release(request, keep)
        self.running.remove(request)
        self.check()

    @precondition(lambda self: self.running)
    @rule(index=FEW, token=st.sampled_from([1, 2]))
    def fork(self, index, token):
        request = self.pick(self.running, index)
        if len(self.running) == self.most or request.num_computed + 1 != request.num_committed:
            return
        if request.id not in self.cache.slot_of:
            return
        if self.cache.prefixes.enabled and self.cache.prefixes._node_of[request.id].stop != request.num_computed:
            return  # requests fork where they have just published
        child = ask(self.num_asked, request.prompt_ids, request.params.max_tokens, request.params.cache_salt)
        self.num_asked, before = self.num_asked + 1, self.held()
        if self.cache.fork(request, child):
            child.tokens = [*request.tokens[:-1], token]
            child.num_computed = request.num_computed
            self.played.kind_of[child.id] = self.played.kind_of[request.id]
            self.running.append(child)
        else:
            assert self.cache.num_takeable == 0 and self.held() == before
        self.check()

    def check(self):
        self.played.check(self.running)

    def teardown(self):
        if hasattr(self, "played"):
            for request in self.running:
                self.cache.release(request, keep=True)
            self.played.check_idle()


class OneTokenPages(CacheModel):
    """The same with pages of one token: no hit ends inside a page."""

    page_size = 1


class OddPages(CacheModel):
    """The same with pages of three tokens."""

    page_size = 3


class NoStates(CacheModel):
    """The same for a model of attention alone: a hit ends anywhere."""

    has_states = False


def playing(machine, num_examples, num_rules):
    """The machine as a test case, the same every time."""
    case = machine.TestCase
    case.settings = settings(
        max_examples=num_examples, stateful_step_count=num_rules, deadline=None, derandomize=True, print_blob=False
    )
    return case


TestFourTokenPages = playing(CacheModel, 60, 40)
TestOneTokenPages = playing(OneTokenPages, 40, 40)
TestOddPages = playing(OddPages, 50, 40)
TestNoStates = playing(NoStates, 40, 40)
