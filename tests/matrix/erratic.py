"""A drafter that is now right, now wrong, and now has no idea: fault E4 wants any pattern of counts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from minserve.model.hybrid_lm import HybridLM


class Erratic:
    """Drafts what it has been told that comes, or else what mostly follows a token, and spoils some of it.

    How many drafts, and which are spoiled, follows from the tokens so far and from nothing else.

    Arguments:
        model: whose likeliest next tokens it takes where it has been told nothing.
        told: by prompt, what comes behind it.
        counts: how many drafts it has, one of these each time.
        spoiled: which of them it spoils, one of these each time; None for none.
    """

    def __init__(
        self, model: HybridLM, told: dict[tuple[int, ...], Sequence[int]], counts: Sequence[int] = (9, 0, 9, 1, 2, 9),
        spoiled: Sequence[int | None] = (None, None, 0, 1, 3),
    ):  # fmt: skip
        self._told, self._vocab_size = told, model.config.vocab_size
        self._counts, self._spoiled = counts, spoiled
        trunk = model.model
        with torch.inference_mode():
            self._follows = model.logits(trunk.norm(trunk.embed_tokens.weight)).argmax(-1).tolist()

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        """See `minserve.speculation.drafters.Drafter`."""
        number = 7 * sum(tokens) + 31 * len(tokens)
        num_drafts = min(most, self._counts[number % len(self._counts)])
        drafts = self._right(tuple(tokens), num_drafts)
        while len(drafts) < num_drafts:
            drafts.append(self._follows[drafts[-1] if drafts else tokens[-1]])
        spoiled = self._spoiled[number % len(self._spoiled)]
        return [(token + (at == spoiled)) % self._vocab_size for at, token in enumerate(drafts)]

    def _right(self, tokens: tuple[int, ...], num: int) -> list[int]:
        """What comes next, as far as it has been told."""
        for prompt, answer in self._told.items():
            at = len(tokens) - len(prompt)
            if at > 0 and tokens == prompt + tuple(answer[:at]):
                return list(answer[at : at + num])
        return []
