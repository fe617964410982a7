"""How often a drafter's guesses are what a text says, whatever the model that would verify them thinks.

A model's own greedy text repeats itself more than people do, and is easier to guess. Here every place of a given text
is asked for: what would have been drafted, the likeliest tokens, and how far is that what follows?
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Bool
from torch import Tensor

from minserve.draft_counts import DraftCounts, count_drafts
from minserve.errors import InvalidValue
from minserve.model.evaluate import draft_probs
from minserve.model.hybrid_lm import HybridLM
from minserve.speculation.drafters import Drafter, Scorer

FIRST = 2  # tokens before the first place: an MTP head's first guess follows its first entry, that of token 1


def acceptance_on_text(
    drafter: Drafter | Scorer | HybridLM, texts: Iterable[Sequence[int]], depth: int
) -> DraftCounts:  # fmt: skip
    """Draft at every place of some texts, and count the drafts that they go on with.

    Arguments:
        drafter: proposes, or scores; or a model, whose MTP head is asked. Nothing is drawn: whoever scores drafts the
            likeliest token.
        texts: the token ids of each.
        depth: drafts at each place, at least 1.
    Returns one row for each place that has `FIRST` tokens before it and `depth` behind it. As a step would give it, it
    gets the drafts that are right, and one token more.
    Errors: InvalidValue for a depth below 1, or a text without such a place.
    """
    if depth < 1:
        raise InvalidValue("depth", depth, "at least 1")
    rows: Counter[tuple[int, int]] = Counter()
    for tokens in texts:
        if len(tokens) < FIRST + depth:
            raise InvalidValue("len(tokens)", len(tokens), f"at least {FIRST + depth}, for drafts of depth {depth}")
        if isinstance(drafter, HybridLM):
            rows.update((depth, _num_right(hits)) for hits in _head_hits(drafter, list(tokens), depth).tolist())
        else:
            rows.update(_drafted(drafter, tokens, at, depth) for at in range(FIRST, len(tokens) - depth + 1))
    return count_drafts(rows, sum((kept + 1) * num for (_, kept), num in rows.items()))


def _drafted(drafter: Drafter | Scorer, tokens: Sequence[int], at: int, depth: int) -> tuple[int, int]:
    """Drafts at one place, and how many of these are right, up to the first that is not."""
    follows = list(tokens[at : at + depth])
    if isinstance(drafter, Drafter):
        drafts = list(drafter.propose(tuple(tokens[:at]), depth))
        return len(drafts), _num_right([ours == theirs for ours, theirs in zip(drafts, follows, strict=False)])
    for kept, token in enumerate(follows):  # the context of a draft after the first wrong one need not be asked for
        if drafter.logits([list(tokens[: at + kept])])[0].argmax().item() != token:
            return depth, kept
    return depth, depth


def _head_hits(model: HybridLM, tokens: list[int], depth: int) -> Bool[Tensor, "places depth"]:
    """Whether each of the MTP head's likeliest tokens is right, all places of the text at once."""
    _, probs = draft_probs(model, tokens, depth, temperature=1.0)
    follows = torch.tensor(tokens[FIRST:]).unfold(0, depth, 1)
    return torch.stack([q.argmax(-1) for q in probs], dim=1) == follows


def _num_right(hits: Sequence[bool]) -> int:
    """How many are right before the first that is not."""
    return next((place for place, hit in enumerate(hits) if not hit), len(hits))
