"""From logits to a token: the one filter function of every path, and random numbers that know no neighbours.

    logits -> apply_penalties -> filter_probs -> choose(probs, uniform(seed, position, stream)) -> token id

`filter_probs` has one order, for plain steps, drafts and verification alike (the field's: vLLM's and transformers'):

    1. temperature   p = softmax((logits - max) / temperature); below 1e-5: all of p on the likeliest token
    2. top_k         keep the k likeliest tokens
    3. top_p         of what top_k left, renormalised, keep the likeliest tokens up to and including the one whose
                     addition reaches top_p (Holtzman et al. 2020, https://arxiv.org/abs/1904.09751)
    4. min_p         keep tokens at least min_p times as likely as the likeliest (https://arxiv.org/abs/2407.01082)

and renormalises once, at the end. Between equal logits the lower id comes first.

Random numbers are counter-based (Philox, Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): a
function of (seed, position, stream) with no state between calls. So a seeded request draws the same numbers alone, in
any batch, in any row order, and again after preemption; with drafts, if the steps bring it as many of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from minserve.errors import InvalidValue
from minserve.request import Request, SamplingParams


class Stream(IntEnum):
    """What a random number is for; streams of one seed are independent, so that none decides two things."""

    SAMPLE = 0
    DRAFT = 1
    ACCEPT = 2
    RESAMPLE = 3
    SEED = 4


class Sampled(NamedTuple):
    """A chosen token, with {token id: logprob} when the request asked for it."""

    token_id: int
    logprobs: dict[int, float] | None = None


def _random_bits(seed: int, position: int, stream: int) -> int:
    """64 random bits, a function of the three numbers alone."""
    generator = np.random.Philox(
        key=np.array([seed, 0], dtype=np.uint64), counter=np.array([0, position, stream, 0], dtype=np.uint64)
    )
    return int(generator.random_raw())


def uniform(seed: int, position: int, stream: int = Stream.SAMPLE) -> float:
    """The random number in [0, 1) that belongs to one token of one request.

    Arguments:
        seed: the request's, 0 to 2**64 - 1.
        position: index, among prompt and output, of the token that is drawn; >= 0.
        stream: what it is for, a `Stream`.

    >>> uniform(7, 100) == uniform(7, 100), uniform(7, 100) == uniform(7, 101)
    (True, False)
    """
    return (_random_bits(seed, position, stream) >> 11) * 2.0**-53


def request_seed(engine_seed: int, request_number: int) -> int:
    """The seed, 0 to 2**64 - 1, of the request admitted as number `request_number` when it brings none.

    So that runs of one engine with one seed and the same requests repeat, without two requests drawing alike.
    """
    return _random_bits(engine_seed, request_number, Stream.SEED)


def _wide(logits: Tensor) -> Tensor:
    """At least float32; float64 stays."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def apply_penalties(
    logits: Float[Tensor, " vocab"], prompt_ids: Sequence[int], output_ids: Sequence[int], params: SamplingParams
) -> Float[Tensor, " vocab"]:
    """The logits after the request's penalties and biases; the first stage for greedy and sampled tokens alike.

    For tokens in the prompt or the output, repetition_penalty divides positive logits and multiplies negative ones.
    Then each token in the output loses presence_penalty once and frequency_penalty per occurrence. logit_bias is
    added last, so that it means what it says.

    Arguments:
        logits: of one row, as the model gave them; not changed.
        prompt_ids, output_ids: what the request's tokens are so far; in verification, drafts before this row count
            as output.
        params: the request's.
    Results: logits in float32, or float64 if they came so.

    >>> apply_penalties(torch.tensor([2.0, -2.0, 2.0]), [0], [1, 1], SamplingParams(repetition_penalty=2.0)).tolist()
    [1.0, -4.0, 2.0]
    """
    logits = _wide(logits).clone()
    if params.repetition_penalty != 1:
        seen = torch.tensor(sorted({*prompt_ids, *output_ids}), dtype=torch.long, device=logits.device)
        old = logits[seen]
        changed = torch.where(old > 0, old / params.repetition_penalty, old * params.repetition_penalty)
        logits[seen] = torch.where(old.isfinite(), changed.clamp(max=torch.finfo(old.dtype).max), old)
    if output_ids and (params.presence_penalty or params.frequency_penalty):
        output = torch.tensor(list(output_ids), dtype=torch.long, device=logits.device)
        counts = torch.bincount(output, minlength=logits.shape[0]).to(logits.dtype)
        logits -= params.frequency_penalty * counts + params.presence_penalty * counts.clamp(max=1)
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), dtype=torch.long, device=logits.device)
        logits[ids] += torch.tensor(list(params.logit_bias.values()), dtype=logits.dtype, device=logits.device)
    return logits


