"""Drafting: who guesses, how many guesses a step verifies, and what became of them.

    plan      how many drafts pay, from what was accepted lately and from what steps cost
    propose   the drafts, when the step's slices are known
    (the engine runs the model over known tokens and drafts, and verifies)
    follow    the MTP head sees what the step has left for good
    learn     acceptance and prices

Drafts live within one step. They never enter a request, so nothing has to forget them when one is put back or aborted.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from minserve.batching.batcher import Phase, Slice
from minserve.choosing import Chosen
from minserve.clock import Clock
from minserve.depth_choice import DepthChoice
from minserve.draft_rows import DraftRow
from minserve.engine_config import EngineConfig
from minserve.errors import InvalidValue
from minserve.mtp_drafts import MTPDrafts
from minserve.request import Request
from minserve.sampling import Stream, choose, filter_probs, penalized, uniform, usable_rows
from minserve.sampling_params import as_ids
from minserve.speculation.drafters import Drafter, NGramDrafter, Scorer
from minserve.step_costs import MeasuredCosts


class Drafting:
    """Makes the drafts of an engine's steps.

    Arguments:
        config: the engine's.
        vocab_size: of the model that verifies.
        clock: the engine's.
        head: runs the MTP head, where that drafts.
    Attributes:
        is_on: whether anybody drafts at all.
        depth: how many drafts of a row pay in this step, at most.
        acceptance: how often drafts were accepted, by depth.
        costs: what steps and drafts cost.
    """

    def __init__(self, config: EngineConfig, vocab_size: int, clock: Clock, head: MTPDrafts | None = None):
        self._config, self._vocab_size, self._clock, self._head = config, vocab_size, clock, head
        self._drafter = NGramDrafter() if config.draft == "ngram" else config.draft
        self._looks_up = isinstance(self._drafter, Drafter)
        self.is_on = self._looks_up or isinstance(self._drafter, Scorer) or head is not None
        most = config.draft_tokens if self.is_on else 0
        self.depth, self._choice = most, DepthChoice(most, config.step_costs or MeasuredCosts())
        self.acceptance, self.costs = self._choice.acceptance, self._choice.costs
        self._is_measuring = False  # a plain step, so that its price is known
        self._found: dict[Hashable, list[int]] = {}
        self._num_drafts: dict[Hashable, int] = {}
        self._draft_s = 0.0
        self._drafted_before: set[Hashable] = set()  # who had drafts in the step before

    def plan(self, running: Sequence[tuple[Request, Phase]]) -> None:
        """Choose how many drafts pay for those who run now, and look up those that are looked up.

        Before anything is taken for the step: a drafter that raises leaves nothing half done. Changes: the depth.
        """
        self._found, self._num_drafts, self._draft_s = {}, {}, 0.0
        if not self.is_on:
            return
        decoding = [request for request, phase in running if phase is Phase.DECODE]
        adapts, self._is_measuring = self._config.adapt_drafts, False
        rests = adapts and self._choice.begin_step(len(decoding))
        for request in decoding:
            if not rests or has_fixed_depth(request):
                self._num_drafts[request.id] = self._look_up(request)
        if adapts:
            # Beside a row whose depth is fixed there are no plain steps to be had.
            is_free = not (rests or any(map(has_fixed_depth, decoding)))
            self.depth = 0 if rests else self._choice.choose([*self._num_drafts.values()])
            self._is_measuring = bool(self.depth) and is_free and self._choice.wants_plain_step(len(decoding))

    def wanted(self, request: Request) -> int:
        """How many drafts a decoding request wants in this step."""
        depth = self._config.draft_tokens if has_fixed_depth(request) else 0 if self._is_measuring else self.depth
        return min(depth, self._num_drafts.get(request.id, 0))

    def _look_up(self, request: Request) -> int:
        """How many drafts there can be for a request. Changes: those that are looked up are remembered."""
        # A step gives a token more than there are drafts, and none beyond the last one that may come.
        left = len(request.prompt_ids) + request.params.max_tokens - request.num_committed - 1
        most = min(self._config.draft_tokens, left)
        if most <= 0 or (self._head is not None and not self._head.can_draft(request)):
            return 0
        if not self._looks_up:
            return most
        began_s = self._clock.now()
        found = self._found[request.id] = self._checked(self._drafter.propose(tuple(request.tokens), most))[:most]
        self._draft_s += self._clock.now() - began_s
        return len(found)

    def propose(self, slices: Sequence[Slice]) -> list[DraftRow]:
        """The drafts of the slices that have room for some, in their order. Changes: the head's pages."""
        rows = [DraftRow(piece.request, piece.num_drafts) for piece in slices if piece.num_drafts]
        if self._looks_up:
            for row in rows:
                row.ids = self._found[row.request.id][: row.num_wanted]
            return rows
        began_s = self._clock.now()
        for depth in range(max((row.num_wanted for row in rows), default=0)):
            open_rows = [row for row in rows if row.num_wanted > depth]
            self._draw(open_rows, self._score(open_rows))
        self._draft_s += self._clock.now() - began_s
        return rows

    def follow(self, slices: Sequence[Slice], chosen: Chosen, hidden: Float[Tensor, "tokens hidden"] | None) -> None:
        """Let the MTP head see what a step has left for good, before it is committed. Changes: the head's pages.

        While it rests it sees prompts alone, so that who comes after them can be drafted for. A request of which it has
        missed something cannot.
        """
        if self._head is not None:
            began_s = self._clock.now()
            self._head.follow(slices, chosen, hidden, self._is_followed)
            self._draft_s += self._clock.now() - began_s

    def _is_followed(self, piece: Slice) -> bool:
        """Whether the MTP head is to see what a slice has computed."""
        is_prompt, rests = piece.phase is Phase.PREFILL, self._choice.is_resting
        return is_prompt or not rests or has_fixed_depth(piece.request)

    def learn(self, slices: Sequence[Slice], chosen: Chosen, step_s: float) -> None:
        """Take in what became of a step's drafts, and what it took. Changes: acceptance, prices.

        Arguments:
            step_s: seconds of the model and of choosing, without drafting.
        """
        if not self.is_on:
            return
        decoding = [piece for piece in slices if piece.phase is Phase.DECODE]
        counted = [piece for piece in decoding if piece.request.id in chosen.tokens]
        self.acceptance.observe((p.num_drafts, chosen.accepted.get(p.request.id, 0)) for p in counted)
        if isinstance(self.costs, MeasuredCosts) and len(decoding) == len(slices):
            self.costs.observe_step(sum(piece.num_tokens for piece in slices), step_s)
            deepest = max(piece.num_drafts for piece in slices)
            drafted = {piece.request.id for piece in slices if piece.num_drafts}
            if drafted and drafted <= self._drafted_before:  # a drafter's first look at a text is none of its prices
                self.costs.observe_drafts(len(drafted), self._draft_s / deepest)
            self._drafted_before = drafted

    def draft_cost_s(self, slices: Sequence[Slice]) -> float:
        """What a step's drafts cost by a table of prices; 0 where prices are measured."""
        if isinstance(self.costs, MeasuredCosts):
            return 0.0
        deepest = max(piece.num_drafts for piece in slices)
        counts = (sum(piece.num_drafts > depth for piece in slices) for depth in range(deepest))
        return sum(map(self.costs.draft_s, counts))

    def _score(self, rows: Sequence[DraftRow]) -> Float[Tensor, "rows vocab"]:
        """Scores of the token behind each row's drafts. Errors: InvalidValue for a drafter of another vocabulary."""
        if self._head is not None:
            # A head that overflows guesses anything: what it says decides speed alone.
            return torch.nan_to_num(self._head.logits(rows), nan=0.0, posinf=0.0, neginf=0.0)
        logits = self._drafter.logits([[*row.request.tokens, *row.ids] for row in rows])
        shape = logits.shape if isinstance(logits, torch.Tensor) else None
        if shape != (len(rows), self._vocab_size):
            limit = f"{(len(rows), self._vocab_size)}, a score for each row and token"
            raise InvalidValue("logits.shape of the drafter", shape and tuple(shape), limit, "EngineConfig.draft")
        if not usable_rows(logits).all():
            limit = "numbers, with a likeliest one in each row"
            raise InvalidValue("logits of the drafter", "NaN, +inf or all masked", limit, "EngineConfig.draft")
        return logits

    def _draw(self, rows: Sequence[DraftRow], logits: Float[Tensor, "rows vocab"]) -> None:
        """Add a draft to each row: the likeliest, or one drawn as a plain step would draw it. Changes: the rows."""
        requests = [row.request for row in rows]
        logits = penalized(logits, requests, [row.ids for row in rows])
        sampled = [at for at, request in enumerate(requests) if not request.params.is_greedy]
        drafts = logits.argmax(-1).tolist() if len(sampled) < len(rows) else [0] * len(rows)
        if sampled:
            q = filter_probs(
                logits if len(sampled) == len(rows) else logits[sampled], [requests[at].params for at in sampled]
            )
            u = [uniform(rows[at].request.seed, rows[at].position, Stream.DRAFT) for at in sampled]
            drawn = choose(q, torch.tensor(u, dtype=torch.float64)).tolist()
            for at, token, of_q in zip(sampled, drawn, q, strict=True):
                drafts[at] = token
                rows[at].q.append(of_q)
        for row, token in zip(rows, drafts, strict=True):
            row.ids.append(token)

    def _checked(self, ids: Sequence[int]) -> list[int]:
        """Drafts that somebody's object has proposed. Errors: InvalidValue for one that is no token."""
        try:
            return list(as_ids("propose(...)", ids, self._vocab_size))
        except InvalidValue as error:
            raise InvalidValue(error.field, error.value, error.limit, "EngineConfig.draft") from None


def has_fixed_depth(request: Request) -> bool:
    """Whether a request asks for all drafts in each step, so that no prices or neighbours' rates change its draws."""
    return request.params.seed is not None and not request.params.is_greedy
