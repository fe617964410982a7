"""What a cache with room for everything must know after each request, told by lists: no tree, no pages, no slots."""

from __future__ import annotations

from minserve.hybrid.ticket import MOST_STATES


def num_common(first, second):
    """How many of the first tokens are the same."""
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


class KnownPrefixes:
    """Sequences and states that requests, served one after the other, have left behind.

    Arguments:
        page_size, every, batch_tokens: of the cache and the engine.
        has_states: whether the model has any.
    """

    def __init__(self, page_size, every, batch_tokens, has_states=True):
        self.page_size, self.every, self.has_states = page_size, every, has_states
        self.batch_tokens = batch_tokens
        self.sequences, self.states = [], set()

    def page_hit(self, tokens):
        """How many of the first tokens somebody has left behind."""
        return max((num_common(tokens, sequence) for sequence in self.sequences), default=0)

    def hit(self, tokens):
        """How many of a request's tokens are reused."""
        if not self.has_states:
            return min(self.page_hit(tokens), len(tokens) - 1)
        return max((n for n in range(1, len(tokens)) if tuple(tokens[:n]) in self.states), default=0)

    def serve(self, prompt, output):
        """Note what a request leaves behind. Returns how many of its prompt's tokens were reused."""
        tokens, hit, page_hit = [*prompt, *output], self.hit(prompt), min(self.page_hit(prompt), len(prompt) - 1)
        num_computed = len(tokens) - bool(output)
        points = {*range(self.every, num_computed + 1, self.every)}
        points.add((len(prompt) - 1) // self.page_size * self.page_size)
        points |= {page_hit} if page_hit >= hit + self.page_size else set()
        start, kept = hit, {num_computed}
        while start < num_computed:
            stop = min(start + self.batch_tokens, len(prompt)) if start < len(prompt) else start + 1
            between = sorted(point for point in points if start < point < stop)
            kept |= {*between[-MOST_STATES:], *(points & {stop})}
            start = stop
        self.states |= {tuple(tokens[:num]) for num in kept}
        self.sequences.append(tokens[:num_computed])
        return hit
