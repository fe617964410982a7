"""What a draft model remembers: sequences that were run, each of which can be cut back.

    tokens          a b c d e f
    keys, values    a b c d e f    one per token: cut anywhere, and written over from there on
    states                d e f    after each of the last runs: no state can be run backwards, so older ones are kept

A sequence that is asked to go back by a few tokens is cut: these were drafts, and they were rejected. One that is asked
to go back further belongs to somebody else, with whom the new sequence shares a beginning: it is copied up to there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from copy import copy
from itertools import pairwise
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from minserve.deltanet.conv_tail import conv_tail_ragged
from minserve.deltanet.gated_delta import gated_delta_ragged
from minserve.model.config import LINEAR, ModelConfig

QUERIES_AT_A_TIME = 128  # so many queries skip the keys after the last of them, and their scores stay in a cache
TAIL_TOKENS = 32  # a beginning is looked up by its length and its last tokens, and then compared in full


class State(NamedTuple):
    """What the DeltaNet layers of one sequence remember after so many tokens, all layers together."""

    tails: Float[Tensor, "layers kernel_minus_1 channels"]
    matrices: Float[Tensor, "layers value_heads key_dim value_dim"]


def linear_layers(config: ModelConfig) -> list[int]:
    """The DeltaNet layers of a model."""
    return [i for i, kind in enumerate(config.layer_types) if kind == LINEAR]


class DraftSequence:
    """What has been run of one sequence.

    Arguments:
        config: the model's.
        dtype, device: the model's. States are float32, or float64 with a float64 model.
    Attributes:
        tokens: those that have been run.
        keys, values: of each attention layer, [kv_heads room head_dim]; the first len(tokens) places count.
        states: by the number of tokens that they have seen, fewest first; None in a model without DeltaNet layers,
            where the numbers alone say how far runs went.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device):
        linear = linear_layers(config)
        self.tokens: tuple[int, ...] = ()
        slab = torch.empty(config.num_key_value_heads, 0, config.head_dim, dtype=dtype, device=device)
        self.keys = {i: slab for i in range(config.num_hidden_layers) if i not in linear}
        self.values = dict(self.keys)
        self.states: dict[int, State | None] = {0: None}
        if linear:
            wide = torch.promote_types(dtype, torch.float32)
            tails = (len(linear), config.linear_conv_kernel_dim - 1, config.conv_channels)
            heads = (config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim)
            zeros = torch.zeros(tails, dtype=dtype, device=device)
            self.states[0] = State(zeros, torch.zeros(len(linear), *heads, dtype=wide, device=device))

    def make_room(self, num_tokens: int) -> None:
        """Make the slabs long enough; twice as long as they were, so that a token is moved once or twice in its life.

        Changes: the slabs.
        """
        for slabs in (self.keys, self.values):
            for layer, slab in slabs.items():
                if num_tokens > slab.shape[1]:
                    slabs[layer] = _moved(slab, len(self.tokens), max(num_tokens, 2 * slab.shape[1]))

    def fork(self, num_tokens: int) -> DraftSequence:
        """A sequence of its own with the first tokens of this one; states are shared, since nobody changes them."""
        fork = copy(self)
        fork.tokens = self.tokens[:num_tokens]
        fork.keys = {i: _moved(slab, num_tokens, 2 * num_tokens) for i, slab in self.keys.items()}
        fork.values = {i: _moved(slab, num_tokens, 2 * num_tokens) for i, slab in self.values.items()}
        fork.states = {count: state for count, state in self.states.items() if count <= num_tokens}
        return fork


def _moved(slab: Float[Tensor, "kv_heads room head_dim"], num_used: int, room: int) -> Tensor:
    """A slab of another length with the same beginning."""
    moved = slab.new_empty(len(slab), room, slab.shape[2])
    moved[:, :num_used] = slab[:, :num_used]
    return moved