def usable_rows(logits: Float[Tensor, "*rows vocab"]) -> Bool[Tensor, "*rows"]:
    """Which rows a token can be chosen from: no NaN, no +inf, not all -inf. An engine ends the others' requests."""
    return logits.amax(dim=-1).isfinite()


def filter_probs(
    logits: Float[Tensor, "*rows vocab"], params: SamplingParams | Sequence[SamplingParams]
) -> Float[Tensor, "*rows vocab"]:
    """The distribution that each token is drawn from, in the one order that the module states.

    A row's result does not depend on the other rows, to the last bit.

    Arguments:
        logits: of one row or of several, after `apply_penalties`; -inf marks a token that must not come.
        params: one for all rows, or one per row.
    Results: probabilities in float32, or float64 if the logits came so; each row sums to 1.
    Errors: InvalidValue naming the first row without a usable logit (NaN, +inf, or everything masked).

    >>> filter_probs(torch.tensor([2.0, 1.0, 0.0]), SamplingParams(temperature=1, top_k=2)).round(decimals=3)
    tensor([0.7310, 0.2690, 0.0000])
    """
    rows = _wide(logits).reshape(-1, logits.shape[-1])
    params = [params] * len(rows) if isinstance(params, SamplingParams) else list(params)
    if len(params) != len(rows):
        raise InvalidValue("params", f"{len(params)} entries", f"one per row of logits, {len(rows)}")
    usable = usable_rows(rows)
    if not usable.all():
        row = int(usable.int().argmin())
        raise InvalidValue(f"logits[{row}]", "NaN, +inf or all masked", "a row with a likeliest token")

    top = rows.amax(dim=-1, keepdim=True)
    highest_temperature = torch.finfo(rows.dtype).max  # a larger one would become inf, and -inf / inf is NaN
    temperatures = [1.0 if p.is_greedy else min(p.temperature, highest_temperature) for p in params]
    probs = torch.softmax((rows - top) / rows.new_tensor(temperatures)[:, None], dim=-1)
    # Only rows that filter are normalised again: so a row does not depend on whether others do.
    filtering = [i for i, p in enumerate(params) if not p.is_greedy and (p.top_k or p.top_p < 1 or p.min_p)]
    if filtering:
        of_these, chosen = probs[filtering], [params[i] for i in filtering]
        of_these = torch.where(_kept(rows[filtering], of_these, chosen), of_these, 0.0)
        probs[filtering] = of_these / of_these.sum(dim=-1, keepdim=True)
    greedy = [i for i, p in enumerate(params) if p.is_greedy]
    if greedy:
        best = rows[greedy].argmax(dim=-1)  # of equal ones the first
        probs[greedy] = torch.nn.functional.one_hot(best, rows.shape[-1]).to(probs.dtype)
    return probs.reshape(logits.shape)


def _kept(
    rows: Float[Tensor, "rows vocab"], probs: Float[Tensor, "rows vocab"], params: Sequence[SamplingParams]
) -> Bool[Tensor, "rows vocab"]:
    """Which tokens top_k, top_p and min_p leave; the likeliest is always among them."""
    vocab_size = rows.shape[-1]
    min_p = probs.new_tensor([p.min_p for p in params])[:, None]
    keep = probs >= min_p * probs.amax(dim=-1, keepdim=True)
    ranked = [i for i, p in enumerate(params) if 0 < p.top_k < vocab_size or p.top_p < 1]
    if not ranked:
        return keep
    # Sorted by logit: two logits may round to one probability, and their order must survive that.
    order = rows[ranked].sort(dim=-1, descending=True, stable=True).indices
    mass = probs[ranked].gather(-1, order).to(torch.float64)
    rank = torch.arange(vocab_size, device=rows.device)
    top_k = torch.tensor([min(params[i].top_k or vocab_size, vocab_size) for i in ranked], device=rows.device)[:, None]
    top_p = mass.new_tensor([params[i].top_p for i in ranked])[:, None]
    mass = mass * (rank < top_k)
    before = mass.cumsum(dim=-1) - mass  # mass of the tokens ahead; the crossing token still has less than top_p ahead
    # Rounding must neither drop a rare token when top_p is off, nor the first one when top_p is next to nothing.
    within = (before < top_p * mass.sum(dim=-1, keepdim=True)) | (top_p == 1) | (rank == 0)
    chosen = within & (rank < top_k)
    keep[ranked] &= torch.zeros_like(chosen).scatter(-1, order, chosen)
    return keep


