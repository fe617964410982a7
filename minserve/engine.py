"""The engine: plan, prepare, run, choose, commit; one ragged batch per step, for as long as anybody wants tokens.

    plan      the batcher chooses slices of requests and takes their pages and slots, on one ticket
    prepare   guesses are made, where somebody drafts; the slices are packed into a `Step` and its `Places`
    run       the model computes hidden states, and logits where a token is wanted
    choose    sampling turns logits into tokens, and keeps guesses
    commit    counts, stops, pages and states move, and only here; who is done leaves

The engine owns everything that changes: queues, pools, clock, log. A model of None plays time alone: every token is 0
and a cost says how long a step takes on a virtual clock.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch

from minserve.batching.batcher import Phase, Slice
from minserve.choosing import Chosen, choose_tokens
from minserve.drafting import Drafting
from minserve.engine_config import EngineConfig, size_caches
from minserve.errors import InvalidValue, MinserveError, PromptTooLong
from minserve.events import EventKind, EventLog
from minserve.hybrid.hybrid_cache import HybridCache
from minserve.hybrid.ticket import Ticket
from minserve.model.config import ModelConfig
from minserve.model.hybrid_lm import HybridLM
from minserve.model_runner import ModelRunner
from minserve.paging.page_table import PageError
from minserve.parts import Parts
from minserve.request import FinishReason, Request, SamplingParams, Status, check_prompt, max_computed
from minserve.request_life import Life, Progress
from minserve.sampling import Sampled
from minserve.step_record import record_plan, record_step
from minserve.stopping import Decoder, Kept, StopChecker

Cost = Callable[[list[tuple[int, int]]], float]


class EngineStuck(MinserveError):
    """Requests wait and none can run, which no sequence of requests may cause: a replaced part is at fault."""


class Engine:
    """Serves requests together.

    Arguments:
        model: any checkpoint; None plays time alone.
        model_config: the model's shape.
        config: the knobs.
        log: where everything is recorded; its clock is the engine's.
        new_decoder: makes an incremental decoder for each output.
        parts: what a reader replaces.
        cost: on a virtual clock, the seconds of a step from its (start, stop) positions by row; None on a real one.
    Attributes:
        batcher, cache, memory: the queues, who holds what, and the pools (None without a model).
        drafting: who guesses ahead, and how far.
        sizes: how large the pools are.
        max_context: tokens of prompt and output together, at most.
    """

    def __init__(
        self, model: HybridLM | None, model_config: ModelConfig, config: EngineConfig, log: EventLog,
        new_decoder: Callable[[], Decoder], parts: Parts | None = None, cost: Cost | None = None,
    ):  # fmt: skip
        parts = parts or Parts()
        limit = model_config.max_position_embeddings
        self.max_context = config.max_context or limit
        if self.max_context > limit:
            raise InvalidValue("max_context", self.max_context, f"at most {limit}, the model's own limit")
        self.config, self.log, self.sizes = config, log, size_caches(config, model_config)
        self._model_config, self._cost, self._new_decoder = model_config, cost, new_decoder
        max_running = min(config.max_running, self.sizes.num_states)
        self.batcher = parts.make_batcher(config.batch_tokens, max_running, config.policy)
        self._runner = ModelRunner(model, model_config, config, self.sizes, parts)
        self.memory = self._runner.memory
        self.cache = HybridCache(self.sizes, config.snapshot_every, config.prefix_cache, parts, self._runner.copy_page)
        head = self._runner.draft_head(self.cache)
        self.drafting = Drafting(config, model_config.vocab_size, log.clock, head)
        self._lives: dict[Hashable, Life] = {}
        self._num_steps, self._running_step = 0, False
        self._leaving: dict[Hashable, None] = {}
        self._gone: frozenset[Hashable] = frozenset()
        self._ended: list[Progress] = []

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished, or ended and not reported yet."""
        return bool(self._lives or self._ended)

    def check_request(self, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        """Refuse what could never be served. Errors: as `check_prompt`, and PromptTooLong for the pool of pages."""
        check_prompt(prompt_ids, params, self._model_config.vocab_size, self.max_context)
        needed = self.cache.pages_needed(max_computed(prompt_ids, params))
        if needed > self.sizes.num_pages:
            wanted = f"{len(prompt_ids)} prompt tokens + max_tokens {params.max_tokens}, in {needed} pages"
            limit = f"at most {self.sizes.num_pages} pages of {self.sizes.page_size} tokens, the whole cache"
            raise PromptTooLong("prompt_ids", wanted, limit, "EngineConfig.num_pages or cache_bytes")

    def add(self, request: Request, riders: Sequence[Request] = (), time_s: float | None = None) -> None:
        """Let a request queue; riders have the same prompt, and fork from it when it is computed.

        Arguments:
            request, riders: waiting, with ids that nobody in here has.
            time_s: when they arrived, if that was before now: in the middle of the last step, for example.
        Errors: InvalidValue or PromptTooLong, and nothing is queued. Changes: the queues, the log.
        """
        ids = [one.id for one in (request, *riders)]
        for one in (request, *riders):
            self.check_request(one.prompt_ids, one.params)
            if (one.prompt_ids, one.params) != (request.prompt_ids, request.params):
                raise InvalidValue("riders", one.id, "requests with the prompt and params of the one they ride with")
            if one.id in self._lives or one.status is not Status.WAITING or one.num_computed or ids.count(one.id) > 1:
                raise InvalidValue("request.id", one.id, "a fresh request, with an id that no other one in here has")
        for one in (request, *riders):
            checker = StopChecker(one.params, self._new_decoder(), self._model_config.eos_token_ids)
            self._lives[one.id] = Life(one, checker)
            self.log.record(EventKind.ARRIVED, one.id, time_s, prompt_tokens=len(one.prompt_ids))
        self._lives[request.id].riders = list(riders)
        self.batcher.add(request)

    def abort(self, request_id: Hashable) -> bool:
        """End a request now, wherever it is; in the middle of a step, when that commits. The next step reports it.

        Returns whether there is such a request, unfinished. Changes: the request, the queues, the caches, the log.
        """
        if request_id not in self._lives:
            return False
        self._leaving[request_id] = None
        if not self._running_step:
            self._end_leaving()
        return True

    @torch.inference_mode()
    def step(self) -> list[Progress]:
        """Run one step for everybody who has a place in it, and say what it brought.

        Errors: whatever the model raises; then no count has moved, and the step can be tried again.
        Changes: requests, queues, caches, log.
        """
        began_s = self.log.clock.now()
        self.drafting.plan([*self.batcher.running.values()])  # a drafter of the user's may abort, too
        if not self._lives:
            return self.take_ended()
        with self.cache.open(self.batcher.waiting[: self.batcher.max_running], self.drafting.wanted) as ticket:
            plan = self.batcher.plan(ticket)
            record_plan(self.log, plan)
            for request in plan.admitted:
                request.status = Status.RUNNING
            for request in plan.stuck:
                said = f"the cache of {self.sizes.num_pages} pages has no page left for the next token"
                error = f"{said} (change it with EngineConfig.num_pages)"
                self._ended.append(self._end(self._lives[request.id], FinishReason.ERROR, error))
            if plan.slices:
                self._run(plan.slices, ticket, began_s)
            elif not plan.stuck:
                raise EngineStuck(f"{len(self._lives)} requests are unfinished, and the plan has no slice for any")
        if self.config.check:
            self.check()
        return self.take_ended()

    def weights_changed(self) -> None:
        """Let requests to come find nothing that other weights computed; those that run go on. Changes: the cache."""
        self.cache.prefixes.new_version()

    def take_ended(self) -> list[Progress]:
        """What the next step would report beside what it does: who was aborted. Changes: it is not reported again."""
        ended, self._ended = self._ended, []
        return ended

    def check(self) -> None:
        """Raise the first broken invariant of queues, pages and states. Between steps only."""
        self.batcher.check()
        self.cache.check()
        for request, _ in self.batcher.running.values():
            self.cache.state_of(request)
        held = self.cache.holders - {*self.batcher.running}
        if held:
            raise PageError(f"requests {sorted(held, key=str)} hold pages or states, and do not run")

    def _run(self, slices: list[Slice], ticket: Ticket, began_s: float) -> None:
        """Run the slices, commit what came out of it, then end who left meanwhile. Changes: as `step`."""
        self._running_step = True
        try:
            self._ended += self._run_and_commit(slices, ticket, began_s)
        finally:
            self._running_step = False
            self._end_leaving()

    def _run_and_commit(self, slices: list[Slice], ticket: Ticket, began_s: float) -> list[Progress]:
        """The step itself, in the middle of which requests may be aborted. Changes: as `step`."""
        drafts = self.drafting.propose(slices)
        model_began_s = self.log.clock.now()
        output = self._runner.run(slices, drafts, ticket, self.cache)
        cost_s = self._cost_s(slices)
        self._gone = frozenset(self._leaving)  # who leaves later still gets this step's tokens
        chosen = choose_tokens(slices, output and output.logits, self._riders_of, drafts, self._runner.verify)
        if cost_s is not None:
            self.log.clock.advance(cost_s)
        step_s = self.log.clock.now() - model_began_s
        self.drafting.follow(slices, chosen, output and output.hidden)
        self.drafting.learn(slices, chosen, step_s)
        number, self._num_steps = self._num_steps, self._num_steps + 1
        record_step(self.log, number, slices, began_s)
        return [one for piece in slices for one in self._commit(piece, ticket, chosen)]

    def _cost_s(self, slices: list[Slice]) -> float | None:
        """What a step takes on a virtual clock; None on a real one."""
        if self._cost is None:
            return None
        return self._cost([(p.start, p.start + p.num_tokens) for p in slices]) + self.drafting.draft_cost_s(slices)

    def _commit(self, piece: Slice, ticket: Ticket, chosen: Chosen) -> list[Progress]:
        """Move one request's counts, pages, state and text on by its slice. Changes: as `step`."""
        request, life = piece.request, self._lives[piece.request.id]
        error = chosen.errors.get(request.id)
        if error is not None or request.id in self._gone:
            ticket.abandon(request, keep=error is None)
            return [self._end(life, FinishReason.ERROR if error else FinishReason.ABORT, error)]
        new = chosen.tokens.get(request.id, [])
        kept = life.checker.push([sampled.token_id for sampled in new])
        new = new[: kept.num_kept]
        request.commit(piece.stop + max(0, len(new) - 1), [sampled.token_id for sampled in new])
        self.cache.commit(ticket, request, publish=piece.phase is Phase.PREFILL)
        if not new:
            done = request.num_computed == request.num_committed  # a prompt that was to be scored, and no more
            return [self._end(life, FinishReason.LENGTH)] if done else []
        if piece.num_drafts:
            accepted = min(chosen.accepted[request.id], len(new))
            self.log.record(EventKind.DRAFTS, request.id, drafted=piece.num_drafts, accepted=accepted)
        self.log.record(EventKind.TOKENS, request.id, count=len(new))
        riders, life.riders = self._riders_of(request), []
        forked = [self._fork(request, rider) for rider in riders]
        if piece.phase is Phase.PREFILL:
            self.batcher.starts_decoding(request)
        progress = [self._give(life, new, kept)]
        for rider, is_forked in zip(riders, forked, strict=True):
            if is_forked:
                its = self._lives[rider.id]
                new = chosen.tokens[rider.id]
                rider.commit(request.num_computed, [sampled.token_id for sampled in new])
                self.log.record(EventKind.TOKENS, rider.id, count=len(new))
                progress.append(self._give(its, new, its.checker.push([sampled.token_id for sampled in new])))
            else:
                self.batcher.add(rider)
        return progress

    def _fork(self, request: Request, rider: Request) -> bool:
        """Let a rider go on from its request's prompt, if there is room. Changes: as `step`."""
        if not self.batcher.adopt(rider, Phase.DECODE):
            return False
        if not self.cache.fork(request, rider):
            self.batcher.remove(rider)
            return False
        rider.status, rider.prompt_logprobs = Status.RUNNING, request.prompt_logprobs
        self.log.record(EventKind.ADMITTED, rider.id, cached_tokens=request.num_computed)
        return True

    def _give(self, life: Life, new: list[Sampled], kept: Kept) -> Progress:
        """Hand new tokens on, and end the request where it ends. Changes: as `step`."""
        if kept.finish_reason is not None:
            self._close(life, kept.finish_reason)
        ids, logprobs = tuple(sampled.token_id for sampled in new), tuple(sampled.logprobs for sampled in new)
        return Progress(life.request, ids, kept.text, logprobs, kept.finish_reason)

    def _riders_of(self, request: Request) -> list[Request]:
        """Who forks from a request when its prompt is computed."""
        return self._still_here(self._lives[request.id].riders)

    def _still_here(self, riders: list[Request]) -> list[Request]:
        """The riders that have not ended meanwhile."""
        if not riders:
            return riders
        here = [(rider, self._lives.get(rider.id)) for rider in riders if rider.id not in self._gone]
        return [rider for rider, life in here if life and life.request is rider]

    def _end_leaving(self) -> None:
        """End those who were aborted; the next step reports it. Changes: as `abort`."""
        leaving, self._leaving, self._gone = [name for name in self._leaving if name in self._lives], {}, frozenset()
        self._ended += [self._end(self._lives[request_id], FinishReason.ABORT) for request_id in leaving]

    def _end(self, life: Life, reason: FinishReason, error: str | None = None) -> Progress:
        """End a request from outside its output; a rider takes over what it leaves. Changes: as `step`."""
        text = life.checker.finish(reason)
        self._close(life, reason)
        return Progress(life.request, (), text, (), life.request.finish_reason, error)

    def _close(self, life: Life, reason: FinishReason) -> None:
        """Take a request out of queues and caches. Changes: as `step`."""
        request = life.request
        request.finish(reason)
        self.batcher.remove(request)
        self.cache.release(request, keep=reason is not FinishReason.ERROR)
        del self._lives[request.id]
        self.log.record(EventKind.FINISHED, request.id, reason=str(request.finish_reason))
        left = self._still_here(life.riders)
        if left:  # it never came to the fork: the first rider reads the prompt instead
            self._lives[left[0].id].riders = left[1:]
            self.batcher.add(left[0])
