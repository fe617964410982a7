"""The kernel of `ragged_attention`: the online softmax, one program for each head and tile of queries.

The scores of a row never exist as a whole. A program walks over its row's keys, a block at a time, and keeps for each
query the highest score so far, the sum of exponentials, and the mixed values; when a higher score turns up, sum and
values shrink by exp(old - new). What is left over at the end is what one softmax over all keys would have given.

    peak' = max(peak, scores)      total' = total e^(peak - peak') + sum e^(scores - peak')      mixed' likewise

Dao et al., FlashAttention (arXiv 2205.14135), algorithm 1; Milakov and Gimelshein (arXiv 1805.02867).
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
    raise MissingRequirement(
        "triton", "a kernel, ragged_attention_triton,", "pip install 'minserve[triton]'"
    ) from error

SMALLEST_BLOCK = 16  # of a matrix product on tensor cores, along each side
NUM_STAGES = 2  # blocks of keys and values under way: three would not fit into the shared memory of every GPU


@triton.jit
def vector_offset(token, head, heads, SIZE: tl.constexpr):
    """Where the numbers of one head of one token begin in a packed tensor, SIZE of each head."""
    return (token.to(tl.int64) * heads + head) * SIZE


@triton.jit
def ragged_attention_kernel(
    q, k, v, row_starts, tile_rows, tile_starts, out, lse, num_rows, heads, kv_heads,
    HEAD_DIM: tl.constexpr, SCALE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """One program attends from one tile of a row's queries, for one head, to the row's keys up to the tile's last."""
    tile, head = tl.program_id(0), tl.program_id(1)
    row = tl.load(tile_rows + tile)
    if row < num_rows:
        start, stop = tl.load(row_starts + row).to(tl.int32), tl.load(row_starts + row + 1).to(tl.int32)
        first = start + (tile - tl.load(tile_starts + row).to(tl.int32)) * QUERIES
        query, dim = first + tl.arange(0, QUERIES), tl.arange(0, DIM)
        exists = (query < stop)[:, None] & (dim < HEAD_DIM)[None, :]
        here = vector_offset(query, head, heads, HEAD_DIM)[:, None] + dim[None, :]
        queries = tl.load(q + here, mask=exists, other=0)
        wide = lse.dtype.element_ty
        peak = tl.full((QUERIES,), float("-inf"), wide)
        total = tl.full((QUERIES,), 0, wide)
        mixed = tl.full((QUERIES, DIM), 0, wide)
        for begin in range(start, tl.minimum(first + QUERIES, stop), KEYS):
            key = begin + tl.arange(0, KEYS)
            there = vector_offset(key, head // (heads // kv_heads), kv_heads, HEAD_DIM)[:, None] + dim[None, :]
            known = (key < stop)[:, None] & (dim < HEAD_DIM)[None, :]
            keys = tl.load(k + there, mask=known, other=0)
            values = tl.load(v + there, mask=known, other=0)
            scores = tl.dot(queries, tl.trans(keys), input_precision="ieee", out_dtype=wide) * SCALE
            # The first block holds the row's first key, which every query sees: from there on the peak is a number.
            scores = tl.where(key[None, :] <= query[:, None], scores, float("-inf"))
            higher = tl.maximum(peak, tl.max(scores, 1))
            weights = tl.exp(scores - higher[:, None])
            shrink = tl.exp(peak - higher)
            total = total * shrink + tl.sum(weights, 1)
            fresh = tl.dot(weights.to(values.dtype), values, input_precision="ieee", out_dtype=wide)
            mixed, peak = mixed * shrink[:, None] + fresh, higher
        tl.store(out + here, (mixed / total[:, None]).to(queries.dtype), mask=exists)
        tl.store(lse + vector_offset(query, head, heads, 1), peak + tl.log(total), mask=query < stop)


def ragged_attention(
    q: Float[Tensor, "tokens heads head_dim"],
    k: Float[Tensor, "tokens kv_heads head_dim"],
    v: Float[Tensor, "tokens kv_heads head_dim"],
    row_starts: Int[Tensor, " rows_plus_1"],
    *,
    out: Float[Tensor, "tokens heads head_dim"] | None = None,
    lse: Float[Tensor, "tokens heads"] | None = None,
    block_queries: int | None = None,
    block_keys: int | None = None,
) -> tuple[Float[Tensor, "tokens heads head_dim"], Float[Tensor, "tokens heads"]]:
    """Attend inside each row; arguments and results as the reference's, `minserve.batching.ragged_attention`.

    Arguments:
        out, lse: where the results go, new tensors unless given.
        block_queries, block_keys: the queries of a program, and the keys that it looks at in one go; powers of two
            from 16 on, and as many as registers hold unless given.
    Changes: `out` and `lse`. Nothing waits for the GPU, so row_starts is believed. No gradient flows. What else is in
    the batch does not change a row's bits.
    Errors: InvalidValue for tensors that differ in dtype or blocks of another size; MissingRequirement without a GPU.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    out = q.new_empty(q.shape) if out is None else out
    lse = q.new_empty(q.shape[:2], dtype=wide) if lse is None else lse
    q, k, v, row_starts = (x.contiguous() for x in (q, k, v, row_starts))
    _check({"q": q, "k": k, "v": v, "out": out}, q.dtype)
    _check({"lse": lse}, wide)
    queries, keys, dim = _blocks(q.shape[-1], q.element_size())
    queries, keys = block_queries or queries, block_keys or keys
    for name, size in (("block_queries", queries), ("block_keys", keys)):
        if size < SMALLEST_BLOCK or size & (size - 1):
            raise InvalidValue(name, size, f"a power of two from {SMALLEST_BLOCK} on")
    (num_tokens, heads, head_dim), num_rows = q.shape, len(row_starts) - 1
    # A row has as many tiles as it needs. How many that are only the GPU knows: some tiles at the end have no row.
    row_tiles = (row_starts.diff() + queries - 1) // queries
    stops = row_tiles.cumsum(0)
    tiles = torch.arange(num_tokens // queries + num_rows, device=q.device)
    tile_rows = torch.searchsorted(stops, tiles, right=True)
    if num_tokens:
        ragged_attention_kernel[(len(tiles), heads)](
            q, k, v, row_starts, tile_rows, stops - row_tiles, out, lse, num_rows, heads, k.shape[1],
            HEAD_DIM=head_dim, SCALE=head_dim**-0.5, QUERIES=queries, KEYS=keys, DIM=dim,
            num_stages=NUM_STAGES,
        )  # fmt: skip
    return out, lse


def _blocks(head_dim: int, number_bytes: int) -> tuple[int, int, int]:
    """Queries and keys of a tile, and lanes of a vector: powers of two that registers hold without spilling."""
    dim = max(SMALLEST_BLOCK, triton.next_power_of_2(head_dim))
    queries = min(64, 16384 // (dim * number_bytes))
    return max(SMALLEST_BLOCK, queries), 32 if number_bytes == 2 else SMALLEST_BLOCK, dim


def _check(tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Refuse what the kernel cannot be launched on."""
    for name, tensor in tensors.items():
        if tensor.dtype != dtype:
            raise InvalidValue(f"{name}.dtype", tensor.dtype, f"{dtype}, to go with the other tensors")
        if not tensor.is_contiguous():
            raise InvalidValue(f"{name}.stride()", tensor.stride(), "that of a contiguous tensor")
        if not tensor.is_cuda and isinstance(ragged_attention_kernel, triton.JITFunction):
            raise MissingRequirement("a GPU", "a compiled kernel", "set TRITON_INTERPRET=1, or use the reference")
