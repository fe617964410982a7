"""A small language model that guesses what a large one will say.

Two models of one vocabulary: the small one drafts, the large one verifies. What the small one knows of a text is
separate from what the large one knows, and is its own to keep right: after every step it must cover the drafts that
were accepted and the token that followed them, and nothing of those that were rejected.
Leviathan et al., Fast Inference from Transformers via Speculative Decoding (arXiv 2211.17192).

    asked    a b c      a b c d     a b c d e      then, d accepted and e not:   a b c d x
    run      a b c            d             e                                            x
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from minserve.draft_memory import DraftSequence, DraftStep, RememberedSequences, linear_layers
from minserve.errors import InvalidValue
from minserve.model.hybrid_lm import HybridLM
from minserve.model.step import Step

SLICE_TOKENS = 2048  # what one forward runs at most, when a long context has to be caught up with


class DraftModel:
    """Scores the token after each of some contexts, and remembers what it has run for it.

    Its answers are a function of the contexts alone. What it remembers only saves time: a context that goes on from one
    asked before costs its new tokens. So there is no request to begin, to cut back or to end.

    Arguments:
        model: the drafter; its vocabulary is that of the model it drafts for.
        max_sequences: how many sequences are remembered, >= 1: those that were used longest ago are forgotten. Fewer
            than one call has rows, and some of these are run from their beginnings in the next.
        max_drafts: how many tokens a context may differ in from one asked before and still count as the same sequence,
            >= 1: the most drafts that may be rejected together. So many states are remembered per sequence.
    Errors: InvalidValue for max_sequences or max_drafts out of range.
    """

    def __init__(self, model: HybridLM, max_sequences: int = 64, max_drafts: int = 8):
        for name, value in (("max_sequences", max_sequences), ("max_drafts", max_drafts)):
            if value < 1:
                raise InvalidValue(name, value, "at least 1")
        weight = model.model.embed_tokens.weight
        self.max_drafts = max_drafts
        self.model, self._dtype, self._device = model, weight.dtype, weight.device
        self._linear = linear_layers(model.config)
        self._remembered = RememberedSequences(max_sequences, max_drafts, any_length=not self._linear)

    @classmethod
    def from_checkpoint(
        cls, path: str | Path, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu",
        max_sequences: int = 64, max_drafts: int = 8,
    ) -> DraftModel:  # fmt: skip
        """Read the model from a checkpoint folder; the errors are those of minserve.model.checkpoint."""
        return cls(HybridLM.from_checkpoint(path, dtype, device), max_sequences, max_drafts)

    @property
    def vocab_size(self) -> int:
        """How many tokens are scored."""
        return self.model.config.vocab_size

    @torch.inference_mode()
    def logits(self, contexts: Sequence[Sequence[int]]) -> Float[Tensor, "rows vocab"]:
        """Score every token as the next one of each context.

        All rows are run in one forward, or in several of up to `SLICE_TOKENS` tokens where there are more new ones.
        Equal contexts are run once.

        Arguments:
            contexts: token ids, at least one per context; they are not changed.
        Errors: InvalidValue for an empty context or a token outside the vocabulary; then nothing has been run.
        Changes: what is remembered.
        """
        if not contexts:
            return torch.empty(0, self.vocab_size, dtype=self._dtype, device=self._device)
        places: dict[tuple[int, ...], int] = {}  # of different contexts
        row_places, found = [], []
        for row, context in enumerate(map(tuple, contexts)):
            row_places.append(places.setdefault(context, len(places)))
            if len(found) < len(places):
                found.append(self._find(row, context))
        scores = self._run(list(places), self._sequences(found))
        self._remembered.evict()
        return torch.stack([scores[place] for place in row_places])

    def _find(self, row: int, context: tuple[int, ...]) -> tuple[DraftSequence | None, int]:
        """What of a context has been run; the rest of it is checked, since what has been run was."""
        if not context:
            raise InvalidValue(f"contexts[{row}]", context, "at least one token")
        sequence, num_run = self._remembered.find(context)
        for token in context[num_run:]:
            if not 0 <= token < self.vocab_size:
                raise InvalidValue(f"contexts[{row}]", token, f"made of tokens from 0 to {self.vocab_size - 1}")
        return sequence, num_run

    def _sequences(self, found: list[tuple[DraftSequence | None, int]]) -> list[DraftSequence]:
        """A sequence for each row to go on with, no two the same. Changes: what is remembered."""
        sequences: dict[int, DraftSequence] = {}
        taken = set()
        # Of rows that go on from one sequence, the one that shares most of it may cut it: the others share no more.
        for row in sorted(range(len(found)), key=lambda row: -found[row][1]):
            sequence, num_run = found[row]
            if sequence is None:
                sequences[row] = DraftSequence(self.model.config, self._dtype, self._device)
                self._remembered.add(sequences[row])
            else:
                sequences[row] = self._remembered.continued(sequence, num_run, is_taken=sequence in taken)
                taken.add(sequence)
        return [sequences[row] for row in range(len(found))]

    def _run(self, contexts: list[tuple[int, ...]], sequences: list[DraftSequence]) -> dict[int, Tensor]:
        """Run what of the contexts is new; the scores after each. Changes: the sequences, and what is remembered."""
        scores: dict[int, Tensor] = {}
        while len(scores) < len(contexts):
            rows, room = {}, SLICE_TOKENS
            for row, (context, sequence) in enumerate(zip(contexts, sequences, strict=True)):
                start = len(sequence.tokens)
                stop = min(len(context), start + room)
                if stop > start:
                    rows[row], room = context[:stop], room - (stop - start)
            logits = self._forward([sequences[row] for row in rows], list(rows.values()))
            scores.update((row, x) for row, x in zip(rows, logits, strict=True) if len(rows[row]) == len(contexts[row]))
        return scores

    def _forward(self, sequences: list[DraftSequence], tokens: list[tuple[int, ...]]) -> Float[Tensor, "rows vocab"]:
        """Run sequences up to these tokens: the scores after them. Changes: the sequences, and what is remembered."""
        spans = [range(len(sequence.tokens), len(upto)) for sequence, upto in zip(sequences, tokens, strict=True)]
        new = [token for upto, span in zip(tokens, spans, strict=True) for token in upto[span.start :]]
        positions = [position for span in spans for position in span]
        starts = [0, *accumulate(map(len, spans))]
        packed, places, row_starts = (torch.tensor(x, device=self._device) for x in (new, positions, starts))
        step = Step(packed, places, row_starts, chosen=row_starts[1:] - 1)
        for sequence, upto in zip(sequences, tokens, strict=True):
            sequence.make_room(len(upto))
        memory = DraftStep(sequences, row_starts, self._linear)
        logits = self.model(step, memory).logits
        for row, (sequence, upto) in enumerate(zip(sequences, tokens, strict=True)):
            self._remembered.extend(sequence, upto, memory.state_after(row))
        return logits