class DraftStep:
    """The memory of one forward over some sequences: see `minserve.model.memory.Memory`.

    Arguments:
        sequences: the rows' own, with room for their new tokens.
        row_starts: where each row begins in the packing, and the end.
        linear: the model's DeltaNet layers.
    """

    def __init__(self, sequences: Sequence[DraftSequence], row_starts: Int[Tensor, " rows_plus_1"], linear: list[int]):
        self._sequences, self._row_starts, self._bounds = sequences, row_starts, row_starts.tolist()
        self._tails: dict[int, Tensor] = {}
        self._matrices: dict[int, Tensor] = {}
        if linear:
            before = [sequence.states[len(sequence.tokens)] for sequence in sequences]
            tails, matrices = (torch.stack(of_rows, dim=1) for of_rows in zip(*before, strict=True))
            self._tails = dict(zip(linear, tails.unbind(), strict=True))
            self._matrices = dict(zip(linear, matrices.unbind(), strict=True))

    def attend(
        self,
        layer: int,
        q: Float[Tensor, "tokens heads head_dim"],
        k: Float[Tensor, "tokens kv_heads head_dim"],
        v: Float[Tensor, "tokens kv_heads head_dim"],
    ) -> Float[Tensor, "tokens heads head_dim"]:
        """Append each row's keys and values to its slabs, and attend to all so far. Changes: the slabs."""
        outs = []
        for sequence, (start, stop) in zip(self._sequences, pairwise(self._bounds), strict=True):
            keys, values, seen = sequence.keys[layer], sequence.values[layer], len(sequence.tokens)
            end = seen + stop - start
            keys[:, seen:end], values[:, seen:end] = k[start:stop].transpose(0, 1), v[start:stop].transpose(0, 1)
            outs.append(_attend(q[start:stop], keys[:, :end], values[:, :end]))
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def convolve(
        self, layer: int, x: Float[Tensor, "tokens channels"], weight: Float[Tensor, "channels kernel"]
    ) -> Float[Tensor, "tokens channels"]:
        """Convolve each row on from its tail. Changes: this step's tails of the layer, not the sequences'."""
        out, self._tails[layer] = conv_tail_ragged(x, weight, self._tails[layer], self._row_starts)
        return out

    def recur(
        self,
        layer: int,
        q: Float[Tensor, "tokens key_heads key_dim"],
        k: Float[Tensor, "tokens key_heads key_dim"],
        v: Float[Tensor, "tokens value_heads value_dim"],
        g: Float[Tensor, "tokens value_heads"],
        beta: Float[Tensor, "tokens value_heads"],
    ) -> Float[Tensor, "tokens value_heads value_dim"]:
        """Run the rule on each row from its state. Changes: this step's states of the layer, not the sequences'."""
        out, self._matrices[layer] = gated_delta_ragged(q, k, v, g, beta, self._matrices[layer], self._row_starts)
        return out

    def state_after(self, row: int) -> State | None:
        """What the row's DeltaNet layers remember after this step: a copy, so that it keeps no other row's alive."""
        if not self._tails:
            return None
        return State(*(torch.stack([x[row] for x in by_layer.values()]) for by_layer in (self._tails, self._matrices)))


def _attend(
    q: Float[Tensor, "queries heads head_dim"],
    keys: Float[Tensor, "kv_heads keys head_dim"],
    values: Float[Tensor, "kv_heads keys head_dim"],
) -> Float[Tensor, "queries heads head_dim"]:
    """Attend from the last tokens of a sequence to all of it."""
    if len(q) == 1:  # it sees everything; the heads that read one key head are so many queries of it
        heads = q.reshape(1, len(keys), -1, q.shape[2])
        return F.scaled_dot_product_attention(heads, keys[None], values[None]).reshape(q.shape)
    outs = []
    for first in range(0, len(q), QUERIES_AT_A_TIME):
        some = q[first : first + QUERIES_AT_A_TIME]
        stop = keys.shape[1] - len(q) + first + len(some)
        mask = torch.ones(len(some), stop, dtype=torch.bool, device=q.device).tril(stop - len(some))
        rows = (x[None] for x in (some.transpose(0, 1), keys[:, :stop], values[:, :stop]))
        outs.append(F.scaled_dot_product_attention(*rows, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1))
    return torch.cat(outs)


