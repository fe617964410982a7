"""The engine's fourth stage: the logits of a step, handed to the requests that they belong to, and tokens out of them.

Only a slice that ends on its request's last known token gets some: one, or behind verified drafts up to one more than
there are drafts. A row whose logits are no numbers is its own request's error and nobody else's.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from jaxtyping import Float
from torch import Tensor

from minserve.batching.batcher import Slice
from minserve.draft_rows import DraftRow
from minserve.hybrid.packing import scores_prompt, wants_token
from minserve.request import Request
from minserve.sampling import (
    Sampled,
    Stream,
    filter_probs,
    penalized,
    sample,
    score_prompt,
    token_logprobs,
    uniform,
    usable_rows,
)
from minserve.speculation.verify import verify as reference_verify

UNUSABLE = "logits are NaN, +inf or all masked; "
NO_TOKEN = UNUSABLE + "no token can be chosen from them"


@dataclass
class Chosen:
    """What a step gives to whom.

    Fields: `tokens` the next ones of a request, and of each of its riders; `accepted` how many drafts were kept, of
    requests that had some; `errors` what went wrong.
    """

    tokens: dict[Hashable, list[Sampled]] = field(default_factory=dict)
    accepted: dict[Hashable, int] = field(default_factory=dict)
    errors: dict[Hashable, str] = field(default_factory=dict)


def choose_tokens(
    slices: Sequence[Slice],
    logits: Float[Tensor, "chosen vocab"] | None,
    riders: Callable[[Request], list[Request]],
    drafts: Sequence[DraftRow] = (),
    verify: Callable = reference_verify,
) -> Chosen:
    """Choose the next tokens of a step.

    Arguments:
        slices: the step's, in its order.
        logits: as the step asked for them (see `pack`); None without a model: every token is then 0.
        riders: the requests that fork from one when its prompt is computed; each draws a token of its own.
        drafts: of the slices that have some, in their order.
        verify: keeps drafts; see `minserve.speculation.verify`.
    Changes: the prompt_logprobs of requests that are scored.
    """
    chosen, at, rows, families, verified = Chosen(), 0, [], [], []
    waiting = iter(drafts)
    for piece in slices:
        request, scored, wanted = piece.request, scores_prompt(piece), wants_token(piece)
        begin, at = at, at + (piece.num_tokens if scored else (1 + piece.num_drafts) * wanted)
        drafted = next(waiting) if piece.num_drafts else None
        if logits is None:
            _choose_zeros([request, *(riders(request) if wanted else ())] if wanted else [], drafted, chosen)
        elif scored and not _score(request, logits[begin:at], piece.start, chosen):
            continue
        elif drafted:
            verified.append((begin, drafted))
        elif wanted:
            rows.append(at - 1)
            families.append([request, *riders(request)])
    if rows:
        _sample(logits[torch.tensor(rows, device=logits.device)], families, chosen)
    if verified:
        _verify(logits, verified, verify, chosen)
    return chosen


def _choose_zeros(family: list[Request], drafted: DraftRow | None, chosen: Chosen) -> None:
    """Give everybody a 0, and keep the drafts that are 0. Changes: `chosen`."""
    for member in family:
        chosen.tokens[member.id] = [Sampled(0)]
    if drafted:
        kept = next((at for at, token in enumerate(drafted.ids) if token), len(drafted.ids))
        chosen.accepted[drafted.request.id] = kept
        chosen.tokens[drafted.request.id] = [Sampled(0)] * (kept + 1)


def _score(request: Request, logits: Tensor, start: int, chosen: Chosen) -> bool:
    """Score a slice of a prompt, if its logits are numbers. Changes: the request, or `chosen.errors`."""
    if not usable_rows(logits).all():
        chosen.errors[request.id] = UNUSABLE + "a prompt cannot be scored by them"
        return False
    score_prompt(request, logits, start)
    return True


def _sample(logits: Tensor, families: list[list[Request]], chosen: Chosen) -> None:
    """Draw a token for every member of the families, one row of logits each. Changes: `chosen`."""
    usable = usable_rows(logits).tolist()
    for family, is_usable in zip(families, usable, strict=True):
        if not is_usable:
            chosen.errors[family[0].id] = NO_TOKEN
    good = [(row, family) for row, family in enumerate(families) if usable[row]]
    requests = [request for _, family in good for request in family]
    rows = [row for row, family in good for _ in family]
    if rows != list(range(len(families))):
        logits = logits[rows]
    for request, sampled in zip(requests, sample(logits, requests), strict=True):
        chosen.tokens[request.id] = [sampled]


def _verify(logits: Tensor, verified: list[tuple[int, DraftRow]], verify: Callable, chosen: Chosen) -> None:
    """Keep the drafts of rows whose logits begin where said, and choose what follows them. Changes: `chosen`."""
    counts = [1 + len(row.ids) for _, row in verified]
    at = [begin + i for (begin, _), count in zip(verified, counts, strict=True) for i in range(count)]
    if at != list(range(len(logits))):
        logits = logits[torch.tensor(at, device=logits.device)]
    rows = [_Verified(row, ours) for (_, row), ours in zip(verified, logits.split(counts), strict=True)]
    for row in rows:
        if not row.num_usable:
            chosen.errors[row.request.id] = NO_TOKEN
    rows = [row for row in rows if row.num_usable]
    if not rows:
        return
    requests = [row.request for row in rows for _ in range(row.num_usable)]
    guesses = [row.ids[:i] for row in rows for i in range(row.num_usable)]
    logits = penalized(torch.cat([row.logits for row in rows]), requests, guesses)
    if verify is reference_verify and all(row.request.params.is_greedy for row in rows):
        outcomes = _keep_likeliest(rows, logits.argmax(-1).tolist())
    else:
        outcomes = _keep(rows, filter_probs(logits, [request.params for request in requests]), verify)
    for row, (kept, next_id) in zip(rows, outcomes, strict=True):
        chosen.accepted[row.request.id] = kept
        chosen.tokens[row.request.id] = [
            Sampled(token, row.logprobs(i, token)) for i, token in enumerate([*row.ids[:kept], next_id])
        ]


def _keep(rows: list[_Verified], p: Float[Tensor, "positions vocab"], verify: Callable) -> list[tuple[int, int]]:
    """How many drafts each row keeps, and the token that follows."""
    drawn = any(row.drafted.q for row in rows)
    num_accepted, next_ids = verify(
        p,
        p.new_tensor([token for row in rows for token in row.ids], dtype=torch.long),
        torch.cat([row.q(p) for row in rows]) if drawn else None,
        p.new_tensor([0, *accumulate(row.num_usable for row in rows)], dtype=torch.long),
        p.new_tensor([u for row in rows for u in row.accept_u()], dtype=torch.float64),
        p.new_tensor([row.sample_u() for row in rows], dtype=torch.float64),
    )
    return list(zip(num_accepted.tolist(), next_ids.tolist(), strict=True))


def _keep_likeliest(rows: list[_Verified], likeliest: list[int]) -> list[tuple[int, int]]:
    """What `_keep` gives for greedy rows, whose p is all on the likeliest token of each position."""
    outcomes, begin = [], 0
    for row in rows:
        wanted = likeliest[begin : begin + row.num_usable]
        begin += row.num_usable
        kept = next((i for i, draft in enumerate(row.ids) if draft != wanted[i]), len(row.ids))
        outcomes.append((kept, wanted[kept]))
    return outcomes


class _Verified:
    """A row with drafts, up to the first position whose logits are no numbers: a draft behind it is not looked at.

    If it is ever reached, a plain step will find it.
    """

    def __init__(self, drafted: DraftRow, logits: Float[Tensor, "positions vocab"]):
        usable = usable_rows(logits).tolist()
        self.drafted, self.request = drafted, drafted.request
        self.num_usable = next((i for i, fine in enumerate(usable) if not fine), len(usable))
        self.logits, self.ids = logits[: self.num_usable], drafted.ids[: max(0, self.num_usable - 1)]

    def q(self, p: Tensor) -> Float[Tensor, "drafts vocab"]:
        """What each draft was drawn from; one-hot where it was not drawn."""
        if self.drafted.q:
            return torch.stack(self.drafted.q[: len(self.ids)]).to(p.device) if self.ids else p[:0]
        ids = torch.tensor(self.ids, dtype=torch.long, device=p.device)
        return torch.nn.functional.one_hot(ids, p.shape[1]).to(p.dtype)

    def accept_u(self) -> list[float]:
        """A random number for each draft, by its position; a greedy row needs none."""
        request = self.request
        if request.params.is_greedy:
            return [0.0] * len(self.ids)
        return [uniform(request.seed, request.num_committed + i, Stream.ACCEPT) for i in range(len(self.ids))]

    def sample_u(self) -> float:
        """The random number for the token that follows, by the step's first new position."""
        request = self.request
        if request.params.is_greedy:
            return 0.0
        return uniform(request.seed, request.num_committed, Stream.RESAMPLE if self.ids else Stream.SAMPLE)

    def logprobs(self, position: int, token_id: int) -> dict[int, float] | None:
        """What the request asked to know about a token."""
        num = self.request.params.logprobs
        return None if num is None else token_logprobs(self.logits[position], token_id, num)
