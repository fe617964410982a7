"""Who guesses: what the engine asks of a drafter, and the cheapest one there is, which looks tokens up.

Text repeats itself: names in code, quotations in an answer about a document. If the last few tokens have occurred
before, what followed them then is a guess at what follows now. It costs no model and needs no training.
Saxena, Prompt Lookup Decoding (2023), https://github.com/apoorvumang/prompt-lookup-decoding

    "def area(w, h): ... print(area"    its last four tokens, here letters, have occurred before
         ^^^^                 ^^^^      so "(w, h" are the drafts, if five are wanted
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float
from torch import Tensor

from minserve.errors import InvalidValue


@runtime_checkable
class Drafter(Protocol):
    """What guesses from a request's tokens alone.

    Its answer is a function of what it is asked: it remembers no request, so that none needs to be forgotten after an
    abort, and a preempted request gets the same drafts again. Its drafts are not drawn at random: they are verified
    with q = None.
    """

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        """Guess what comes next.

        Arguments:
            tokens: the request's, prompt and output; not changed.
            most: how many drafts are wanted at most, >= 0.
        Returns up to `most` token ids; none where the drafter has no idea, which costs the step nothing.
        """
        ...


@runtime_checkable
class Scorer(Protocol):
    """What knows how likely each token is to come next: a model. The engine draws its drafts itself.

    So it knows what they were drawn from, after the request's own temperature and filters. Its answer, too, is a
    function of what it is asked; what it remembers is for speed alone.
    """

    def logits(self, contexts: Sequence[Sequence[int]]) -> Float[Tensor, "rows vocab"]:
        """Score the tokens that may follow.

        Arguments:
            contexts: of each row, the request's tokens and the drafts so far, at least one; not changed.
        Returns a score for each token of the vocabulary of the model that verifies, in that model's order, best on its
        device.
        """
        ...


@dataclass(frozen=True)
class NGramDrafter:
    """Drafts what followed the last tokens when they occurred before.

    Of all earlier occurrences, those that agree over the most tokens count, and of these the latest: what was said last
    is likeliest to be said again. No occurrence is the end itself, and drafts stop where the tokens do.

    It keeps no index; it compares arrays, anew in each call: at most `window` tokens, at most `longest` times. So the
    cost of a call does not grow with the request beyond that.

    Fields:
        longest: agreement over more tokens than so many does not count for more; >= 1.
        shortest: agreement over fewer tokens is taken for chance; 1 to longest.
        window: how many of the latest tokens are looked at; > longest.
    Errors: InvalidValue for a field out of range.

    >>> NGramDrafter().propose([1, 2, 3, 4, 9, 2, 3], most=2)
    [4, 9]
    >>> NGramDrafter().propose([1, 2, 3], most=2)
    []
    """

    longest: int = 4
    shortest: int = 2
    window: int = 8192

    def __post_init__(self):
        if self.longest < 1:
            raise InvalidValue("longest", self.longest, "at least 1")
        if not 1 <= self.shortest <= self.longest:
            raise InvalidValue("shortest", self.shortest, f"from 1 to longest, {self.longest}")
        if self.window <= self.longest:
            raise InvalidValue("window", self.window, f"above longest, {self.longest}")

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        """Look the last tokens up; see `Drafter.propose`."""
        if most <= 0:
            return []
        recent = np.asarray(tokens[-self.window :], dtype=np.int64)
        ends, best = np.arange(len(recent) - 1), None  # where an occurrence may end: before the last token
        for length in range(1, self.longest + 1):
            ends = ends[ends >= length - 1]  # an occurrence does not begin before the first token
            ends = ends[recent[ends - (length - 1)] == recent[-length]] if len(ends) else ends
            if not len(ends):
                break
            if length >= self.shortest:
                best = ends[-1]
        return [] if best is None else recent[best + 1 : best + 1 + most].tolist()
