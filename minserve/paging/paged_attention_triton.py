"""The kernels of `paged_attention` and `write_pages`: every address goes through the page table.

A program walks over its row's context with an online softmax (see `minserve.batching.ragged_attention_triton`). What is
new is where it looks: token t lies in page page_tables[row, t // page_size], so each lane loads a page id first and
the key after it. Offsets into a pool are 64 bits wide: it passes 2^31 numbers long before it fills a GPU's memory.

A decode row has one query, hence few programs, and perhaps a long context. Its context is split into parts for programs
that run side by side, and the parts are merged by their log-sum-exp, as `minserve.attention_merge` does it.
Dao, Haziza, Massa, Sizov: Flash-Decoding (2023), https://pytorch.org/blog/flash-decoding/
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
    raise MissingRequirement("triton", "a kernel, paged_attention_triton,", "pip install 'minserve[triton]'") from error

SMALLEST_BLOCK = 16  # of a matrix product on tensor cores, along each side
NUM_STAGES = 2  # blocks of keys and values under way: three would not fit into the shared memory of every GPU
MAX_BLOCK = 1024


@triton.jit
def vector_offset(token, head, heads, SIZE: tl.constexpr):
    """Where the numbers of one head of one token, or slot, begin: a pool is a packed tensor of slots."""
    return (token.to(tl.int64) * heads + head) * SIZE


@triton.jit
def slot_of(place, page, page_size):
    """The slot of the token at some place in its row, which lies in that page."""
    return page.to(tl.int64) * page_size + place % page_size


@triton.jit
def paged_attention_kernel(
    q, k_pages, v_pages, page_tables, row_starts, context_lens, tile_rows, tile_starts, outs, lses,
    num_rows, num_tokens, max_pages, page_size, part_tokens, heads, kv_heads,
    HEAD_DIM: tl.constexpr, SCALE: tl.constexpr, LANES: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """One program attends from one tile of a row's queries to one part of its context, for the heads of one KV head."""
    tile, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, group = tl.load(tile_rows + tile), heads // kv_heads
    if row < num_rows:
        start, context = tl.load(row_starts + row).to(tl.int32), tl.load(context_lens + row).to(tl.int32)
        num_queries, at_once = tl.load(row_starts + row + 1).to(tl.int32) - start, LANES // group
        before = context - num_queries  # tokens that are no queries
        first = (tile - tl.load(tile_starts + row).to(tl.int32)) * at_once
        lane, dim = tl.arange(0, LANES), tl.arange(0, DIM)
        query, head = first + lane // group, kv_head * group + lane % group
        asks = (lane < at_once * group) & (query < num_queries)
        seen = before + tl.minimum(first + at_once, num_queries)  # tokens, by the tile's last query
        # A row of several tiles has programs enough: its first part is the whole, and the others are empty.
        length = tl.where(num_queries > at_once, seen, part_tokens)
        begin = part * length
        end = tl.minimum(begin + length, seen)
        if begin < end:
            here = vector_offset(start + query, head, heads, HEAD_DIM)[:, None] + dim[None, :]
            exists = asks[:, None] & (dim < HEAD_DIM)[None, :]
            queries = tl.load(q + here, mask=exists, other=0)
            wide = lses.dtype.element_ty
            peak = tl.full((LANES,), float("-inf"), wide)
            total = tl.full((LANES,), 0, wide)
            mixed = tl.full((LANES, DIM), 0, wide)
            table = page_tables + row.to(tl.int64) * max_pages
            for at in range(begin, end, KEYS):
                place = at + tl.arange(0, KEYS)
                page = tl.load(table + place // page_size, mask=place < end, other=0)
                slot = slot_of(place, page, page_size)
                there = vector_offset(slot, kv_head, kv_heads, HEAD_DIM)[:, None] + dim[None, :]
                known = (place < end)[:, None] & (dim < HEAD_DIM)[None, :]
                keys = tl.load(k_pages + there, mask=known, other=0)
                values = tl.load(v_pages + there, mask=known, other=0)
                scores = tl.dot(queries, tl.trans(keys), input_precision="ieee", out_dtype=wide) * SCALE
                visible = (place < end)[None, :] & (place[None, :] <= before + query[:, None])
                scores = tl.where(visible, scores, float("-inf"))
                higher = tl.maximum(peak, tl.max(scores, 1))
                level = tl.where(higher == float("-inf"), 0, higher)  # a query may see no key of a later part
                weights, shrink = tl.exp(scores - level[:, None]), tl.exp(peak - level)
                total = total * shrink + tl.sum(weights, 1)
                fresh = tl.dot(weights.to(values.dtype), values, input_precision="ieee", out_dtype=wide)
                mixed, peak = mixed * shrink[:, None] + fresh, higher
            total = tl.where(total > 0, total, 1)
            mixed = (mixed / total[:, None]).to(outs.dtype.element_ty)
            target = part.to(tl.int64) * num_tokens + start + query  # parts lie one after the other
            to = vector_offset(target, head, heads, HEAD_DIM)[:, None] + dim[None, :]
            tl.store(outs + to, mixed, mask=exists)
            tl.store(lses + vector_offset(target, head, heads, 1), peak + tl.log(total), mask=asks)


@triton.jit
def merge_parts_kernel(
    outs, lses, out, lse, num_parts, num_tokens, heads,
    HEAD_DIM: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """One program merges the parts of one token. A part with lse = -inf holds nothing, and is not looked at."""
    token, head, dim = tl.program_id(0), tl.arange(0, HEADS), tl.arange(0, DIM)
    wide = lses.dtype.element_ty
    peak = tl.full((HEADS,), float("-inf"), wide)
    total = tl.full((HEADS,), 0, wide)
    mixed = tl.full((HEADS, DIM), 0, wide)
    target = token.to(tl.int64)
    for _ in range(num_parts):
        which = vector_offset(target, head, heads, 1)
        found = tl.load(lses + which, mask=head < heads, other=float("-inf"))
        known = (found > float("-inf"))[:, None] & (dim < HEAD_DIM)[None, :]
        values = tl.load(outs + which[:, None] * HEAD_DIM + dim[None, :], mask=known, other=0)
        higher = tl.maximum(peak, found)
        level = tl.where(higher == float("-inf"), 0, higher)
        weight, shrink = tl.exp(found - level), tl.exp(peak - level)
        total = total * shrink + weight
        mixed, peak = mixed * shrink[:, None] + weight[:, None] * values, higher
        target += num_tokens
    total = tl.where(total > 0, total, 1)
    which = vector_offset(token, head, heads, 1)
    exists = (head < heads)[:, None] & (dim < HEAD_DIM)[None, :]
    mixed = (mixed / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + which[:, None] * HEAD_DIM + dim[None, :], mixed, mask=exists)
    tl.store(lse + which, peak + tl.log(total), mask=head < heads)


def paged_attention(
    q: Float[Tensor, "tokens heads head_dim"],
    k_pages: Float[Tensor, "pages page_size kv_heads head_dim"],
    v_pages: Float[Tensor, "pages page_size kv_heads head_dim"],
    page_tables: Int[Tensor, "rows max_pages"],
    row_starts: Int[Tensor, " rows_plus_1"],
    context_lens: Int[Tensor, " rows"],
    *,
    out: Float[Tensor, "tokens heads head_dim"] | None = None,
    lse: Float[Tensor, "tokens heads"] | None = None,
    part_tokens: int = 512,
    block_keys: int | None = None,
) -> tuple[Float[Tensor, "tokens heads head_dim"], Float[Tensor, "tokens heads"]]:
    """Attend through page tables; arguments and results as the reference's, `minserve.paging.paged_attention`.

    Arguments:
        out, lse: where the results go, new tensors unless given.
        part_tokens: the context of a row with few queries is split into parts of so many tokens. The widest page table
            decides how many parts there may be, and so the scratch memory: let it be no wider than the longest context.
        block_keys: how many keys a program looks at in one go: a power of two from 16 on, and as many as registers
            hold unless given.
    Changes: `out` and `lse`. Nothing waits for the GPU, so page ids and lengths are believed. What else is in the
    batch does not change a row's bits.
    Errors: InvalidValue for tensors that differ in dtype, pools that are not contiguous, or sizes out of range;
    MissingRequirement without a GPU.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    out = q.new_empty(q.shape) if out is None else out
    lse = q.new_empty(q.shape[:2], dtype=wide) if lse is None else lse
    _check({"k_pages": k_pages, "v_pages": v_pages, "out": out}, q.dtype)
    _check({"lse": lse}, wide)
    if part_tokens < 1:
        raise InvalidValue("part_tokens", part_tokens, "at least 1")
    block_keys = block_keys or _block_keys(q.element_size())
    if block_keys < SMALLEST_BLOCK or block_keys & (block_keys - 1):
        raise InvalidValue("block_keys", block_keys, f"a power of two from {SMALLEST_BLOCK} on")
    num_parts = triton.cdiv(page_tables.shape[1] * k_pages.shape[1], part_tokens)
    if not num_parts or not len(q):
        return out.zero_(), lse.fill_(-torch.inf)
    split = num_parts > 1
    outs = q.new_empty(num_parts, *q.shape, dtype=wide) if split else out.zero_()
    lses = q.new_full((num_parts, *lse.shape), -torch.inf, dtype=wide) if split else lse.fill_(-torch.inf)
    where = (page_tables.contiguous(), row_starts.contiguous(), context_lens.contiguous())
    _attend_to_parts(q.contiguous(), k_pages, v_pages, *where, outs, lses, num_parts, part_tokens, block_keys)
    if split:
        (num_tokens, heads, head_dim), padded = q.shape, _padded(q.shape[2])
        merge_parts_kernel[(num_tokens,)](
            outs, lses, out, lse, num_parts, num_tokens, heads,
            HEAD_DIM=head_dim, HEADS=triton.next_power_of_2(heads), DIM=padded,
        )  # fmt: skip
    return out, lse


def _attend_to_parts(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, page_tables: Tensor, row_starts: Tensor, context_lens: Tensor,
    outs: Tensor, lses: Tensor, num_parts: int, part_tokens: int, block_keys: int,
) -> None:  # fmt: skip
    """Launch the kernel for every tile, KV head and part. Changes: outs and lses, where a part has keys."""
    (num_tokens, heads, head_dim), (_, page_size, kv_heads, _) = q.shape, k_pages.shape
    num_rows, max_pages = page_tables.shape
    lanes = max(SMALLEST_BLOCK, triton.next_power_of_2(heads // kv_heads))
    at_once = lanes // (heads // kv_heads)
    # A row has as many tiles as it needs. How many that are only the GPU knows: some tiles at the end have no row.
    row_tiles = (row_starts.diff() + at_once - 1) // at_once
    stops = row_tiles.cumsum(0)
    tiles = torch.arange(num_tokens // at_once + num_rows, device=q.device)
    tile_rows = torch.searchsorted(stops, tiles, right=True)
    paged_attention_kernel[(len(tiles), kv_heads, num_parts)](
        q, k_pages, v_pages, page_tables, row_starts, context_lens, tile_rows, stops - row_tiles, outs, lses,
        num_rows, num_tokens, max_pages, page_size, part_tokens, heads, kv_heads,
        HEAD_DIM=head_dim, SCALE=head_dim**-0.5, LANES=lanes, KEYS=block_keys, DIM=_padded(head_dim),
        num_stages=NUM_STAGES,
    )  # fmt: skip


@triton.jit
def write_pages_kernel(k, v, k_pages, v_pages, slots, channels, BLOCK: tl.constexpr):
    """One program copies one block of one token's keys and values into the token's slot."""
    token = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists, slot = channel < channels, tl.load(slots + token)
    if slot >= 0:
        source = vector_offset(token, 0, channels, 1) + channel
        target = vector_offset(slot, 0, channels, 1) + channel
        tl.store(k_pages + target, tl.load(k + source, mask=exists, other=0), mask=exists)
        tl.store(v_pages + target, tl.load(v + source, mask=exists, other=0), mask=exists)


def write_pages(
    k: Float[Tensor, "tokens kv_heads head_dim"],
    v: Float[Tensor, "tokens kv_heads head_dim"],
    k_pages: Float[Tensor, "pages page_size kv_heads head_dim"],
    v_pages: Float[Tensor, "pages page_size kv_heads head_dim"],
    slots: Int[Tensor, " tokens"],
) -> None:
    """Write keys and values into their slots; arguments as the reference's, `minserve.paging.paged_attention`.

    Changes: the given slots of k_pages and v_pages.
    Errors: InvalidValue for tensors that differ in dtype or pools that are not contiguous; MissingRequirement without
    a GPU.
    """
    k, v, slots = k.contiguous(), v.contiguous(), slots.contiguous()
    _check({"k": k, "v": v, "k_pages": k_pages, "v_pages": v_pages}, k.dtype)
    num_tokens, channels = len(k), k[0].numel() if len(k) else 0
    if num_tokens:
        block = min(MAX_BLOCK, triton.next_power_of_2(channels))
        grid = (num_tokens, triton.cdiv(channels, block))
        write_pages_kernel[grid](k, v, k_pages, v_pages, slots, channels, BLOCK=block)


def _block_keys(number_bytes: int) -> int:
    """How many keys, and values, registers hold without spilling."""
    return 32 if number_bytes == 2 else SMALLEST_BLOCK


def _padded(head_dim: int) -> int:
    """How many lanes a vector takes."""
    return max(SMALLEST_BLOCK, triton.next_power_of_2(head_dim))


def _check(tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Refuse what no kernel here can be launched on."""
    for name, tensor in tensors.items():
        if tensor.dtype != dtype:
            raise InvalidValue(f"{name}.dtype", tensor.dtype, f"{dtype}, to go with the other tensors")
        if not tensor.is_contiguous():
            raise InvalidValue(f"{name}.stride()", tensor.stride(), "that of a contiguous tensor")
        if not tensor.is_cuda and isinstance(paged_attention_kernel, triton.JITFunction):
            raise MissingRequirement("a GPU", "a compiled kernel", "set TRITON_INTERPRET=1, or use the reference")
