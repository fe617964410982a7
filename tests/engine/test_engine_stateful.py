"""The engine under any sequence of requests, steps, aborts, failures and new weights, in pools of a few pages.

Prompts share beginnings, with the prefix cache and without; there are drafts or none. Every invariant is checked after
every step. At the end everybody has come to one end within a bounded number of steps, has got exactly its tokens, has
reused only what was there to be reused, and has left nothing in anybody's way.
"""

from bisect import bisect_right

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from small_engine import (
    ATTENTION_ONLY,
    CONFIG,
    Guesses,
    Hooked,
    Scripted,
    alone,
    check_idle,
    check_story,
    computed,
    family,
    make_engine,
    poison_free,
    scripted_next,
    scripted_tokens,
    with_head,
)

from minserve.batching.batcher import POLICIES
from minserve.errors import PromptTooLong
from minserve.events import EventKind
from minserve.metrics import steps
from minserve.paging.page_table import pages_needed
from minserve.request import FinishReason, Status

BASES = ([*range(14)], [*range(6), *range(20, 12, -1)], [9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9])
PROMPTS = st.builds(
    lambda base, cut, tail: [*BASES[base][:cut], *tail][:14] or [3],
    st.integers(0, 2), st.sampled_from([10, 6, 14, 8, 3, 0]), st.lists(st.integers(0, 24), max_size=5),
)  # fmt: skip


class Fails(Exception):
    """A forward that fails."""