class RememberedSequences:
    """The sequences that were run last, and which of them a context goes on from.

    Arguments:
        max_sequences: how many are remembered; those that were used longest ago go first.
        max_drafts: how many tokens a sequence may be cut back by, and how many of its runs' ends are remembered.
        any_length: whether a sequence can be cut at every token, and not only where a state is.
    """

    def __init__(self, max_sequences: int, max_drafts: int, any_length: bool):
        self._max_sequences, self._max_drafts, self._any_length = max_sequences, max_drafts, any_length
        self._by_use: OrderedDict[DraftSequence, None] = OrderedDict()  # the one used longest ago first
        self._by_end: dict[tuple, list[DraftSequence]] = {}  # by the ends of their runs

    def find(self, context: tuple[int, ...]) -> tuple[DraftSequence | None, int]:
        """The sequence that shares the longest beginning with a context, and that beginning's length.

        The context's last token is never part of it: its run gives the scores that are asked for. Most contexts go on
        from a run that has just been made; only where none of the likely ones fits, every sequence is looked at.
        """
        last = len(context) - 1
        for count in range(last, max(0, last - self._max_drafts - 1), -1):
            for sequence in self._by_end.get(_end(context, count), ()):
                if sequence.tokens[:count] == context[:count]:
                    return sequence, count
        best, most = None, 0
        for sequence in self._by_use:
            common = _num_common(sequence.tokens, context[:last])
            if common > most and not self._any_length:
                common = max((count for count in sequence.states if count <= common), default=0)
            if common > most:
                best, most = sequence, common
        return best, most

    def add(self, sequence: DraftSequence) -> None:
        """Remember a sequence. Changes: this memory."""
        self._by_use[sequence] = None
        for count in sequence.states:
            self._by_end.setdefault(_end(sequence.tokens, count), []).append(sequence)

    def extend(self, sequence: DraftSequence, tokens: tuple[int, ...], state: State | None) -> None:
        """Note that a sequence has been run up to these tokens. Changes: the sequence, and this memory."""
        sequence.tokens, sequence.states[len(tokens)] = tokens, state
        self._by_end.setdefault(_end(tokens, len(tokens)), []).append(sequence)
        if len(sequence.states) > self._max_drafts:
            self._forget(sequence, next(iter(sequence.states)))
        self._by_use.move_to_end(sequence)

    def continued(self, sequence: DraftSequence, num_tokens: int, is_taken: bool) -> DraftSequence:
        """A sequence to write on after the first tokens of one that is remembered: that one itself, or a fork of it.

        Arguments:
            sequence, num_tokens: what `find` gave.
            is_taken: whether somebody else goes on from the sequence.
        Changes: the sequence, if it is cut; this memory.
        """
        if is_taken or len(sequence.tokens) - num_tokens > self._max_drafts:
            sequence = sequence.fork(num_tokens)
            self.add(sequence)
            return sequence
        for count in [count for count in sequence.states if count > num_tokens]:
            self._forget(sequence, count)
        sequence.tokens = sequence.tokens[:num_tokens]
        return sequence

    def evict(self) -> None:
        """Forget the sequences that are too many. Changes: this memory."""
        while len(self._by_use) > self._max_sequences:
            sequence, _ = self._by_use.popitem(last=False)
            for count in list(sequence.states):
                self._forget(sequence, count)

    def _forget(self, sequence: DraftSequence, count: int) -> None:
        """Forget that a run ended after so many tokens. Changes: the sequence's states, and this memory."""
        del sequence.states[count]
        end = _end(sequence.tokens, count)
        self._by_end[end].remove(sequence)
        if not self._by_end[end]:
            del self._by_end[end]


def _end(tokens: tuple[int, ...], count: int) -> tuple[int, ...]:
    """What the first tokens are looked up by: their number, and the last of them."""
    return (count, *tokens[max(0, count - TAIL_TOKENS) : count])


def _num_common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """How many tokens two sequences begin with in common: halves are compared, since slices are fast."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
