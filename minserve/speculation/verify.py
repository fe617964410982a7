"""Which drafts a row keeps, and the token it gets besides: several tokens from one step, the distribution unchanged.

    draft x, drawn from q, is kept with probability min(1, p(x) / q(x)):    u q(x) < p(x),   u in [0, 1)
    at the first draft that is not kept, the next token comes from          (p - q)+ / sum (p - q)+
    where all are kept, it comes from the p behind the last draft

Each token that comes out has distribution p, whatever q is. x is drafted and kept with probability min(p(x), q(x)); a
draft is lost with probability 1 - sum min(p, q) = sum (p - q)+, and then x comes with (p(x) - q(x))+ over that sum. The
two add up to p(x). How many drafts are kept, sum min(p, q) of them, does depend on q.

A drafter that does not draw has put all of q on its draft: q is one-hot, and a draft is kept where u < p(x). A greedy
row has a one-hot p, so that a draft is kept where it is the likeliest token. Neither is a case of its own.
Leviathan, Kalman, Matias, Fast Inference from Transformers via Speculative Decoding (arXiv 2211.17192); Chen et al.,
Accelerating Large Language Model Decoding with Speculative Sampling (arXiv 2302.01318).
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from minserve.errors import InvalidValue


@torch.no_grad()
def verify(
    p: Float[Tensor, "positions vocab"],
    draft_ids: Int[Tensor, " drafts"],
    q: Float[Tensor, "drafts vocab"] | None,
    row_starts: Int[Tensor, " rows_plus_1"],
    accept_u: Float[Tensor, " drafts"],
    sample_u: Float[Tensor, " rows"],
) -> tuple[Int[Tensor, " rows"], Int[Tensor, " rows"]]:
    """Keep each row's drafts up to the first that is turned down, and choose the token that follows them.

    Arguments:
        p: what the model says: the distribution at each draft of a row, and the one behind its last draft. Filtered
            already, as for a plain step. A row with d drafts has d + 1 positions; d may be 0, and another in each row.
        draft_ids: the drafts, packed: those of row r begin at row_starts[r] - r.
        q: what each draft was drawn from, filtered the same way; None where drafts were not drawn (the likeliest token,
            a token looked up). The softmax of a drafter that took its maximum is not what its draft was drawn from.
        row_starts: where each row begins in p, and the end.
        accept_u: a random number in [0, 1) for each draft.
        sample_u: one more for each row, for the token that follows. A row without drafts gets the very token that
            `minserve.sampling.choose` takes with it from p.
    Returns how many drafts each row keeps, and the token that follows: it is never a draft, it is one token more.
    Rows whose p is no distribution (NaN) get some token of the vocabulary.
    Errors: InvalidValue for lengths that do not fit, a draft outside the vocabulary, or one that q could not draw.

    >>> p = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.5, 0.5]])      # one row, one draft
    >>> for accept_u in (0.3, 0.7):
    ...     num_accepted, next_ids = verify(
    ...         p, torch.tensor([1]), None, torch.tensor([0, 2]), torch.tensor([accept_u]), torch.tensor([0.9])
    ...     )
    ...     print(num_accepted.tolist(), next_ids.tolist())
    [1] [2]
    [0] [0]
    """
    check_lengths(p, draft_ids, q, row_starts, accept_u, sample_u)
    num_drafts = _num_drafts(row_starts, len(p))
    num_rows, device = len(num_drafts), p.device
    rows = torch.arange(num_rows, device=device)
    draft_rows = rows.repeat_interleave(num_drafts)
    drafts = torch.arange(len(draft_ids), device=device)
    p_of_draft, q_of_draft = _of_drafts(p, draft_ids, q, draft_rows)

    accepted = accept_u.to(torch.float64) * q_of_draft < p_of_draft
    place = drafts + draft_rows - row_starts[draft_rows]  # among its row's drafts
    kept_before = torch.where(accepted, num_drafts[draft_rows], place)
    num_accepted = num_drafts.scatter_reduce(0, draft_rows, kept_before, "amin")

    last = row_starts[:-1] + num_accepted  # the position whose token nobody drafted, or not well
    weights = p[last].to(torch.float64)
    lost = (num_accepted < num_drafts).nonzero().flatten()
    turned_down = last[lost] - lost  # these rows' first drafts that were not kept
    own = _one_hot(draft_ids[turned_down], p.shape[1]) if q is None else q[turned_down].to(torch.float64)
    rest = weights[lost] - own
    rest = torch.where(rest > 0, rest, 0.0)
    # Where p equals q up to rounding, rounding may leave nothing: then p is the better answer.
    weights[lost] = torch.where(rest.sum(-1, keepdim=True) > 0, rest, weights[lost])
    return num_accepted, _choose(weights, sample_u)


def check_lengths(
    p: Tensor, draft_ids: Tensor, q: Tensor | None, row_starts: Tensor, accept_u: Tensor, sample_u: Tensor
) -> None:
    """Compare the sizes of `verify`'s arguments. Errors: InvalidValue naming the one that does not fit."""
    num_rows = len(sample_u)
    if len(row_starts) != num_rows + 1:
        raise InvalidValue("len(row_starts)", len(row_starts), f"{num_rows + 1}, one more than len(sample_u)")
    if len(draft_ids) != len(p) - num_rows:
        limit = f"{len(p) - num_rows}: {len(p)} positions of p less one for each of {num_rows} rows"
        raise InvalidValue("len(draft_ids)", len(draft_ids), limit)
    if q is not None and q.shape != (len(draft_ids), p.shape[1]):
        raise InvalidValue("q.shape", tuple(q.shape), f"{(len(draft_ids), p.shape[1])}, a distribution for each draft")
    if len(accept_u) != len(draft_ids):
        raise InvalidValue("len(accept_u)", len(accept_u), f"{len(draft_ids)}, one for each draft")


