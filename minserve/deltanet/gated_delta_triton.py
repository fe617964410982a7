"""The kernels of `gated_delta_ragged`: a state that is carried through a loop over a row's tokens, or its chunks.

A program owns one row, one value head and a block of the state's columns; columns do not see each other. Short rows go
token by token, the state in registers. Long ones go in chunks, by two kernels that share the work as the reference's
`within_chunks` and `across_chunks` do: the first solves the triangular systems of all chunks side by side, for none of
that needs the state; the second goes from chunk to chunk, and has nothing but matrix products left to do.

    N = T (V - e^G K S);   O = e^G Q S + M N;   S <- e^(G_C) S + (e^(G_C - G) K)^T N

T = (I + A)^-1 diag(beta) and M = (Q K^T) e^(G_i - G_j) are the first kernel's. A state is too large to be an operand in
registers: the second one takes it in slices from the memory of the result, where the chunk before left it.
Which rows are long only the GPU knows, so both ways are launched, and programs that are not meant end at once.
Yang, Kautz, Hatamizadeh: Gated Delta Networks (arXiv 2412.06464), section 3.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from minserve.errors import InvalidValue, MissingRequirement

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise MissingRequirement("triton", "a kernel, gated_delta_triton,", "pip install 'minserve[triton]'") from error

SMALLEST_BLOCK = 16  # of a matrix product, along each side
CHUNKS = (16, 32, 64)
SLICE = 32  # keys of one product: whole ones would not fit into registers
STATE_NUMBERS = 4096  # of one program's part of the state, in registers
CHUNK_NUMBERS = 1024  # of one program's part of a chunk's values
NUM_STAGES = 1  # chunks under way: the next one waits for the state anyhow
NUM_WARPS = 8  # of a program that goes chunk by chunk: four would hold twice the numbers each, and spill


@triton.jit
def vector_offset(token, head, heads, SIZE: tl.constexpr):
    """Where the numbers of one head of one token begin."""
    return (token.to(tl.int64) * heads + head) * SIZE


@triton.jit
def state_offset(row, head, heads, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr):
    """Where the matrix of one head of one state begins."""
    return (row.to(tl.int64) * heads + head) * (KEY_DIM * VALUE_DIM)


@triton.jit
def delta_tokens_kernel(
    q, k, v, g, beta, state, row_starts, out, new_state, most_tokens, key_heads, value_heads,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr, EVERY: tl.constexpr,
):  # fmt: skip
    """One program runs a short row through some columns of one head's state, token by token."""
    row, head = tl.program_id(0), tl.program_id(1)
    start, stop = tl.load(row_starts + row).to(tl.int32), tl.load(row_starts + row + 1).to(tl.int32)
    if stop - start <= most_tokens:
        key, column = tl.arange(0, KEYS), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
        is_key, is_column = key < KEY_DIM, column < VALUE_DIM
        here, exists = key[:, None] * VALUE_DIM + column[None, :], is_key[:, None] & is_column[None, :]
        old = state + state_offset(row, head, value_heads, KEY_DIM, VALUE_DIM)
        memory = tl.load(old + here, mask=exists, other=0)
        wide = state.dtype.element_ty
        key_head, token = head // (value_heads // key_heads), start
        for _ in range(stop - start):
            shared = vector_offset(token, key_head, key_heads, KEY_DIM) + key
            own = vector_offset(token, head, value_heads, VALUE_DIM) + column
            gate = vector_offset(token, head, value_heads, 1)
            one_key = tl.load(k + shared, mask=is_key, other=0).to(wide)
            query = tl.load(q + shared, mask=is_key, other=0).to(wide)
            value = tl.load(v + own, mask=is_column, other=0).to(wide)
            memory *= tl.exp(tl.load(g + gate).to(wide))
            delta = tl.load(beta + gate).to(wide) * (value - tl.sum(one_key[:, None] * memory, 0))
            memory += one_key[:, None] * delta[None, :]
            answer = tl.sum(query[:, None] * memory, 0)
            tl.store(out + own, answer.to(out.dtype.element_ty), mask=is_column)
            if EVERY:
                new = new_state + state_offset(token, head, value_heads, KEY_DIM, VALUE_DIM)
                tl.store(new + here, memory, mask=exists)
            token += 1
        if not EVERY:
            new = new_state + state_offset(row, head, value_heads, KEY_DIM, VALUE_DIM)
            tl.store(new + here, memory, mask=exists)


