"""Where an output ends: the one place that cuts a run of new tokens, for plain steps and accepted drafts alike.

Tokens are looked at one by one, however many a step brought:

    1. a stop token ends the output: it stays in the ids and adds nothing to the text;
    2. a stop string that the text now contains ends it: the text is cut before the string;
    3. the token limit ends it: exactly max_tokens are kept.

In this order, so that a stop on the last allowed token is a stop, and one beyond the limit does not exist.

A stop string may span tokens, so text that may be its beginning is held back until the next tokens decide. The pieces
joined are the text of the whole output, whatever the grouping of tokens into steps.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

from minserve.request import FinishReason
from minserve.sampling_params import SamplingParams


class Decoder(Protocol):
    """An incremental decoder, such as `tokenizer.incremental()`."""

    def push(self, token_id: int) -> str:
        """The text that this token completes."""
        ...

    def finish(self) -> str:
        """The text of an incomplete character at the end; nothing when asked again."""
        ...


class Kept(NamedTuple):
    """What of a run of new tokens belongs to the output: how many, the text to send now, and why it ended, if so."""

    num_kept: int
    text: str
    finish_reason: FinishReason | None


def stop_ids(params: SamplingParams, eos_token_ids: Collection[int]) -> set[int]:
    """The tokens that end an output: those asked for, and the model's end tokens unless they are to be ignored."""
    return {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}


class StopChecker:
    """Follows one output and says where it ends.

    Arguments:
        params: the request's limits and stops.
        decoder: a fresh incremental decoder.
        eos_token_ids: the model's end tokens.
    Attributes:
        num_tokens: output tokens kept so far.
        text: all text sent so far.
        finish_reason: None while the output goes on.

    >>> from minserve.model.tokenizer import ByteTokenizer
    >>> checker = StopChecker(SamplingParams(stop="END"), ByteTokenizer().incremental())
    >>> checker.push(list(b"an E"))
    Kept(num_kept=4, text='an ', finish_reason=None)
    >>> checker.push(list(b"NDless")), checker.text
    (Kept(num_kept=2, text='', finish_reason=<FinishReason.STOP: 'stop'>), 'an ')
    """

    def __init__(self, params: SamplingParams, decoder: Decoder, eos_token_ids: Collection[int] = ()):
        self.num_tokens = 0
        self.text = ""
        self.finish_reason = FinishReason.LENGTH if params.max_tokens == 0 else None
        self._decoder, self._held = decoder, ""
        self._max_tokens, self._stop_strings = params.max_tokens, params.stop
        self._stop_ids = stop_ids(params, eos_token_ids)
        self._beginnings = {stop[:length] for stop in params.stop for length in range(1, len(stop))}
        self._longest_beginning = max(map(len, self._beginnings), default=0)

    def push(self, token_ids: Sequence[int]) -> Kept:
        """Take the tokens of one step, up to the output's end; after the end nothing is kept.

        Changes: everything in this checker.
        """
        if len(token_ids) == 1 and self.finish_reason is None:  # a plain step's one token
            text = self._push_one(token_ids[0])
            self.text += text
            return Kept(1, text, self.finish_reason)
        sent, before = [], self.num_tokens
        for token_id in token_ids:
            if self.finish_reason is not None:
                break
            sent.append(self._push_one(token_id))
        text = "".join(sent)
        self.text += text
        return Kept(self.num_tokens - before, text, self.finish_reason)

    def finish(self, reason: FinishReason = FinishReason.ABORT) -> str:
        """End the output from outside, and return the text that was still held back.

        Changes: everything in this checker. An output that has ended keeps its reason.
        """
        if self.finish_reason is not None:
            return ""
        self.finish_reason = reason
        text = self._held + self._decoder.finish()
        self.text += text
        return text

    def _push_one(self, token_id: int) -> str:
        """Take one token and return the text that it sets free."""
        self.num_tokens += 1
        if token_id in self._stop_ids:
            self.finish_reason = FinishReason.STOP
        else:
            self._held += self._decoder.push(token_id)
            if self.num_tokens == self._max_tokens:
                self.finish_reason = FinishReason.LENGTH
        if self.finish_reason is not None:
            self._held += self._decoder.finish()
        if not self._stop_strings:
            free, self._held = self._held, ""
            return free
        cut = self._stop_start()
        if cut is not None:
            self.finish_reason = FinishReason.STOP
            return self._held[:cut]
        num_held = 0 if self.finish_reason is not None else self._num_undecided()
        free, self._held = self._held[: len(self._held) - num_held], self._held[len(self._held) - num_held :]
        return free

    def _stop_start(self) -> int | None:
        """Where the stop string that is complete first begins in the held text; None if there is none.

        The first to be complete, not the first to begin: so the cut does not depend on how text falls into tokens.
        """
        first_end, first_start = None, None
        for stop in self._stop_strings:
            start = self._held.find(stop)
            if start >= 0 and (first_end is None or (start + len(stop), start) < (first_end, first_start)):
                first_end, first_start = start + len(stop), start
        return first_start

    def _num_undecided(self) -> int:
        """The length of the longest end of the held text that a stop string may begin with."""
        for length in range(min(self._longest_beginning, len(self._held)), 0, -1):
            if self._held[-length:] in self._beginnings:
                return length
        return 0