class EngineModel(RuleBasedStateMachine):
    """An engine without a model: every token is 0, and nothing can be hooked into a step."""

    max_tokens, has_model, has_drawn_drafts = 10, False, False
    drafters = ("none", "guesses", "guesses")

    def make_model(self, config):
        return None

    def next_token(self, tokens):
        """What comes after a request's tokens, as far as a drafter can know."""
        return 0

    def wanted(self, request):
        """The tokens that a request gets if nobody aborts it."""
        return [0] * request.params.max_tokens

    @initialize(
        num_pages=st.sampled_from([7, 5, 12, 9, 6, 11, 4, 8, 10, 3, 2, 1]), page_size=st.sampled_from([3, 4, 1, 5, 2]),
        batch_tokens=st.sampled_from([9, 7, 5, 14, 3, 8, 4, 6, 2, 1]),
        max_running=st.sampled_from([3, 5, 2, 4, 1]), num_states=st.none() | st.integers(1, 4),
        policy=st.sampled_from(POLICIES), prefix_cache=st.sampled_from([True, True, True, False]),
        snapshot_every=st.integers(1, 9), share_reads_from=st.sampled_from([1, 4096]),
        model_config=st.sampled_from([CONFIG, CONFIG, ATTENTION_ONLY]), drafter=st.integers(0, 2),
        draft_tokens=st.integers(1, 4), adapt_drafts=st.sampled_from([False, False, True]),
    )  # fmt: skip
    def start(self, model_config, drafter, **config):
        self.draft = self.drafters[drafter]
        config["draft"] = Guesses(self.next_token) if self.draft == "guesses" else self.draft
        self.usable, self.config, self.model_config = config["num_pages"] * config["page_size"], config, model_config
        self.engine = make_engine(self.make_model(model_config), model_config=model_config, **config)
        self.requests, self.progress, self.had, self.changes = [], [], {}, []
        self.num_steps, self.next_abort, self.next_fails = 0, None, False

    @rule(
        prompt=PROMPTS, max_tokens=st.sampled_from([8, 10, 4, 6, 1, 0]), num=st.sampled_from([1, 1, 2, 3]),
        priority=st.integers(-1, 1), scored=st.sampled_from([False, False, False, True]), drawn=st.booleans(),
        cache_salt=st.sampled_from([None, None, None, "salt"]),
    )  # fmt: skip
    def add(self, prompt, max_tokens, num, scored, drawn, **params):
        max_tokens = min(max_tokens, self.max_tokens)
        drawn = drawn and (self.draft == "none" or not self.has_drawn_drafts)  # else drafts have a say in what is drawn
        params.update(temperature=0.9 * drawn, seed=10 * len(self.requests))
        if scored or not max_tokens:
            params["prompt_logprobs"] = 0
        first, *riders = family(f"{len(self.requests)}.", prompt, num, max_tokens, **params)
        if len(prompt) + max(0, max_tokens - 1) > self.usable:  # the last token needs no place
            with pytest.raises(PromptTooLong, match="EngineConfig.num_pages"):
                self.engine.add(first, riders)
            return
        self.engine.add(first, riders)
        self.requests += [first, *riders]

    @rule(num=st.integers(1, 4))
    def step(self, num):
        for _ in range(num):
            self.one_step()

    @precondition(lambda self: self.num_steps > 8 * (len(self.changes) + 1))  # else nothing is ever found
    @rule()
    def change_weights(self):
        self.engine.weights_changed()
        self.engine.check()
        self.changes.append(len(self.engine.log))

    @rule(index=st.integers(0, 40))
    def abort(self, index):
        if self.requests:
            self.abort_now(self.requests[index % len(self.requests)])

    @precondition(lambda self: self.has_model)
    @rule(index=st.integers(0, 40), fails=st.booleans())
    def abort_in_the_next_step(self, index, fails):
        if self.requests:
            self.next_abort, self.next_fails = self.requests[index % len(self.requests)], fails

    @precondition(lambda self: self.has_model)
    @rule()
    def fail_in_the_next_step(self):
        self.next_fails = True

    def during(self, *_):
        """What happens while the model runs. Fails where somebody has more pages than he can ever fill: fault B7."""
        for request in self.requests:
            table = self.engine.cache.tables.get(request.id)
            assert table is None or len(table.pages) <= pages_needed(request.max_computed, table.page_size)
        request, fails, self.next_abort, self.next_fails = self.next_abort, self.next_fails, None, False
        if request is not None:
            self.abort_now(request)
        if fails:
            raise Fails

    def abort_now(self, request):
        was_here = request.status is not Status.FINISHED and request.id not in self.had
        assert self.engine.abort(request.id) or not was_here
        if was_here:
            self.had[request.id] = len(request.output_ids)

    def one_step(self):
        try:
            self.progress += self.engine.step()
        except Fails:
            self.engine.check()
        self.num_steps += 1
        self.check_places()
        self.check_takeable()

    def check_places(self):
        """Fail unless each unfinished request waits, or runs, or rides along, and no other one does."""
        queued = [*(request.id for request in self.engine.batcher.waiting), *self.engine.batcher.running]
        here = [request.id for request in self.requests if request.status is not Status.FINISHED]
        assert len({*queued}) == len(queued) and {*queued} <= {*here}
        for name in {*here} - {*queued}:
            number, _, index = name.partition(".")
            before = [f"{number}.{i}" for i in range(int(index))]
            assert any(other in queued for other in before)  # it rides with one of these

    def check_takeable(self):
        """Fail where a page that somebody holds could be evicted, and so counts as one that may be had."""
        nodes = [*self.engine.cache.tree.nodes()]
        locked = {page for node in nodes if node.num_locks for page in node.pages}
        held = {page for table in self.engine.cache.tables.values() for page in table.pages}
        assert not ({page for node in nodes for page in node.pages} - locked) & held

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        total = sum(len(request.prompt_ids) + request.params.max_tokens for request in self.requests)
        most = self.num_steps + (total + 2) * (len(self.requests) + 1)
        while self.engine.has_work:
            self.one_step()
            assert self.num_steps <= most  # PROG
        self.progress += self.engine.step()
        check_idle(self.engine)
        check_story(self.engine, self.requests, self.progress)
        for request in self.requests:
            gone = request.id in self.had
            assert request.output_ids == self.wanted(request)[: self.had.get(request.id)]
            assert request.finish_reason is (FinishReason.ABORT if gone else FinishReason.LENGTH)
            scores = request.prompt_logprobs
            assert gone or not self.has_model or (scores is None) == (request.params.prompt_logprobs is None)
            assert gone or scores is None or len(scores) == len(request.prompt_ids)
        self.check_work()
        self.check_hits()

    def check_work(self):
        """Fail where a step passes its budget, leaves a token out, or computes one again before somebody has left."""
        runs = steps(self.engine.log)
        assert all(0 < run.num_tokens <= self.config["batch_tokens"] for run in runs)
        assert all(run.num_rows <= self.config["max_running"] for run in runs)
        done, stands_at, spans = set(), {}, computed(self.engine.log)
        for number, event in enumerate(self.engine.log):
            if event.kind is EventKind.FINISHED:
                done.clear()
            elif event.kind is EventKind.ADMITTED:
                stands_at[event.request_id] = event.data["cached_tokens"]
            elif event.kind is EventKind.SLICE:
                name, start, stop = spans[number]
                assert start == stands_at[name]
                stands_at[name] = stop
                tokens = {(name, position) for position in range(start, stop)}
                assert not tokens & done
                done |= tokens

    def check_hits(self):
        """Fail where a request reused what none of its salt had computed before it came, with the same weights."""
        by_id, known, weights_of, readers = {request.id: request for request in self.requests}, {}, {}, {}
        spans = computed(self.engine.log)
        for number, event in enumerate(self.engine.log):
            if event.kind not in (EventKind.ADMITTED, EventKind.SLICE):
                continue
            request, salt = by_id[event.request_id], by_id[event.request_id].params.cache_salt
            family_name = request.id.partition(".")[0]
            if event.kind is EventKind.SLICE:
                readers[family_name] = request.id
                ends = range(spans[number][1] + 1, spans[number][2] + 1)
                place = known.setdefault((weights_of[request.id], salt), set())
                place.update(tuple(request.tokens[:stop]) for stop in ends)
            elif request.id not in weights_of and event.data["cached_tokens"] == len(request.prompt_ids):  # a fork
                weights_of[request.id] = weights_of[readers[family_name]]
            else:
                weights_of[request.id] = weights = bisect_right(self.changes, number)
                reused = tuple(request.tokens[: event.data["cached_tokens"]])
                assert not reused or reused in known.get((weights, salt), ())
                assert not reused or (self.config["prefix_cache"] and request.params.prompt_logprobs is None)


