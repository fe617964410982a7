"""The kernel of `verify`: one program for each row, which walks over the vocabulary in blocks.

A row first looks at the two numbers of each draft, p and q of the drafted token, until one is turned down. Only then is
there a sum over the vocabulary to make, and only one: over the position whose token is to be chosen. The token is the
first whose cumulative weight exceeds u times that sum. So the blocks are summed up once more until one of them
passes the mark, and it alone gets a prefix sum. The weights are p, or (p - q)+ after a draft that was turned down; they
are computed twice and stored nowhere.

Sums are in float64, as the reference's: a token seldom drawn would be lost in what rounding takes from 250,000 others.
Offsets are 64 bits wide: 8,650 positions of a vocabulary of 248,320 are more than 2^31 numbers.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from minserve.errors import InvalidValue, MissingRequirement
from minserve.speculation.verify import check_lengths

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise MissingRequirement("triton", "a kernel, verify_triton,", "pip install 'minserve[triton]'") from error

MAX_BLOCK = 4096
NUM_WARPS = 16


@triton.jit
def distribution_offset(position, vocab):
    """Where the probabilities of one position begin."""
    return position.to(tl.int64) * vocab


@triton.jit
def positive_part(number):
    """The number where it is above 0, else 0: also of NaN."""
    return tl.where(number > 0, number, 0)


@triton.jit
def probabilities(p, q, place, vocab, lost, HAS_Q: tl.constexpr):
    """A block of p, and of what the lost draft came from, q or a one-hot: 0 where none is lost, which is -1."""
    ours = tl.load(p + place, mask=place < vocab, other=0).to(tl.float64)
    if HAS_Q:
        theirs = tl.load(q + place, mask=place < tl.where(lost >= 0, vocab, 0), other=0).to(tl.float64)
    else:
        theirs = tl.where(place == lost, 1.0, 0.0).to(tl.float64)
    return ours, theirs


@triton.jit
def verify_kernel(
    p, draft_ids, q, row_starts, accept_u, sample_u, num_accepted, next_ids, vocab,
    HAS_Q: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program keeps one row's drafts up to the first that is turned down, and chooses the token that follows."""
    row, lane = tl.program_id(0), tl.arange(0, BLOCK)
    start, stop = tl.load(row_starts + row).to(tl.int32), tl.load(row_starts + row + 1).to(tl.int32)
    first, num_drafts = start - row, stop - start - 1
    kept, at = 0, 0
    while at < num_drafts:
        token = tl.load(draft_ids + first + at)
        known = (token >= 0) & (token < vocab)
        of_p = tl.load(p + distribution_offset(start + at, vocab) + token, mask=known, other=0).to(tl.float64)
        of_q = tl.full((), 1, tl.float64)
        if HAS_Q:
            of_q = tl.load(q + distribution_offset(first + at, vocab) + token, mask=known, other=0).to(tl.float64)
        at += 1
        if tl.load(accept_u + first + at - 1).to(tl.float64) * of_q < of_p:
            kept += 1
        else:
            at = num_drafts  # the drafts behind it are lost with it
    lost = -1
    if kept < num_drafts:
        token = tl.load(draft_ids + first + kept)
        lost = tl.where((token >= 0) & (token < vocab), token, vocab).to(tl.int32)
    ours, theirs = p + distribution_offset(start + kept, vocab), q
    if HAS_Q:
        theirs = q + distribution_offset(first + kept, vocab)

    all_of_p, rest = tl.full((), 0, tl.float64), tl.full((), 0, tl.float64)
    for begin in range(0, vocab, BLOCK):
        mine, other = probabilities(ours, theirs, begin + lane, vocab, lost, HAS_Q)
        all_of_p += tl.sum(mine, 0)
        rest += tl.sum(positive_part(mine - other), 0)
    lost = tl.where(rest > 0, lost, -1)  # rounding may leave no rest
    mark = tl.load(sample_u + row).to(tl.float64) * tl.where(lost >= 0, rest, all_of_p)

    before, begin, chosen, last = tl.full((), 0, tl.float64), 0, vocab, -1
    while (begin < vocab) & (chosen == vocab):
        place = begin + lane
        mine, other = probabilities(ours, theirs, place, vocab, lost, HAS_Q)
        weights = positive_part(mine - other)
        here = tl.sum(weights, 0)
        if before + here > mark:
            hit = (before + tl.cumsum(weights, 0) > mark) & (weights > 0)
            chosen = tl.min(tl.where(hit, place, vocab), 0)
        last = tl.maximum(last, tl.max(tl.where(weights > 0, place, -1), 0))
        before += here
        begin += BLOCK
    last = tl.where(last >= 0, last, vocab - 1)  # a row of NaN has no possible token: any other will do
    tl.store(num_accepted + row, kept)
    tl.store(next_ids + row, tl.where(chosen < vocab, chosen, last))


def verify(
    p: Float[Tensor, "positions vocab"],
    draft_ids: Int[Tensor, " drafts"],
    q: Float[Tensor, "drafts vocab"] | None,
    row_starts: Int[Tensor, " rows_plus_1"],
    accept_u: Float[Tensor, " drafts"],
    sample_u: Float[Tensor, " rows"],
    *,
    num_accepted: Int[Tensor, " rows"] | None = None,
    next_ids: Int[Tensor, " rows"] | None = None,
    block: int | None = None,
) -> tuple[Int[Tensor, " rows"], Int[Tensor, " rows"]]:
    """Keep drafts and choose what follows; arguments and results as the reference's, `minserve.speculation.verify`.

    Arguments:
        num_accepted, next_ids: where the results go, new tensors of 64-bit numbers unless given.
        block: how many tokens a program looks at in one go, a power of two; chosen by the vocabulary unless given.
    Changes: `num_accepted` and `next_ids`. Nothing waits for the GPU, so row_starts is believed, and what the reference
    refuses in a draft is not found: a draft outside the vocabulary is turned down, and one that q could not draw is
    kept where p could.
    Errors: InvalidValue for lengths that do not fit, or results that are not contiguous; MissingRequirement without
    a GPU.
    """
    check_lengths(p, draft_ids, q, row_starts, accept_u, sample_u)
    num_rows, vocab = len(sample_u), p.shape[1]
    results = [p.new_empty(num_rows, dtype=torch.int64) if x is None else x for x in (num_accepted, next_ids)]
    for name, result in zip(("num_accepted", "next_ids"), results, strict=True):
        if not result.is_contiguous() or len(result) != num_rows:
            raise InvalidValue(name, (tuple(result.shape), result.stride()), f"contiguous, of {num_rows} rows")
    block = block or min(MAX_BLOCK, triton.next_power_of_2(vocab))
    if block < 1 or block & (block - 1):
        raise InvalidValue("block", block, "a power of two")
    if not p.is_cuda and isinstance(verify_kernel, triton.JITFunction):
        raise MissingRequirement("a GPU", "a compiled kernel", "set TRITON_INTERPRET=1, or use the reference")
    if num_rows:
        p, draft_ids, row_starts, accept_u, sample_u = (
            x.contiguous() for x in (p, draft_ids, row_starts, accept_u, sample_u)
        )
        verify_kernel[(num_rows,)](
            p, draft_ids, p if q is None else q.contiguous(), row_starts, accept_u, sample_u, *results, vocab,
            HAS_Q=q is not None, BLOCK=block, num_warps=NUM_WARPS,
        )  # fmt: skip
    return results[0], results[1]
