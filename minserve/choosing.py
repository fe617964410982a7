"""The engine's fourth stage: the logits of a step, handed to the requests that they belong to, and tokens out of them.

Only a slice that ends on its request's last known token gets one. A row whose logits are no numbers is its own
request's error and nobody else's.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from minserve.batching.batcher import Slice
from minserve.hybrid.packing import scores_prompt, wants_token
from minserve.request import Request
from minserve.sampling import Sampled, sample, score_prompt, usable_rows


@dataclass
class Chosen:
    """What a step gives to whom: the next token of a request and of each of its riders, or what went wrong."""

    tokens: dict[Hashable, list[Sampled]] = field(default_factory=dict)
    errors: dict[Hashable, str] = field(default_factory=dict)


def choose_tokens(
    slices: Sequence[Slice], logits: Float[Tensor, "chosen vocab"] | None, riders: Callable[[Request], list[Request]]
) -> Chosen:
    """Choose the next tokens of a step.

    Arguments:
        slices: the step's, in its order.
        logits: as the step asked for them (see `pack`); None without a model: every token is then 0.
        riders: the requests that fork from one when its prompt is computed; each draws a token of its own.
    Changes: the prompt_logprobs of requests that are scored.
    """
    chosen, at, rows, families = Chosen(), 0, [], []
    for piece in slices:
        request, scored, wanted = piece.request, scores_prompt(piece), wants_token(piece)
        num_rows = piece.stop - piece.start if scored else int(wanted)
        at += num_rows
        if logits is None:
            chosen.tokens[request.id] = [Sampled(0)] * (1 + len(riders(request))) if wanted else []
            continue
        if scored and not _score(request, logits[at - num_rows : at], piece.start, chosen):
            continue
        if wanted:
            rows.append(at - 1)
            families.append([request, *riders(request)])
    if rows:
        _sample(logits[torch.tensor(rows, device=logits.device)], families, chosen)
    return chosen


def _score(request: Request, logits: Tensor, start: int, chosen: Chosen) -> bool:
    """Score a slice of a prompt, if its logits are numbers. Changes: the request, or `chosen.errors`."""
    if not usable_rows(logits).all():
        chosen.errors[request.id] = "logits are NaN, +inf or all masked; a prompt cannot be scored by them"
        return False
    score_prompt(request, logits, start)
    return True


def _sample(logits: Tensor, families: list[list[Request]], chosen: Chosen) -> None:
    """Draw a token for every member of the families, one row of logits each. Changes: `chosen`."""
    usable = usable_rows(logits).tolist()
    for family, is_usable in zip(families, usable, strict=True):
        if not is_usable:
            chosen.errors[family[0].id] = "logits are NaN, +inf or all masked; no token can be chosen from them"
    good = [(row, family) for row, family in enumerate(families) if usable[row]]
    requests = [request for _, family in good for request in family]
    rows = [row for row, family in good for _ in family]
    if rows != list(range(len(families))):
        logits = logits[rows]
    sampled = iter(sample(logits, requests))
    for _, family in good:
        chosen.tokens[family[0].id] = [next(sampled) for _ in family]