def _num_drafts(row_starts: Int[Tensor, " rows_plus_1"], num_positions: int) -> Int[Tensor, " rows"]:
    """How many drafts each row has."""
    starts = row_starts.tolist()
    if (starts[0], starts[-1]) != (0, num_positions):
        raise InvalidValue("row_starts", starts, f"from 0 to {num_positions}, the positions of p")
    for row, (start, stop) in enumerate(zip(starts, starts[1:], strict=False)):
        if stop <= start:
            raise InvalidValue(f"row_starts[{row + 1}]", stop, f"above {start}: row {row} has a position at least")
    return row_starts.diff().long() - 1


def _of_drafts(
    p: Float[Tensor, "positions vocab"],
    draft_ids: Int[Tensor, " drafts"],
    q: Float[Tensor, "drafts vocab"] | None,
    draft_rows: Int[Tensor, " drafts"],
) -> tuple[Float[Tensor, " drafts"], Float[Tensor, " drafts"]]:
    """p and q of the drafted tokens themselves, in float64."""
    drafts, vocab_size = torch.arange(len(draft_ids), device=p.device), p.shape[1]

    def refuse(wrong: Tensor, name: str, values: Tensor, limit: str) -> None:
        if wrong.any():
            draft = int(wrong.int().argmax())
            where = f"draft {draft}, of row {int(draft_rows[draft])}"
            raise InvalidValue(f"{name} of {where},", values[draft].item(), limit)

    refuse((draft_ids < 0) | (draft_ids >= vocab_size), "draft_ids", draft_ids, f"a token, 0 to {vocab_size - 1}")
    of_p = p[drafts + draft_rows, draft_ids].to(torch.float64)
    if q is None:
        return of_p, torch.ones_like(of_p)
    of_q = q[drafts, draft_ids].to(torch.float64)
    refuse(~(of_q > 0), "q", of_q, "above 0 for the token that was drawn from it; None where drafts are not drawn")
    return of_p, of_q


def _one_hot(ids: Int[Tensor, " rows"], vocab_size: int) -> Float[Tensor, "rows vocab"]:
    """All probability on one token."""
    return torch.nn.functional.one_hot(ids.long(), vocab_size).to(torch.float64)


def _choose(weights: Float[Tensor, "rows vocab"], u: Float[Tensor, " rows"]) -> Int[Tensor, " rows"]:
    """The token that u falls on, by the rule of `minserve.sampling.choose`; weights need no sum of 1."""
    cumulative, possible = weights.cumsum(-1), weights > 0
    target = u.to(torch.float64)[:, None] * cumulative[:, -1:]
    hit = (cumulative > target) & possible
    last = weights.shape[1] - 1 - possible.flip(-1).int().argmax(-1)  # rounding may leave u beyond all of them
    return torch.where(hit.any(-1), hit.int().argmax(-1), last)
