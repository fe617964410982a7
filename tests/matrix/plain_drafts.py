"""What a draft head has to guess, and what has to come of drafts, from one plain forward of a request by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from alone import TOLERANCE, Answer
from torch import Tensor
from torch.nn.functional import one_hot

from minserve.draft_rows import DraftRow
from minserve.engine import Engine
from minserve.model.hybrid_lm import HybridLM, ModelOutput
from minserve.model.naive import NaiveMemory
from minserve.model.step import Step
from minserve.request import Request
from minserve.sampling import Stream, choose, filter_probs, token_logprobs, uniform

Drafts = Mapping[tuple[str, int], DraftRow]


def note_drafts(engine: Engine) -> Drafts:
    """What the engine's steps verify, by request and number of known tokens, from now on. Changes: the engine."""
    noted, propose = {}, engine.drafting.propose

    def propose_and_note(slices: Sequence) -> list[DraftRow]:
        rows = propose(slices)
        noted.update({(row.request.id, row.request.num_committed): row for row in rows})
        return rows

    engine.drafting.propose = propose_and_note
    return noted


@torch.inference_mode()
def forward(model: HybridLM, ids: Sequence[int]) -> tuple[ModelOutput, NaiveMemory]:
    """A sequence in one forward, logits behind each of its tokens."""
    memory = NaiveMemory(model.config, len(ids) + 8, torch.float64)
    return model(Step.one_row(list(ids), 0, every_logit=True), memory), memory


@torch.inference_mode()
def drawn_answer(model: HybridLM, request: Request, found: Answer, drafts: Drafts) -> Answer:
    """What a request draws where these drafts were verified, up to the step in which it was found to draw otherwise.

    A draft x is kept where u q(x) < p(x), and the token behind the first that is not comes from (p - q)+.
    """
    ids = [*request.prompt_ids, *found.token_ids]
    logits, answer = forward(model, ids)[0].logits, Answer(finish_reason="length")
    while len(answer.token_ids) < len(found.token_ids):
        first = len(request.prompt_ids) + len(answer.token_ids)
        row = drafts.get((request.id, first))
        p = filter_probs(logits[first - 1 :], request.params)
        tokens = _step_tokens(p, request, first, row) if row else [_draw(p[0], request, first, Stream.SAMPLE)]
        for at, token in enumerate(tokens, start=first - 1):
            answer.token_ids.append(token)
            answer.logprobs.append(token_logprobs(logits[at], token, request.params.logprobs))
        if tokens != ids[first : first + len(tokens)]:
            break
    return answer


def _step_tokens(p: Tensor, request: Request, first: int, row: DraftRow) -> list[int]:
    """The tokens that a step gives whose first new token stands at `first`, where p begins."""
    tokens = []
    for at, (draft, of_p) in enumerate(zip(row.ids, p, strict=False)):
        q = row.q[at] if row.q else one_hot(torch.tensor(draft), len(of_p)).to(of_p.dtype)
        if not uniform(request.seed, first + at, Stream.ACCEPT) * q[draft] < of_p[draft]:
            return [*tokens, _draw((of_p - q).clamp(min=0), request, first, Stream.RESAMPLE)]
        tokens.append(draft)
    return [*tokens, *(_draw(of_p, request, first, Stream.RESAMPLE) for of_p in p[len(tokens) :][:1])]


def _draw(p: Tensor, request: Request, position: int, stream: Stream) -> int:
    """The token on which the request's random number falls."""
    return int(choose(p, uniform(request.seed, position, stream)))


@torch.inference_mode()
def wrong_drafts(model: HybridLM, tokens: Sequence[int], rows: Mapping[int, DraftRow]) -> str:
    """What is wrong with the drafts of a model's own head, in words; nothing where it makes them in a plain run, too.

    Faults E12, E17, E18: they would be kept less often, and nothing else would show it.

    Arguments:
        tokens: the request's, prompt and output.
        rows: its drafts, by the number of tokens known then.
    """
    output, memory = forward(model, tokens)
    committed, _ = model.draft_hidden(Step.one_row(list(tokens[1:]), 1), output.hidden[:-1], memory)
    layer = model.config.num_hidden_layers
    for num_tokens, row in sorted(rows.items(), reverse=True):  # guesses are written over entries looked at before
        memory.lengths[layer] = num_tokens - 1
        hidden, behind = committed[num_tokens - 2][None], f"behind {num_tokens} tokens"
        for depth, draft in enumerate(row.ids):
            if depth:
                step = Step.one_row([row.ids[depth - 1]], num_tokens + depth - 1)
                hidden, _ = model.draft_hidden(step, hidden, memory)
            q = filter_probs(model.logits(hidden)[0], row.request.params)
            if row.request.params.is_greedy and not q[draft]:
                return f"draft {depth} {behind} is {draft}, in a plain run {int(q.argmax())}"
            if row.q and not _distance(row.q[depth], q) <= TOLERANCE:
                return f"draft {depth} {behind} was drawn from what is {_distance(row.q[depth], q):.1e} off"
        if not _distance(row.hidden, hidden[0]) <= TOLERANCE:
            return f"what the head made of the last draft {behind} is {_distance(row.hidden, hidden[0]):.1e} off"
    return ""


def _distance(found: Tensor, wanted: Tensor) -> float:
    """The largest difference."""
    return float((found - wanted).abs().max())
