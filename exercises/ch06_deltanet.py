# Write your code where it says YOUR CODE, in place of the line that raises. Check it with: pytest tests/exercises
# ruff: noqa: F401
"""Chapter 6, deltanet: a memory of fixed size, which cannot be cut, only copied or replaced.

A head remembers one matrix S [key_dim, value_dim], and the convolution before it the last few inputs, its tail. For
each token: S <- e^g S; delta = beta (v - k^T S); S <- S + k delta^T; and q^T S is read.
"""

import math
from dataclasses import dataclass

import torch


def conv_tail(
    x: torch.Tensor, weight: torch.Tensor, tail: torch.Tensor, stops: list[int]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Convolve a chunk of one request, and say what must be kept so that somebody can go on from inside it.

    Each channel of a token is a weighted sum of its own input and the kernel - 1 inputs before it, then SiLU, which is
    y x sigmoid(y). After a chunk, or where a snapshot is taken, the last kernel - 1 inputs are needed again.

    Args:
        x: [tokens, channels], the chunk's inputs, any number of tokens.
        weight: [channels, kernel], the weight of the oldest input first.
        tail: [kernel - 1, channels], the inputs just before the chunk, oldest first; zeros where a request begins.
        stops: so many tokens of the chunk have been seen where somebody wants to go on, each 0 to tokens.

    Returns:
        The outputs [tokens, channels], and for each of the stops the tail there [kernel - 1, channels].

    >>> x, weight = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[1.0, 0.0, 0.0]])
    >>> [tail.flatten().tolist() for tail in conv_tail(x, weight, torch.tensor([[8.0], [9.0]]), stops=[1, 3])[1]]
    [[9.0, 1.0], [2.0, 3.0]]
    """
    # YOUR CODE (10 min, easy): lay the old tail before the chunk: whatever is asked for is a window of that
    raise NotImplementedError("exercise 6.1")


class StatePool:
    """Keep the states of requests in slots, and copies of some of them, from which others will go on.

    What a request remembers is its matrices, its convolution's tail, and how many tokens both have seen: their stamp.
    Nothing in the numbers shows for which position they are, so whoever reads says which one it needs.

        num_free                               how many slots nobody holds
        take()                                 a free slot, with zeros in it, stamp 0; None when none is free
        write(slot, state, tail, num_tokens)   replace what is in it; the caller goes on to change its own tensors
        read(slot, num_tokens)                 (state, tail), to be looked at and not changed; ValueError unless they
                                               have seen exactly num_tokens
        snapshot(slot)                         another slot, with what this one has seen so far; None when none is free
        release(slot)                          give it back

    All but take raise ValueError for a slot that nobody holds.

    >>> pool = StatePool(2, state_shape=(1, 2, 2), tail_shape=(3, 4))
    >>> slot = pool.take()
    >>> pool.write(slot, torch.ones(1, 2, 2), torch.ones(3, 4), num_tokens=8)
    >>> snapshot = pool.snapshot(slot)
    >>> pool.write(slot, torch.zeros(1, 2, 2), torch.zeros(3, 4), num_tokens=9)
    >>> pool.read(snapshot, 8)[0].flatten().tolist()
    [1.0, 1.0, 1.0, 1.0]
    """

    def __init__(self, num_slots: int, state_shape: tuple[int, ...], tail_shape: tuple[int, ...]):
        # YOUR CODE (25 min, medium): the slots that are free, and for each held one a state, a tail and a stamp
        raise NotImplementedError("exercise 6.2")

    @property
    def num_free(self) -> int:
        """How many slots nobody holds."""
        # YOUR CODE (25 min, medium): the list of free slots knows
        raise NotImplementedError("exercise 6.2")

    def take(self) -> int | None:
        """Take a slot with zeros in it."""
        # YOUR CODE (25 min, medium): its last holder may have left something there
        raise NotImplementedError("exercise 6.2")

    def write(self, slot: int, state: torch.Tensor, tail: torch.Tensor, num_tokens: int) -> None:
        """Replace what a slot holds."""
        # YOUR CODE (25 min, medium): the caller's tensors will change: keep what they are now
        raise NotImplementedError("exercise 6.2")

    def read(self, slot: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What a slot holds, if that has seen so many tokens."""
        # YOUR CODE (25 min, medium): a state of another position is as wrong as none
        raise NotImplementedError("exercise 6.2")

    def snapshot(self, slot: int) -> int | None:
        """Keep what a slot holds now, in another one."""
        # YOUR CODE (25 min, medium): whatever is written to the one must not be seen in the other
        raise NotImplementedError("exercise 6.2")

    def release(self, slot: int) -> None:
        """Give a slot back."""
        # YOUR CODE (25 min, medium): once
        raise NotImplementedError("exercise 6.2")


@dataclass(frozen=True)
class Hybrid:
    """The shape of a hybrid model: every full_attention_interval-th layer is attention, all others are DeltaNet."""

    num_layers: int
    full_attention_interval: int
    num_kv_heads: int
    head_dim: int
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int


