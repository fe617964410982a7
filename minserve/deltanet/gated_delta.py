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
    *,
    every_state: bool = False,
) -> tuple[
    Float[Tensor, "batch tokens value_heads value_dim"], Float[Tensor, "batch ... value_heads key_dim value_dim"]
]:
    """Run the rule one token after the other: the definition, and the way a decode step uses it.

    Arguments:
        q, k: queries (already scaled) and unit keys; each key head serves value_heads / key_heads value heads.
        v: values.
        g: log of the share of the state that survives the token, <= 0.
        beta: how much of the old value under k is replaced, in 0..1.
        state: what the sequence remembers before the first token (zeros at its start); it is not changed.
        every_state: give the state after every token, [batch tokens value_heads key_dim value_dim]: what drafted
            tokens need, of which nobody knows yet how many will be kept.
    Returns the outputs, in v's dtype, and the state after the last token, in `state`'s dtype. The arithmetic is in
    float32, or float64 where an input is.
    """
    if not v.shape[1]:
        return torch.zeros_like(v), state[:, None].expand(-1, 0, -1, -1, -1) if every_state else state
    dtype = _wide(v, g, state)
    q, k = (_to_value_heads(_as_dtype(x, dtype), v.shape[2]) for x in (q, k))
    memory, strength = _as_dtype(state, dtype), _as_dtype(beta, dtype)[..., None, None]
    decay = _as_dtype(g, dtype).exp()[..., None, None]
    wanted, known = strength * _as_dtype(v, dtype)[..., None, :], strength * decay
    tokens = (k[..., None, :], k[..., None], q[..., None, :], wanted, known, decay)  # vectors as rows or columns
    outs, states = [], []
    for row, column, query, want, know, keep in zip(*(x.unbind(1) for x in tokens), strict=True):
        found = row @ memory  # in the state that has not decayed yet
        delta = torch.addcmul(want, know, found, value=-1)
        memory = (memory * keep).addcmul_(column, delta)  # + k delta^T
        outs.append(query @ memory)
        if every_state:
            states.append(memory)
    memory = torch.stack(states, dim=1) if every_state else memory
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
    decay, to_end = cumulative.exp(), (cumulative[..., -1:] - cumulative).exp()
    # e^(G_i - G_j) for i >= j, else 0: a difference, for e^-G_j alone overflows, and so would this above the diagonal.
    above = torch.ones(chunk, chunk, dtype=torch.bool, device=v.device).triu(1)
    span = (cumulative[..., :, None] - cumulative[..., None, :]).masked_fill(above, -torch.inf).exp()
    # Row i of the system says: delta_i = beta_i (v_i - what the state holds under k_i after the deltas before it). It
    # is 1 on its diagonal, which the solver does not read.
    overlap = (k @ k.mT) * span * beta[..., None]
    solved = torch.linalg.solve_triangular(overlap, torch.diag_embed(beta), upper=False, unitriangular=True)
    return ChunkTerms(
        from_values=solved @ values,
        from_state=(solved * decay[..., None, :]) @ k,
        scores=(q @ k.mT) * span,
        q_decayed=q * decay[..., None],
        k_to_end=k * to_end[..., None],
        keep=decay[..., -1],
    )


def across_chunks(terms: ChunkTerms, state: Float[Tensor, "batch heads key_dim value_dim"]) -> tuple[Tensor, Tensor]:
    """Carry the state through the chunks, one after the other: outputs [batch tokens heads dim] and the last state."""
    memory, before, deltas = _as_dtype(state, terms.keep.dtype), [], []
    for from_values, from_state, k_to_end, keep in zip(*(x.unbind(2) for x in _for_state(terms)), strict=True):
        before.append(memory)
        delta, memory = _after_chunk(from_values, from_state, k_to_end, keep, memory)
        deltas.append(delta)
    out = _outputs(terms, torch.stack(before, dim=2), torch.stack(deltas, dim=2))
    return rearrange(out, "b h n c d -> b (n c) h d"), memory


def _for_state(terms: ChunkTerms) -> tuple[Tensor, ...]:
    """The terms without which the state cannot go on; outputs can wait for all chunks together."""
    return terms.from_values, terms.from_state, terms.k_to_end, terms.keep[..., None, None]