@triton.jit
def within_chunks_kernel(
    q, k, g, beta, row_starts, chunk_rows, chunk_starts, solved, scores, num_rows, key_heads, value_heads,
    KEY_DIM: tl.constexpr, SLICE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One program solves the triangular system of one chunk and one head, and lays down its masked q k^T."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    row = tl.load(chunk_rows + chunk)
    if row < num_rows:
        lane, key = tl.arange(0, CHUNK), tl.arange(0, SLICE)
        first = tl.load(row_starts + row) + (chunk - tl.load(chunk_starts + row)) * CHUNK
        wide = solved.dtype.element_ty
        token = first + lane
        is_token = token < tl.load(row_starts + row + 1)
        here = vector_offset(token, head // (value_heads // key_heads), key_heads, KEY_DIM)[:, None] + key[None, :]
        overlap = tl.full((CHUNK, CHUNK), 0, wide)
        score = tl.full((CHUNK, CHUNK), 0, wide)
        for at in range(0, KEY_DIM, SLICE):
            exists = is_token[:, None] & (key < KEY_DIM - at)[None, :]
            keys = tl.load(k + here + at, mask=exists, other=0).to(wide)
            queries = tl.load(q + here + at, mask=exists, other=0).to(wide)
            overlap += tl.dot(keys, tl.trans(keys), input_precision="ieee", out_dtype=wide)
            score += tl.dot(queries, tl.trans(keys), input_precision="ieee", out_dtype=wide)
        gate = vector_offset(token, head, value_heads, 1)
        sums = tl.cumsum(tl.load(g + gate, mask=is_token, other=0).to(wide), 0)
        # e^(G_i - G_j) for i >= j, else 0: a difference, for e^-G_j overflows, and so would this above the diagonal.
        spans = tl.exp(tl.where(lane[:, None] >= lane[None, :], sums[:, None] - sums[None, :], float("-inf")))
        strength = tl.load(beta + gate, mask=is_token, other=0).to(wide)
        overlap = tl.where(lane[:, None] > lane[None, :], overlap * spans * strength[:, None], 0)
        # Forward substitution: row i of (I + overlap) X = diag(beta) needs the rows before it, which are solved.
        found = tl.where(lane[:, None] == lane[None, :], strength[:, None], 0)
        for i in range(1, CHUNK):
            weights = tl.sum(tl.where(lane[:, None] == i, overlap, 0), 0)  # 0 from column i on
            found -= tl.where(lane[:, None] == i, tl.sum(weights[:, None] * found, 0)[None, :], 0)
        to = vector_offset(chunk, head, value_heads, CHUNK * CHUNK) + lane[:, None] * CHUNK + lane[None, :]
        tl.store(solved + to, found)
        tl.store(scores + to, score * spans)


@triton.jit
def across_chunks_kernel(
    q, k, v, g, state, row_starts, chunk_starts, solved, scores, out, new_state, most_tokens, key_heads, value_heads,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, COLUMNS: tl.constexpr, SLICE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One program runs a long row through some columns of one head's state, chunk by chunk."""
    row, head = tl.program_id(0), tl.program_id(1)
    start, stop = tl.load(row_starts + row).to(tl.int32), tl.load(row_starts + row + 1).to(tl.int32)
    if stop - start > most_tokens:
        lane, key, column = tl.arange(0, CHUNK), tl.arange(0, SLICE), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
        wide = state.dtype.element_ty
        whose = state_offset(row, head, value_heads, KEY_DIM, VALUE_DIM)
        here, before, after = key[:, None] * VALUE_DIM + column[None, :], state + whose, new_state + whose
        token, chunk, key_head = start, tl.load(chunk_starts + row), head // (value_heads // key_heads)
        for _ in range(tl.cdiv(stop - start, CHUNK)):
            # Where a chunk begins is 64 bits wide; inside of it 32 will do, and take half the registers.
            keys_at = vector_offset(token, key_head, key_heads, KEY_DIM)
            keys_at += lane[:, None] * (key_heads * KEY_DIM) + key[None, :]
            own = vector_offset(token, head, value_heads, VALUE_DIM)
            own += lane[:, None] * (value_heads * VALUE_DIM) + column[None, :]
            square = vector_offset(chunk, head, value_heads, CHUNK * CHUNK)
            square += lane[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
            gate, is_token = vector_offset(token, head, value_heads, 1) + lane * value_heads, lane < stop - token
            has_value = is_token[:, None] & (column < VALUE_DIM)[None, :]
            sums = tl.cumsum(tl.load(g + gate, mask=is_token, other=0).to(wide), 0)
            last = tl.sum(tl.where(lane == CHUNK - 1, sums, 0), 0)  # a pad forgets nothing: the last real token's
            held = tl.full((CHUNK, COLUMNS), 0, wide)
            answers = tl.full((CHUNK, COLUMNS), 0, wide)
            for at in range(0, KEY_DIM, SLICE):
                has_key = is_token[:, None] & (key < KEY_DIM - at)[None, :]
                in_state = (key < KEY_DIM - at)[:, None] & (column < VALUE_DIM)[None, :]
                memory = tl.load(before + at * VALUE_DIM + here, mask=in_state, other=0)
                keys = tl.load(k + keys_at + at, mask=has_key, other=0).to(wide)
                queries = tl.load(q + keys_at + at, mask=has_key, other=0).to(wide)
                held += tl.dot(keys, memory, input_precision="ieee", out_dtype=wide)
                answers += tl.dot(queries, memory, input_precision="ieee", out_dtype=wide)
            values = tl.load(v + own, mask=has_value, other=0).to(wide) - held * tl.exp(sums)[:, None]
            deltas = tl.dot(tl.load(solved + square), values, input_precision="ieee", out_dtype=wide)
            answers *= tl.exp(sums)[:, None]
            answers += tl.dot(tl.load(scores + square), deltas, input_precision="ieee", out_dtype=wide)
            tl.store(out + own, answers.to(out.dtype.element_ty), mask=has_value)
            deltas *= tl.exp(last - sums)[:, None]
            tl.debug_barrier()  # other threads of this program may still be reading the state
            for at in range(0, KEY_DIM, SLICE):
                has_key = is_token[:, None] & (key < KEY_DIM - at)[None, :]
                in_state = (key < KEY_DIM - at)[:, None] & (column < VALUE_DIM)[None, :]
                memory = tl.load(before + at * VALUE_DIM + here, mask=in_state, other=0) * tl.exp(last)
                keys = tl.load(k + keys_at + at, mask=has_key, other=0).to(wide)
                memory += tl.dot(tl.trans(keys), deltas, input_precision="ieee", out_dtype=wide)
                tl.store(after + at * VALUE_DIM + here, memory, mask=in_state)
            tl.debug_barrier()  # and will now read what this one wrote
            token, chunk, before = token + CHUNK, chunk + 1, after


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
    out: Float[Tensor, "tokens value_heads value_dim"] | None = None,
    new_state: Float[Tensor, "states value_heads key_dim value_dim"] | None = None,
) -> tuple[Float[Tensor, "tokens value_heads value_dim"], Float[Tensor, "states value_heads key_dim value_dim"]]:
    """Run the rule on the rows of a step; arguments and results as the reference's, `minserve.deltanet.gated_delta`.

    Arguments:
        state: float32 or float64, and as wide as v and g; the arithmetic is in its dtype.
        chunk: 16, 32 or 64. Rows of up to `chunk` tokens go token by token, longer ones in chunks; with
            `every_state` all go token by token.
        out, new_state: where the results go, new tensors unless given; never `state` itself.
    Changes: `out` and `new_state`. Nothing waits for the GPU. What else is in the batch does not change a row's bits.
    Errors: InvalidValue for dtypes, strides or chunks that do not fit; MissingRequirement without a GPU.
    """
    num_tokens, num_rows = len(v), len(state)
    out = v.new_empty(v.shape) if out is None else out
    shape = (num_tokens if every_state else num_rows, *state.shape[1:])
    new_state = state.new_empty(shape) if new_state is None else new_state
    _check(v, g, state, out, new_state)
    if chunk not in CHUNKS:
        raise InvalidValue("chunk", chunk, f"one of {CHUNKS}")
    if not num_rows:
        return out, new_state
    q, k, v, g, beta, row_starts = (x.contiguous() for x in (q, k, v, g, beta, row_starts))
    most_tokens, heads, (key_dim, value_dim) = num_tokens if every_state else chunk, (k.shape[1], v.shape[1]), shape[2:]
    keys, columns = _token_blocks(key_dim, value_dim)
    delta_tokens_kernel[num_rows, heads[1], triton.cdiv(value_dim, columns)](
        q, k, v, g, beta, state, row_starts, out, new_state, most_tokens, *heads,
        KEY_DIM=key_dim, VALUE_DIM=value_dim, KEYS=keys, COLUMNS=columns, EVERY=every_state,
    )  # fmt: skip
    if num_tokens > most_tokens:
        of_chunks, columns = _within_chunks(q, k, g, beta, row_starts, chunk, state.dtype), _columns(value_dim, chunk)
        across_chunks_kernel[num_rows, heads[1], triton.cdiv(value_dim, columns)](
            q, k, v, g, state, row_starts, *of_chunks, out, new_state, most_tokens, *heads,
            KEY_DIM=key_dim, VALUE_DIM=value_dim, COLUMNS=columns, SLICE=SLICE, CHUNK=chunk,
            num_stages=NUM_STAGES, num_warps=NUM_WARPS,
        )  # fmt: skip
    return out, new_state


def _within_chunks(
    q: Tensor, k: Tensor, g: Tensor, beta: Tensor, row_starts: Tensor, chunk: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """What needs no state, of the chunks of all long rows: where each row's chunks begin, T and M of each chunk."""
    (num_tokens, heads), num_rows = g.shape, len(row_starts) - 1
    lengths = row_starts.diff()
    row_chunks = torch.where(lengths > chunk, (lengths + chunk - 1) // chunk, 0)
    stops = row_chunks.cumsum(0)
    # How many chunks there are only the GPU knows: each row's last may be short, so some at the end have no row.
    chunks = torch.arange(num_tokens // chunk + min(num_rows, num_tokens // chunk), device=q.device)
    solved, scores = (g.new_empty(len(chunks), heads, chunk, chunk, dtype=dtype) for _ in range(2))
    within_chunks_kernel[(len(chunks), heads)](
        q, k, g, beta, row_starts, torch.searchsorted(stops, chunks, right=True), stops - row_chunks, solved, scores,
        num_rows, k.shape[1], heads, KEY_DIM=k.shape[2], SLICE=SLICE, CHUNK=chunk, num_stages=NUM_STAGES,
    )  # fmt: skip
    return stops - row_chunks, solved, scores


def _token_blocks(key_dim: int, value_dim: int) -> tuple[int, int]:
    """Lanes for a key, and columns of the state, of a program that goes token by token."""
    keys = triton.next_power_of_2(key_dim)
    return keys, min(triton.next_power_of_2(value_dim), max(1, STATE_NUMBERS // keys))


def _columns(value_dim: int, chunk: int) -> int:
    """Columns of the state, of a program that goes chunk by chunk."""
    return max(SMALLEST_BLOCK, min(triton.next_power_of_2(value_dim), CHUNK_NUMBERS // chunk))


def _check(v: Tensor, g: Tensor, state: Tensor, out: Tensor, new_state: Tensor) -> None:
    """Refuse what no kernel here can be launched on."""
    wide = torch.promote_types(torch.promote_types(v.dtype, g.dtype), torch.float32)
    if torch.promote_types(wide, state.dtype) != state.dtype:
        raise InvalidValue("state.dtype", state.dtype, f"{wide}, to go with v and g")
    for name, tensor, dtype in (("out", out, v.dtype), ("new_state", new_state, state.dtype), ("state", state, None)):
        if dtype not in (None, tensor.dtype):
            raise InvalidValue(f"{name}.dtype", tensor.dtype, f"{dtype}, to go with the other tensors")
        if not tensor.is_contiguous():
            raise InvalidValue(f"{name}.stride()", tensor.stride(), "that of a contiguous tensor")
        if not tensor.is_cuda and isinstance(delta_tokens_kernel, triton.JITFunction):
            raise MissingRequirement("a GPU", "a compiled kernel", "set TRITON_INTERPRET=1, or use the reference")