def crossing_point(model: Hybrid, kv_dtype_bytes: int = 2, state_dtype_bytes: int = 4) -> tuple[int, float]:
    """Find how long a request must be before its KV cache is as large as its state.

    An attention layer keeps a key and a value of each token, num_kv_heads x head_dim numbers each. A DeltaNet layer
    keeps key_dim x value_dim numbers for each value head, and the last conv_kernel - 1 inputs of its convolution, in
    2 bytes a number: the channels of these are all queries, keys and values.

    Args:
        model: its num_layers is a multiple of full_attention_interval.
        kv_dtype_bytes: bytes per number in the KV cache.
        state_dtype_bytes: bytes per number of the matrices; they are kept in float32 unless somebody dares.

    Returns:
        The least number of tokens whose KV cache takes at least the bytes of the state, and the state's size in GB.

    >>> crossing_point(Hybrid(4, 4, 1, 8, 1, 2, 8, 8, conv_kernel=1))
    (48, 1.536e-06)
    """
    # YOUR CODE (10 min, easy): how many layers are there of each kind?
    raise NotImplementedError("exercise 6.3")


def half_life(A_log: torch.Tensor, dt_bias: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """Say how fast each head of a layer forgets: after how many tokens, all like a typical one, is half of it left?

    A token leaves the share e^g of what a head held, with g = -e^A_log x softplus(a + dt_bias), where softplus(x) is
    log(1 + e^x). A_log and dt_bias are weights, a is what the layer's projection makes of the token. The typical token
    is the median one: a few that wipe a head clean would rule a mean.

    Args:
        A_log, dt_bias: [heads].
        a: [tokens, heads], of an odd number of tokens of some text.

    Returns:
        [heads], tokens; fractions count.

    >>> half_life(torch.zeros(1), torch.zeros(1), torch.zeros(3, 1)).tolist()
    [1.0]
    """
    # YOUR CODE (10 min, easy): which n solves e^(n g) = 1/2?
    raise NotImplementedError("exercise 6.4")


def delta_chunk(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor,
    chunk: int = 32,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Run the gated delta rule on one request, a chunk of tokens at a time: the state is touched once in each.

    In a chunk, let G_i be the sum of g from its first token up to token i, that included, S the state before it, and
    L_ij = e^(G_i - G_j) for j <= i. The deltas of all its tokens solve one triangular system,

        delta_i + sum over j < i of beta_i (k_i . k_j) L_ij delta_j  =  beta_i (v_i - e^G_i k_i^T S)

    and then, with G_last of the last token, out_i = e^G_i q_i^T S + sum over j <= i of (q_i . k_j) L_ij delta_j, and
    the next state is e^G_last S + sum over j of e^(G_last - G_j) k_j delta_j^T.

    Args:
        q, k: [tokens, heads, key_dim], queries, already scaled, and unit keys.
        v: [tokens, heads, value_dim].
        g, beta: [tokens, heads], g <= 0, down to some hundreds below; beta in 0 to 1.
        state: [heads, key_dim, value_dim], what the request remembers before its first token.
        chunk: tokens in a chunk; the last one may have fewer.

    Returns:
        The outputs [tokens, heads, value_dim], and the state after the last token.

    >>> one, two = torch.ones(1, 1, 1), torch.tensor([[[2.0]]])
    >>> [x.item() for x in delta_chunk(one, one, two, torch.zeros(1, 1), torch.ones(1, 1), 7 * one)]
    [2.0, 2.0]
    """
    # YOUR CODE (45 min, hard): a loop over chunks and heads; torch.linalg.solve_triangular, or a loop over rows
    raise NotImplementedError("exercise 6.5")


class Squeezer:
    """Pack a snapshot into few bytes: this one is scored, and there is no best answer.

    Some requests of the shipped model stop after 400 tokens, and go on from what you unpack. The matrices of a request
    take 196,608 bytes, and you have a thirty-second. The score is the KL divergence of the next 48 tokens' predictions
    from the right ones, in bits, as minus its log10: 2 is 0.01 bits. No state at all reaches 0.75. To round each row of
    a matrix to 4 bits would take four times what you have, and reach 3.1.

        pack(states, num_bytes)   states [layers, heads, key_dim, value_dim] -> a list of tensors of any dtypes, whose
                                  nbytes are at most num_bytes together. Nothing else may be remembered.
        unpack(pieces, shape)     what pack gave -> states of that shape, float32

    >>> pieces = Squeezer().pack(torch.ones(1, 2, 8, 8), num_bytes=256)
    >>> sum(piece.nbytes for piece in pieces) <= 256, Squeezer().unpack(pieces, (1, 2, 8, 8)).shape
    (True, torch.Size([1, 2, 8, 8]))
    """

    def pack(self, states: torch.Tensor, num_bytes: int) -> list[torch.Tensor]:
        """Pack the states into few bytes."""
        # YOUR CODE (40 min, open): how many tokens does a head remember? Are all heads worth the same?
        raise NotImplementedError("exercise 6.6")

    def unpack(self, pieces: list[torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
        """Make states of what was packed."""
        # YOUR CODE (40 min, open): the way back
        raise NotImplementedError("exercise 6.6")