def _after_chunk(
    from_values: Tensor, from_state: Tensor, k_to_end: Tensor, keep: Tensor, memory: Tensor
) -> tuple[Tensor, Tensor]:
    """The deltas of a chunk, and the state after it."""
    delta = from_values - from_state @ memory
    return delta, torch.addcmul(k_to_end.mT @ delta, memory, keep)


def _outputs(terms: ChunkTerms, before: Tensor, deltas: Tensor) -> Tensor:
    """The outputs of chunks whose states before them are known: [batch heads chunks chunk value_dim]."""
    return terms.q_decayed @ before + terms.scores @ deltas


def gated_delta_ragged(
    q: Float[Tensor, "tokens key_heads key_dim"],
    k: Float[Tensor, "tokens key_heads key_dim"],
    v: Float[Tensor, "tokens value_heads value_dim"],
    g: Float[Tensor, "tokens value_heads"],
    beta: Float[Tensor, "tokens value_heads"],
    state: Float[Tensor, "rows value_heads key_dim value_dim"],
    row_starts: Int[Tensor, " rows_plus_1"],
    chunk: int = 32,
    *,
    every_state: bool = False,
) -> tuple[Float[Tensor, "tokens value_heads value_dim"], Float[Tensor, "states value_heads key_dim value_dim"]]:
    """Run the rule on the packed rows of a step, each from its own state: single tokens together, long rows in chunks.

    Arguments:
        q, k, v, g, beta: as in `gated_delta_recurrent`, the rows' tokens packed.
        state: one per row; an empty row gets its own back.
        row_starts: where each row begins in the packing, and the end.
        chunk: tokens per chunk of rows longer than one token.
        every_state: give a state for every token instead of every row, packed as the tokens are. It is computed token
            by token and meant for short rows: a state is as large as hundreds of tokens' keys and values.
    Returns the outputs, packed, and the state of each row after its last token. Nothing is changed in place.
    """
    tokens, num_rows = (q, k, v, g, beta), len(state)
    if len(v) == num_rows and row_starts.tolist() == list(range(num_rows + 1)):  # every row is one token
        out, new_state = gated_delta_recurrent(*(x[:, None] for x in tokens), state)
        return out[:, 0], new_state
    lengths = row_starts.diff()
    if every_state:
        return _run_with_every_state(tokens, row_starts, lengths, state)
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
    counts = (first[:, None] < lengths).sum(1).tolist()
    memory, before, deltas = _as_dtype(state[rows], terms.keep.dtype), [], []
    for of_chunks in zip(*(x.squeeze(2).split(counts) for x in _for_state(terms)), strict=True):
        count = len(of_chunks[0])
        state[rows[count : len(memory)]] = _as_dtype(memory[count:], state.dtype)  # the rows that have no further chunk
        before.append(memory[:count])
        delta, memory = _after_chunk(*of_chunks, memory[:count])
        deltas.append(delta)
    state[rows[: len(memory)]] = _as_dtype(memory, state.dtype)
    outs = _outputs(terms, torch.cat(before)[:, :, None], torch.cat(deltas)[:, :, None])
    out[address[exists]] = _as_dtype(rearrange(outs, "n h 1 c d -> n c h d")[exists], out.dtype)


def _run_with_every_state(
    tokens: tuple[Tensor, ...], row_starts: Tensor, lengths: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Run rows token by token, equally long ones together."""
    counts = lengths.tolist()
    if min(counts) == max(counts) > 0:
        rows = (x.unflatten(0, (len(counts), counts[0])) for x in tokens)
        outs, states = gated_delta_recurrent(*rows, state, every_state=True)
        return outs.flatten(0, 1), states.flatten(0, 1)
    out, states = torch.zeros_like(tokens[2]), state.new_empty(len(tokens[2]), *state.shape[1:])
    for length in {*counts} - {0}:
        rows = (lengths == length).nonzero().flatten()
        at = row_starts[rows][:, None] + torch.arange(length, device=rows.device)
        out[at], states[at] = gated_delta_recurrent(*(x[at] for x in tokens), state[rows], every_state=True)
    return out, states


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
    pad = -x.shape[1] % chunk
    x = F.pad(x, (0, 0) * (x.ndim - 2) + (0, pad)) if pad else x
    return rearrange(x, "b (n c) h ... -> b h n c ...", c=chunk).contiguous()  # else each product copies it anew