def choose(probs: Float[Tensor, "*rows vocab"], u: float | Tensor) -> Int[Tensor, "*rows"]:
    """The token that u falls on: the first id whose cumulative probability exceeds u.

    Never one of probability zero, whatever rounding does to the sums.

    Arguments:
        probs: of one row or of several, each with a positive sum; need not be exactly normalised.
        u: a number in [0, 1), or one per row.

    >>> choose(torch.tensor([0.0, 0.25, 0.75, 0.0]), 0.25)
    tensor(2)
    """
    wide = probs.to(torch.float64)
    cumulative = wide.cumsum(dim=-1)
    target = torch.as_tensor(u, dtype=torch.float64, device=probs.device)[..., None] * cumulative[..., -1:]
    possible = wide > 0
    last = probs.shape[-1] - 1 - possible.flip(-1).int().argmax(dim=-1)
    hit = (cumulative > target) & possible
    return torch.where(hit.any(dim=-1), hit.int().argmax(dim=-1), last)


def token_logprobs(logits: Float[Tensor, " vocab"], token_id: int, num: int) -> dict[int, float]:
    """The log-probabilities of the `num` likeliest tokens and of the chosen one, likeliest first.

    Of the model's own distribution: before penalties, temperature and filters, so that they do not change with
    sampling settings.

    Arguments:
        logits: of one row, as the model gave them.
        token_id: the chosen token, always in the result.
        num: how many of the likeliest, 0 to the vocabulary's size; of equal ones the lower id.
    Results: {token id: logprob}, natural logarithm, <= 0; num + 1 entries when the chosen one is not among num.

    >>> {i: round(p, 2) for i, p in token_logprobs(torch.tensor([2.0, 0.0, 1.0]), token_id=1, num=1).items()}
    {0: -0.41, 1: -2.41}
    """
    logprobs = torch.log_softmax(_wide(logits), dim=-1)
    ids = []
    if num:
        least = logprobs.topk(min(num, len(logprobs))).values[-1]
        candidates = (logprobs >= least).nonzero().flatten()  # in id order, which the stable sort keeps among equals
        ids = candidates[logprobs[candidates].sort(descending=True, stable=True).indices[:num]].tolist()
    if token_id not in ids:
        ids.append(token_id)
    return {i: float(logprobs[i]) for i in ids}


def penalized(
    logits: Float[Tensor, "rows vocab"], requests: Sequence[Request], guesses: Sequence[Sequence[int]] | None = None
) -> Float[Tensor, "rows vocab"]:
    """The logits of rows after the penalties and biases of their requests: see `apply_penalties`.

    Arguments:
        logits: one row per request, as the model gave them.
        requests: whose row each is; a request may have several.
        guesses: drafts before each row, which count as output there; none unless given.
    """
    if not any(request.params.changes_logits for request in requests):
        return _wide(logits)
    guesses = guesses or [()] * len(requests)
    return torch.stack(
        [
            apply_penalties(row, r.prompt_ids, [*r.output_ids, *ahead], r.params)
            for row, r, ahead in zip(logits, requests, guesses, strict=True)
        ]
    )


def sample(logits: Float[Tensor, "rows vocab"], requests: Sequence[Request]) -> list[Sampled]:
    """The next token of each request, greedy and sampled ones side by side.

    Arguments:
        logits: one row per request, as the model gave them.
        requests: where each stands; not changed. A request draws with its own seed and the new token's position.
    Errors: InvalidValue naming the first row without a usable logit; see `usable_rows`.
    """
    if not requests:
        return []
    params = [request.params for request in requests]
    adjusted = penalized(logits, requests)
    best, greedy = adjusted.max(dim=-1)  # of equal ones the first
    if all(p.is_greedy for p in params) and all(map(math.isfinite, best.tolist())):
        chosen = greedy.tolist()  # what filter_probs would put all probability on
    else:
        draws = [0.0 if r.params.is_greedy else uniform(r.seed, r.num_committed, Stream.SAMPLE) for r in requests]
        chosen = choose(filter_probs(adjusted, params), torch.tensor(draws, dtype=torch.float64)).tolist()
    return [
        Sampled(token, None if p.logprobs is None else token_logprobs(row, token, p.logprobs))
        for token, row, p in zip(chosen, logits, params, strict=True)
    ]


def score_prompt(request: Request, logits: Float[Tensor, "tokens vocab"], start: int) -> None:
    """Record how likely each prompt token was, from the logits of a slice that begins at `start`.

    Row i speaks of token start + i + 1. What is recorded already stays: a preempted request runs its prompt again.
    Changes: the request's prompt_logprobs.
    """
    scores = request.prompt_logprobs = request.prompt_logprobs or [None]
    first = max(0, len(scores) - 1 - start)
    for row, token in zip(logits[first:], request.prompt_ids[start + 1 + first :], strict=False):
        scores.append(token_logprobs(row, token, request.params.prompt_logprobs))
