"""The kernels of `shared_prefix_attention`: attention to the shared pages, and the merging of it with the tails.

All queries see all of the shared pages, so a tile may be filled with queries of many rows: a block of keys is read once
and multiplied with up to 64 queries, where paged attention reads it again for every row. There is no mask but where the
prefix ends. Each row's tail is left to paged attention.

What is new is that two results of a query become one. They are merged as `minserve.attention_merge` does it, by the
online softmax: with a higher log-sum-exp, what was mixed so far shrinks by exp(old - new). Any number of results can be
merged so, and where queries are few, parts of the prefix go to programs that run side by side.
Juravsky et al., Hydragen: High-Throughput LLM Inference with Shared Prefixes (arXiv 2402.05099), section 3.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from minserve.errors import InvalidValue, MissingRequirement

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise MissingRequirement(
        "triton", "a kernel, shared_prefix_attention_triton,", "pip install 'minserve[triton]'"
    ) from error

SMALLEST_BLOCK = 16  # of a matrix product on tensor cores, along each side
NUM_STAGES = 2  # blocks of keys and values under way: three would not fit into the shared memory of every GPU
ENOUGH_PROGRAMS = 512  # to keep every processor of a GPU busy; more parts would only be more to merge


@triton.jit
def vector_offset(token, head, heads, SIZE: tl.constexpr):
    """Where the numbers of one head of one token, or slot, begin: a pool is a packed tensor of slots."""
    return (token.to(tl.int64) * heads + head) * SIZE


@triton.jit
def prefix_slot(place, page, page_size):
    """The slot of the token at some place in the prefix, which lies in that page."""
    return page.to(tl.int64) * page_size + place % page_size


@triton.jit
def prefix_attention_kernel(
    q, k_pages, v_pages, shared_pages, outs, lses,
    num_tokens, num_shared, page_size, part_tokens, heads, kv_heads,
    HEAD_DIM: tl.constexpr, SCALE: tl.constexpr, LANES: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """One program attends from one tile of all rows' queries to one part of the prefix, for the heads of a KV head."""
    tile, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group, dim = heads // kv_heads, tl.arange(0, DIM)
    lane = tile * LANES + tl.arange(0, LANES)
    token, head = lane // group, kv_head * group + lane % group
    asks = token < num_tokens
    exists = asks[:, None] & (dim < HEAD_DIM)[None, :]
    here = vector_offset(token, head, heads, HEAD_DIM)[:, None] + dim[None, :]
    queries = tl.load(q + here, mask=exists, other=0)
    wide = lses.dtype.element_ty
    peak = tl.full((LANES,), float("-inf"), wide)
    total = tl.full((LANES,), 0, wide)
    mixed = tl.full((LANES, DIM), 0, wide)
    begin = part * part_tokens
    end = tl.minimum(begin + part_tokens, num_shared)
    for at in range(begin, end, KEYS):
        place = at + tl.arange(0, KEYS)
        page = tl.load(shared_pages + place // page_size, mask=place < end, other=0)
        slot = prefix_slot(place, page, page_size)
        there = vector_offset(slot, kv_head, kv_heads, HEAD_DIM)[:, None] + dim[None, :]
        known = (place < end)[:, None] & (dim < HEAD_DIM)[None, :]
        keys = tl.load(k_pages + there, mask=known, other=0)
        values = tl.load(v_pages + there, mask=known, other=0)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee", out_dtype=wide) * SCALE
        scores = tl.where((place < end)[None, :], scores, float("-inf"))  # some key is known: the peak is a number
        higher = tl.maximum(peak, tl.max(scores, 1))
        weights, shrink = tl.exp(scores - higher[:, None]), tl.exp(peak - higher)
        total = total * shrink + tl.sum(weights, 1)
        fresh = tl.dot(weights.to(values.dtype), values, input_precision="ieee", out_dtype=wide)
        mixed, peak = mixed * shrink[:, None] + fresh, higher
    target = part.to(tl.int64) * num_tokens + token  # parts lie one after the other
    to = vector_offset(target, head, heads, HEAD_DIM)[:, None] + dim[None, :]
    tl.store(outs + to, mixed / total[:, None], mask=exists)
    tl.store(lses + vector_offset(target, head, heads, 1), peak + tl.log(total), mask=asks)


@triton.jit
def merge_prefix_kernel(
    tail, tail_lse, outs, lses, out, lse, num_parts, num_tokens, heads,
    HEAD_DIM: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """One program merges a token's tail with the parts of the prefix; -inf is the tail of a token that sees nothing."""
    token, head, dim = tl.program_id(0), tl.arange(0, HEADS), tl.arange(0, DIM)
    here, asks = vector_offset(token, head, heads, 1), head < heads
    exists = asks[:, None] & (dim < HEAD_DIM)[None, :]
    wide = lse.dtype.element_ty
    # A tail is one more part, of weight 1 beside its own log-sum-exp.
    peak = tl.load(tail_lse + here, mask=asks, other=0)
    total = tl.full((HEADS,), 1, wide)
    mixed = tl.load(tail + here[:, None] * HEAD_DIM + dim[None, :], mask=exists, other=0).to(wide)
    target = token.to(tl.int64)
    for _ in range(num_parts):
        which = vector_offset(target, head, heads, 1)
        found = tl.load(lses + which, mask=asks, other=0)
        values = tl.load(outs + which[:, None] * HEAD_DIM + dim[None, :], mask=exists, other=0)
        higher = tl.maximum(peak, found)
        weight, shrink = tl.exp(found - higher), tl.exp(peak - higher)
        total = total * shrink + weight
        mixed, peak = mixed * shrink[:, None] + weight[:, None] * values, higher
        target += num_tokens
    mixed = (mixed / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + here[:, None] * HEAD_DIM + dim[None, :], mixed, mask=exists)
    tl.store(lse + here, peak + tl.log(total), mask=asks)


def shared_prefix_attention(
    q: Float[Tensor, "tokens heads head_dim"],
    k_pages: Float[Tensor, "pages page_size kv_heads head_dim"],
    v_pages: Float[Tensor, "pages page_size kv_heads head_dim"],
    page_tables: Int[Tensor, "rows max_pages"],
    row_starts: Int[Tensor, " rows_plus_1"],
    context_lens: Int[Tensor, " rows"],
    num_shared_pages: int,
    paged_attention: Callable[..., tuple[Tensor, Tensor]],
    *,
    out: Float[Tensor, "tokens heads head_dim"] | None = None,
    lse: Float[Tensor, "tokens heads"] | None = None,
    part_tokens: int = 512,
    block_keys: int | None = None,
) -> tuple[Float[Tensor, "tokens heads head_dim"], Float[Tensor, "tokens heads"]]:
    """Attend, reading shared pages once; arguments and results as the reference's, `radix.shared_prefix_attention`.

    Arguments:
        out, lse: where the results go, new tensors unless given.
        part_tokens: the prefix of few queries is split into parts of so many tokens, or more.
        block_keys: how many keys a program looks at in one go: a power of two from 16 on, and as many as registers
            hold unless given.
    Changes: `out` and `lse`. Nothing waits for the GPU, so page ids, lengths, and that the pages are shared, are
    believed.
    Errors: InvalidValue for tensors that differ in dtype, pools that are not contiguous, or sizes out of range;
    MissingRequirement without a GPU.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    out = q.new_empty(q.shape) if out is None else out
    lse = q.new_empty(q.shape[:2], dtype=wide) if lse is None else lse
    _check({"k_pages": k_pages, "v_pages": v_pages, "out": out}, q.dtype)
    _check({"lse": lse}, wide)
    num_shared, block_keys = num_shared_pages * k_pages.shape[1], block_keys or _block_keys(q.element_size())
    _check_sizes(num_shared_pages, page_tables.shape[1], part_tokens, block_keys)
    rest = page_tables[:, num_shared_pages:], row_starts, (context_lens - num_shared).clamp(min=0)
    tail, tail_lse = paged_attention(q, k_pages, v_pages, *rest)
    if len(q):
        # The first row that has queries: in `row_starts`, the last 0 of those that it begins with.
        row = torch.searchsorted(row_starts.contiguous(), row_starts.new_zeros(1), right=True) - 1
        shared_pages = page_tables.index_select(0, row)[0, :num_shared_pages].contiguous()
        parts = _attend_to_prefix(q.contiguous(), k_pages, v_pages, shared_pages, part_tokens, block_keys, wide)
        _merge(tail.contiguous(), tail_lse.contiguous(), *parts, out, lse)
    return out, lse


def _attend_to_prefix(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, shared_pages: Tensor, part_tokens: int, block_keys: int,
    wide: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Launch the kernel for every tile, KV head and part; the parts' results, in the wide dtype."""
    (num_tokens, heads, head_dim), (_, page_size, kv_heads, _) = q.shape, k_pages.shape
    num_shared, dim = len(shared_pages) * page_size, _padded(head_dim)
    lanes = _lanes(dim, q.element_size())
    tiles = triton.cdiv(num_tokens * (heads // kv_heads), lanes)
    most_parts = max(1, ENOUGH_PROGRAMS // (tiles * kv_heads))
    part_tokens = max(part_tokens, triton.cdiv(num_shared, most_parts))
    num_parts = triton.cdiv(num_shared, part_tokens)
    outs, lses = (q.new_empty(num_parts, *shape, dtype=wide) for shape in (q.shape, q.shape[:2]))
    if num_parts:
        prefix_attention_kernel[(tiles, kv_heads, num_parts)](
            q, k_pages, v_pages, shared_pages, outs, lses,
            num_tokens, num_shared, page_size, part_tokens, heads, kv_heads,
            HEAD_DIM=head_dim, SCALE=head_dim**-0.5, LANES=lanes, KEYS=block_keys, DIM=dim, num_stages=NUM_STAGES,
        )  # fmt: skip
    return outs, lses


def _merge(tail: Tensor, tail_lse: Tensor, outs: Tensor, lses: Tensor, out: Tensor, lse: Tensor) -> None:
    """Launch the kernel for every token. Changes: out and lse."""
    num_parts, num_tokens, heads, head_dim = outs.shape
    merge_prefix_kernel[(num_tokens,)](
        tail, tail_lse, outs, lses, out, lse, num_parts, num_tokens, heads,
        HEAD_DIM=head_dim, HEADS=triton.next_power_of_2(heads), DIM=_padded(head_dim),
    )  # fmt: skip


def _lanes(dim: int, number_bytes: int) -> int:
    """How many queries of a tile registers hold without spilling."""
    return max(SMALLEST_BLOCK, min(64, 16384 // (dim * number_bytes)))


def _block_keys(number_bytes: int) -> int:
    """How many keys, and values, registers hold without spilling."""
    return 32 if number_bytes == 2 else SMALLEST_BLOCK


def _padded(head_dim: int) -> int:
    """How many lanes a vector takes."""
    return max(SMALLEST_BLOCK, triton.next_power_of_2(head_dim))


def _check_sizes(num_shared_pages: int, max_pages: int, part_tokens: int, block_keys: int) -> None:
    """Refuse numbers out of range."""
    if not 0 <= num_shared_pages <= max_pages:
        raise InvalidValue("num_shared_pages", num_shared_pages, f"0 to {max_pages}, what a page table holds")
    if part_tokens < 1:
        raise InvalidValue("part_tokens", part_tokens, "at least 1")
    if block_keys < SMALLEST_BLOCK or block_keys & (block_keys - 1):
        raise InvalidValue("block_keys", block_keys, f"a power of two from {SMALLEST_BLOCK} on")


def _check(tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Refuse what no kernel here can be launched on."""
    for name, tensor in tensors.items():
        if tensor.dtype != dtype:
            raise InvalidValue(f"{name}.dtype", tensor.dtype, f"{dtype}, to go with the other tensors")
        if not tensor.is_contiguous():
            raise InvalidValue(f"{name}.stride()", tensor.stride(), "that of a contiguous tensor")
        if not tensor.is_cuda and isinstance(prefix_attention_kernel, triton.JITFunction):
            raise MissingRequirement("a GPU", "a compiled kernel", "set TRITON_INTERPRET=1, or use the reference")