class ScriptedModel(EngineModel):
    """The same with tokens that tell position and token before, and aborts and failures while the model runs."""

    has_model = True

    def make_model(self, config):
        return Scripted(during=self.during)

    def wanted(self, request):
        return scripted_tokens(request)

    def next_token(self, tokens):
        return scripted_next(tokens)


class SmallModel(EngineModel):
    """The same with the small random model, in memory where all that is free is NaN. Its own head may draft."""

    has_model, has_drawn_drafts, max_tokens, drafters = True, True, 8, ("mtp", "guesses", "none")
    small = {config.layer_types: with_head(config) for config in (CONFIG, ATTENTION_ONLY)}

    def make_model(self, config):
        self.said = {}
        return Hooked(self.small[config.layer_types], self.during)

    def wanted(self, request):
        key = (request.prompt_ids, request.params, request.index)
        if key not in self.said:
            self.said[key] = alone(self.small[self.model_config.layer_types], request)[0]
        return self.said[key]

    def next_token(self, tokens):
        for request in self.requests:
            at = len(tokens) - len(request.prompt_ids)
            if 0 < at < request.params.max_tokens and tokens == [*request.prompt_ids, *self.wanted(request)[:at]]:
                return self.wanted(request)[at]
        return 0

    def one_step(self):
        poison_free(self.engine)
        super().one_step()
        self.check_entries()

    def check_entries(self):
        """Fail where an entry of the draft head is counted as there, and nobody has written it. Fault E12."""
        memory, cache = self.engine.memory, self.engine.cache
        for table in cache.tables.values() if self.draft == "mtp" else ():
            keys = memory.k_pages[memory.head_layer][table.pages].flatten(0, 1)
            assert not keys[: cache.entries.num(table)].isnan().any()


def playing(machine, num_examples, num_rules):
    """The machine as a test case, the same every time."""
    case = machine.TestCase
    case.settings = settings(
        max_examples=num_examples, stateful_step_count=num_rules, deadline=None, derandomize=True, print_blob=False
    )
    return case


TestWithoutAModel = playing(EngineModel, 220, 30)
TestWithAScriptedModel = playing(ScriptedModel, 220, 30)
TestWithASmallModel = playing(SmallModel, 90, 25)
