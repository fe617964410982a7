"""The gated delta rule, token by token and in chunks: two forms of one function.

    S <- e^g S;   delta = beta (v - k^T S);   S <- S + k delta^T;   o = q^T S

S [key_dim, value_dim] is all that a head remembers. g <= 0 forgets, beta in (0, 1) says how firmly the value found
under k is replaced by v. The chunked form computes the deltas of a whole chunk as one triangular system (the WY, or UT,
transform), so that prefill is a handful of matrix products. Yang, Kautz, Hatamizadeh: Gated Delta Networks
(arXiv 2412.06464), section 3.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F


def gated_delta_recurrent(
    q: Float[Tensor, "batch tokens key_heads key_dim"],
    k: Float[Tensor, "batch tokens key_heads key_dim"],
    v: Float[Tensor, "batch tokens value_heads value_dim"],
    g: Float[Tensor, "batch tokens value_heads"],
    beta: Float[Tensor, "batch tokens value_heads"],
    state: Float[Tensor, "batch value_heads key_dim value_dim"],
) -> tuple[Float[Tensor, "batch tokens value_heads value_dim"], Float[Tensor, "batch value_heads key_dim value_dim"]]:
    """Run the rule one token after the other: the definition, and the way a decode step uses it.

    Arguments:
        q, k: queries (already scaled) and unit keys; each key head serves value_heads / key_heads value heads.
        v: values.
        g: log of the share of the state that survives the token, <= 0.
        beta: how much of the old value under k is replaced, in 0..1.
        state: what the sequence remembers before the first token (zeros at its start); it is not changed.
    Returns the outputs, in v's dtype, and the state after the last token, in `state`'s dtype. The arithmetic is in
    float32, or float64 where an input is.
    """
    if not v.shape[1]:
        return torch.zeros_like(v), state
    dtype = _wide(v, g, state)
    q, k = (_to_value_heads(_as_dtype(x, dtype), v.shape[2]) for x in (q, k))
    values, memory = _as_dtype(v, dtype), _as_dtype(state, dtype)
    decay, strength = _as_dtype(g, dtype).exp()[..., None, None], _as_dtype(beta, dtype)[..., None]
    outs = []
    for t in range(v.shape[1]):
        memory = memory * decay[:, t]
        found = (k[:, t, :, None] @ memory).squeeze(-2)
        delta = strength[:, t] * (values[:, t] - found)
        memory = torch.addcmul(memory, k[:, t, :, :, None], delta[:, :, None])  # + k delta^T, in one pass
        outs.append(q[:, t, :, None] @ memory)
    return _as_dtype(torch.cat(outs, dim=2).transpose(1, 2), v.dtype), _as_dtype(memory, state.dtype)


def gated_delta_chunked(
    q: Float[Tensor, "batch tokens key_heads key_dim"],
    k: Float[Tensor, "batch tokens key_heads key_dim"],
    v: Float[Tensor, "batch tokens value_heads value_dim"],
    g: Float[Tensor, "batch tokens value_heads"],
    beta: Float[Tensor, "batch tokens value_heads"],
    state: Float[Tensor, "batch value_heads key_dim value_dim"],
    chunk: int = 32,
) -> tuple[Float[Tensor, "batch tokens value_heads value_dim"], Float[Tensor, "batch value_heads key_dim value_dim"]]:
    """Run the rule a chunk of tokens at a time; same arguments and results as `gated_delta_recurrent`.

    The last chunk is padded with tokens that do nothing: k = 0, beta = 0, g = 0. A pad with g = 0 forgets nothing, so
    the running sum of g at the padded end is the one at the last real token, whatever the length.
    """
    if not v.shape[1]:
        return torch.zeros_like(v), state
    terms = within_chunks(q, k, v, g.to(_wide(v, g, state)), beta, chunk)
    out, memory = across_chunks(terms, state)
    return _as_dtype(out[:, : v.shape[1]], v.dtype), _as_dtype(memory, state.dtype)


class ChunkTerms(NamedTuple):
    """What can be said of every chunk before the state that enters it is known; all [batch heads chunks ...]."""

    from_values: Float[Tensor, "batch heads chunks chunk value_dim"]
    from_state: Float[Tensor, "batch heads chunks chunk key_dim"]
    scores: Float[Tensor, "batch heads chunks chunk chunk"]
    q_decayed: Float[Tensor, "batch heads chunks chunk key_dim"]
    k_to_end: Float[Tensor, "batch heads chunks chunk key_dim"]
    keep: Float[Tensor, "batch heads chunks"]


def within_chunks(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunk: int) -> ChunkTerms:
    """Do the part of the chunked form that needs no state, for all chunks at once; arguments as above.

    The deltas of a chunk are `from_values - from_state @ S`, its outputs `q_decayed @ S + scores @ deltas`, and the
    state after it `keep S + k_to_end^T @ deltas`.
    """
    dtype = _wide(v, g)
    q, k = (_to_value_heads(x, v.shape[2]) for x in (q, k))
    q, k, values, g, beta = (_into_chunks(_as_dtype(x, dtype), chunk) for x in (q, k, v, g, beta))
    cumulative = g.cumsum(-1)
    lower = torch.ones(chunk, chunk, dtype=torch.bool, device=v.device).tril()
    # e^(G_i - G_j) for i >= j; the difference is masked before exp, since above the diagonal it could overflow.
    span = (cumulative[..., :, None] - cumulative[..., None, :]).masked_fill(~lower, 0).exp() * lower
    keys_beta = k * beta[..., None]
    overlap = (keys_beta @ k.mT) * span * lower.tril(-1)
    # Row i of the system says: delta_i = beta_i (v_i - what the state holds under k_i after the deltas before it).
    right = torch.cat([values * beta[..., None], keys_beta * cumulative[..., None].exp()], dim=-1)
    unit = torch.eye(chunk, dtype=dtype, device=v.device)
    inverse = torch.linalg.solve_triangular(overlap.to(dtype), unit, upper=False, unitriangular=True)
    from_values, from_state = (inverse @ right).split([values.shape[-1], k.shape[-1]], dim=-1)
    return ChunkTerms(
        from_values,
        from_state,
        scores=(q @ k.mT) * span,
        q_decayed=q * cumulative[..., None].exp(),
        k_to_end=k * (cumulative[..., -1:] - cumulative)[..., None].exp(),
        keep=cumulative[..., -1].exp(),
    )


def across_chunks(terms: ChunkTerms, state: Float[Tensor, "batch heads key_dim value_dim"]) -> tuple[Tensor, Tensor]:
    """Carry the state through the chunks, one after the other: outputs [batch tokens heads dim] and the last state."""
    memory, outs = state.to(terms.keep.dtype), []
    for from_values, from_state, scores, q, k, keep in zip(*(x.unbind(2) for x in terms), strict=True):
        delta = from_values - from_state @ memory
        outs.append(q @ memory + scores @ delta)
        memory = memory * keep[..., None, None] + k.mT @ delta
    return rearrange(torch.stack(outs, dim=2), "b h c t d -> b (c t) h d"), memory


def gated_delta_ragged(
    q: Float[Tensor, "tokens key_heads key_dim"],
    k: Float[Tensor, "tokens key_heads key_dim"],
    v: Float[Tensor, "tokens value_heads value_dim"],
    g: Float[Tensor, "tokens value_heads"],
    beta: Float[Tensor, "tokens value_heads"],
    state: Float[Tensor, "rows value_heads key_dim value_dim"],
    row_starts: Int[Tensor, " rows_plus_1"],
    chunk: int = 32,
) -> tuple[Float[Tensor, "tokens value_heads value_dim"], Float[Tensor, "rows value_heads key_dim value_dim"]]:
    """Run the rule on the packed rows of a step, each from its own state: single tokens together, long rows in chunks.

    Arguments:
        q, k, v, g, beta: as in `gated_delta_recurrent`, the rows' tokens packed.
        state: one per row; an empty row gets its own back.
        row_starts: where each row begins in the packing, and the end.
        chunk: tokens per chunk of rows longer than one token.
    Returns the outputs, packed, and the state of each row after its last token. Nothing is changed in place.
    """
    tokens, lengths = (q, k, v, g, beta), row_starts.diff()
    if v.shape[0] == state.shape[0] and all(length == 1 for length in lengths.tolist()):
        out, new_state = gated_delta_recurrent(*(x[:, None] for x in tokens), state)
        return out[:, 0], new_state
    single, long = (lengths == 1).nonzero().flatten(), (lengths > 1).nonzero().flatten()
    out, new_state = torch.zeros_like(v), state.clone()
    if len(single):
        at = row_starts[single]
        outs, new_state[single] = gated_delta_recurrent(*(x[at, None] for x in tokens), state[single])
        out[at] = outs[:, 0]
    if len(long):
        long = long[lengths[long].argsort(descending=True, stable=True)]
        _run_long_rows(tokens, row_starts[long], lengths[long], min(chunk, int(lengths.max())), long, out, new_state)
    return out, new_state


def _run_long_rows(
    tokens: tuple[Tensor, ...], starts: Tensor, lengths: Tensor, chunk: int, rows: Tensor, out: Tensor, state: Tensor
) -> None:
    """Run rows, longest first, chunk by chunk side by side. Changes: `out` at their tokens, `state` at their rows."""
    first = torch.arange(0, int(lengths[0]), chunk, device=starts.device)
    # All first chunks, then the second ones of the rows that have one, and so on: [chunks chunk], where each token is.
    offset = (first[:, None] + torch.zeros_like(starts))[first[:, None] < lengths]
    row = torch.arange(len(starts), device=starts.device).expand(len(first), -1)[first[:, None] < lengths]
    place = offset[:, None] + torch.arange(chunk, device=starts.device)
    exists = place < lengths[row][:, None]
    address = torch.where(exists, starts[row][:, None] + place, starts[row][:, None])
    q, k, v, g, beta = (x[address] for x in tokens)
    k, g, beta = k * exists[..., None, None], g * exists[..., None], beta * exists[..., None]  # a pad does nothing
    terms = within_chunks(q, k, v, g.to(_wide(v, g, state)), beta, chunk)
    memory, begin, outs = state[rows], 0, []
    for count in (first[:, None] < lengths).sum(1).tolist():
        of_chunks = ChunkTerms(*(term[begin : begin + count] for term in terms))
        chunk_out, memory[:count] = across_chunks(of_chunks, memory[:count])
        outs.append(chunk_out)
        begin += count
    out[address[exists]] = _as_dtype(torch.cat(outs)[exists], out.dtype)
    state[rows] = memory


def _wide(*tensors: Tensor) -> torch.dtype:
    """The dtype of the arithmetic: float32, or float64 where one of the tensors has it."""
    return functools.reduce(torch.promote_types, (x.dtype for x in tensors), torch.float32)


def _as_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in a dtype; a `to` that has nothing to do costs as much as one of the rule's products."""
    return x if x.dtype == dtype else x.to(dtype)


def _to_value_heads(x: Float[Tensor, "batch tokens key_heads dim"], num_heads: int) -> Tensor:
    """Give every value head its key head: head h of num_heads reads key head h // (num_heads / key_heads)."""
    return x.repeat_interleave(num_heads // x.shape[2], dim=2)


def _into_chunks(x: Float[Tensor, "batch tokens heads *dim"], chunk: int) -> Tensor:
    """Pad the tokens to whole chunks with zeros and bring the heads in front: [batch heads chunks chunk *dim]."""
    x = rearrange(x, "b t h ... -> b h t ...")
    pad = -x.shape[2] % chunk
    x = F.pad(x, (0, 0) * (x.ndim - 3) + (0, pad))
    return x.unflatten(2, (-1, chunk))
