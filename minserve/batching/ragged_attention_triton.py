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


@triton.jit
def vector_offset(token, head, heads, HEAD_DIM: tl.constexpr):
    """Where one head of one token begins in packed queries, keys or values."""
    return (token.to(tl.int64) * heads + head) * HEAD_DIM


@triton.jit
def ragged_attention_kernel(
    q, k, v, row_starts, tile_rows, tile_starts, out, lse, num_rows, heads, kv_heads,
    HEAD_DIM: tl.constexpr, SCALE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """One program attends from one tile of a row's queries, for one head, to the row's keys up to the tile's last."""
    tile, head = tl.program_id(0), tl.program_id(1)
    row = tl.load(tile_rows + tile)
    if row < num_rows:
        start, stop = tl.load(row_starts + row), tl.load(row_starts + row + 1)
        first = start + (tile - tl.load(tile_starts + row)) * QUERIES
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
        tl.store(lse + query.to(tl.int64) * heads + head, peak + tl.log(total), mask=query < stop)


def ragged_attention(
    q: Float[Tensor, "tokens heads head_dim"],
    k: Float[Tensor, "tokens kv_heads head_dim"],
    v: Float[Tensor, "tokens kv_heads head_dim"],
    row_starts: Int[Tensor, " rows_plus_1"],
    *,
    out: Float[Tensor, "tokens heads head_dim"] | None = None,
    block_queries: int = 64,
    block_keys: int = 32,
) -> tuple[Float[Tensor, "tokens heads head_dim"], Float[Tensor, "tokens heads"]]:
    """Attend inside each row; arguments and results as the reference's, `minserve.batching.ragged_attention`.

    Arguments:
        out: where the attention goes, a new tensor unless given.
        block_queries, block_keys: the size of a tile, powers of two from 16 on. They change the order of sums, so a
            row's last bits; what else is in the batch does not.
    Changes: `out`. Nothing waits for the GPU, so row_starts is believed; no gradient flows.
    Errors: InvalidValue for tensors that differ in dtype or blocks of another size; MissingRequirement without a GPU.
    """
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    q, k, v, row_starts = (x.contiguous() for x in (q, k, v, row_starts))
    _check({"q": q, "k": k, "v": v, "out": out}, {"block_queries": block_queries, "block_keys": block_keys})
    (num_tokens, heads, head_dim), num_rows = q.shape, len(row_starts) - 1
    lse = q.new_empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))
    # A row has as many tiles as it needs. How many that are only the GPU knows: some tiles at the end have no row.
    row_tiles = (row_starts.diff() + block_queries - 1) // block_queries
    stops = row_tiles.cumsum(0)
    tiles = torch.arange(num_tokens // block_queries + num_rows, device=q.device)
    tile_rows = torch.searchsorted(stops, tiles, right=True)
    if num_tokens:
        ragged_attention_kernel[(len(tiles), heads)](
            q, k, v, row_starts, tile_rows, stops - row_tiles, out, lse, num_rows, heads, k.shape[1],
            HEAD_DIM=head_dim, SCALE=head_dim**-0.5, QUERIES=block_queries, KEYS=block_keys,
            DIM=max(SMALLEST_BLOCK, triton.next_power_of_2(head_dim)),
        )  # fmt: skip
    return out, lse


def _check(numbers: dict[str, Tensor], blocks: dict[str, int]) -> None:
    """Refuse what the kernel cannot be launched on."""
    q = numbers["q"]
    for name, tensor in numbers.items():
        if tensor.dtype != q.dtype:
            raise InvalidValue(f"{name}.dtype", tensor.dtype, f"{q.dtype}, as q is")
    if not numbers["out"].is_contiguous():
        raise InvalidValue("out.stride()", numbers["out"].stride(), "that of a contiguous tensor")
    for name, size in blocks.items():
        if size < SMALLEST_BLOCK or size & (size - 1):
            raise InvalidValue(name, size, f"a power of two from {SMALLEST_BLOCK} on")
    if not q.is_cuda and isinstance(ragged_attention_kernel, triton.JITFunction):
        raise MissingRequirement("a GPU", "a compiled kernel", "set TRITON_INTERPRET=1, or use the reference")
