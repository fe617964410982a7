"""The kernel pairs at the sizes of real models: their inputs, made on the device, and the bytes that they must move.

The bytes of a call are those of every input that it has to read, once, and of every result, once. Keys that a second
tile of queries reads again are not counted twice: a cache may keep them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import paged_cases
import ragged_cases
import torch
from kernel_checks import NAN, bound
from pair import INDEX_BYTES, Pair, copied_differences, indices, randn
from test_tail_copy import Case as TailCase
from verify_sizes import verify_pair

from minserve.batching import ragged_attention as batching
from minserve.deltanet import conv_tail as convolution
from minserve.deltanet import gated_delta as delta_rule
from minserve.deltanet import tail_copy as deltanet
from minserve.paging import paged_attention as paging
from minserve.radix import shared_prefix_attention as radix


@dataclass(frozen=True)
class Sizes:
    """A model's heads and channels, and a load. The defaults are of Qwen3.5-35B-A3B."""

    heads: int = 16
    kv_heads: int = 2
    head_dim: int = 256
    channels: int = 8192
    delta_heads: tuple[int, int] = (16, 32)  # of keys, and of values
    delta_dims: tuple[int, int] = (128, 128)
    decode_rows: int = 64
    context: int = 4096
    shared: int = 3840
    prompt: int = 2048
    unequal: tuple[int, ...] = (1024, 512, 256, 255, 1)
    page_sizes: tuple[int, ...] = (16, 64)
    drafts: int = 3
    vocab: int = 248_320


TINY = Sizes(
    4, 2, 24, 37, (1, 2), (6, 5), decode_rows=2, context=7, shared=4, prompt=3, unequal=(2, 1), page_sizes=(4,),
    vocab=19,
)  # fmt: skip


def attention_bytes(num_tokens: int, num_keys: int, sizes: Sizes, dtype: torch.dtype) -> int:
    """Queries and results, keys and values, and each query's log-sum-exp in the wide dtype."""
    vectors = 2 * num_tokens * sizes.heads + 2 * num_keys * sizes.kv_heads
    wide_bytes = torch.promote_types(dtype, torch.float32).itemsize
    return vectors * sizes.head_dim * dtype.itemsize + num_tokens * sizes.heads * wide_bytes


def attention_flops(queries: tuple[int, ...], contexts: tuple[int, ...], sizes: Sizes) -> int:
    """Two products of two operations for each number of each key that each query sees."""
    rows = zip(queries, contexts, strict=True)
    seen = sum(num * context - num * (num - 1) // 2 for num, context in rows)
    return 4 * seen * sizes.heads * sizes.head_dim


def attention_differences(found, wanted, args) -> list[tuple[float, float]]:
    """The attention mixes values, so the largest bounds its error; the log-sum-exp is a sum of its own."""
    (_, lse), values = wanted, args[2]
    largest = values.nan_to_num(0).abs().max().item()
    bounds = bound(args[0].dtype, largest), bound(lse.dtype, lse.abs().max().item())
    errors = [(x.double() - y.double()).abs().max().item() for x, y in zip(found, wanted, strict=True)]
    return list(zip(errors, bounds, strict=True))


def paged_tensors(case: paged_cases.Case, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Pages lie in no order; free pages and what lies behind a context hold NaN."""
    row_pages = [-(-context // case.page_size) for context in case.contexts]
    order = torch.randperm(sum(row_pages) + 3, generator=torch.Generator(device).manual_seed(0), device=device)
    shape = (len(order), case.page_size, case.kv_heads, case.head_dim)
    pools = [randn(shape, dtype, device, seed) for seed in (1, 2)]
    page_tables = torch.full((len(row_pages), max(row_pages)), -1, device=device)
    for row, own in enumerate(order.split([*row_pages, 3])[:-1]):
        page_tables[row, : len(own)] = own
        for pool in pools:
            pool[own[-1], (case.contexts[row] - 1) % case.page_size + 1 :] = NAN
    for pool in pools:
        pool[order[-3:]] = NAN
    q = randn((sum(case.queries), case.heads, case.head_dim), dtype, device, 3)
    starts = indices(accumulate(case.queries, initial=0), device)
    return q, *pools, page_tables, starts, indices(case.contexts, device)


def paged_pair(note: str, queries: tuple[int, ...], contexts: tuple[int, ...], page_size: int, sizes: Sizes) -> Pair:
    """Attention through page tables."""
    case = paged_cases.Case(note, queries, contexts, sizes.heads, sizes.kv_heads, sizes.head_dim, page_size)
    entries = sum(-(-context // page_size) for context in contexts) + 2 * len(contexts) + 1
    return Pair(
        "paged_attention", f"{note}, pages of {page_size}",
        tensors=lambda dtype, device: paged_tensors(case, dtype, device),
        num_bytes=lambda dtype: attention_bytes(sum(queries), sum(contexts), sizes, dtype) + entries * INDEX_BYTES,
        reference=paging.paged_attention, differences=attention_differences,
        flops=attention_flops(queries, contexts, sizes),
    )  # fmt: skip


def shared_pair(note: str, queries: tuple[int, ...], contexts: tuple[int, ...], page_size: int, sizes: Sizes) -> Pair:
    """The same behind a prefix that all rows share; the pages that they would have had hold NaN."""
    paged = paged_pair(note, queries, contexts, page_size, sizes)
    num_shared_pages, others = sizes.shared // page_size, (len(contexts) - 1) * sizes.shared

    def tensors(dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, ...]:
        q, *pools, page_tables, row_starts, context_lens = paged.tensors(dtype, device)
        for pool in pools:
            pool[page_tables[1:, :num_shared_pages]] = NAN
        page_tables[1:, :num_shared_pages] = page_tables[0, :num_shared_pages].clone()
        return q, *pools, page_tables, row_starts, context_lens

    return Pair(
        "shared_prefix_attention", f"{paged.note}, {sizes.shared:,} shared", tensors,
        num_bytes=lambda dtype: paged.num_bytes(dtype) - 2 * others * sizes.kv_heads * sizes.head_dim * dtype.itemsize,
        reference=partial(radix.shared_prefix_attention, paged_attention=paging.paged_attention),
        differences=attention_differences, flops=paged.flops, given={"num_shared_pages": num_shared_pages},
    )  # fmt: skip


def ragged_pair(note: str, lengths: tuple[int, ...], sizes: Sizes) -> Pair:
    """Attention inside packed rows."""
    case = ragged_cases.Case(note, lengths, sizes.heads, sizes.kv_heads, sizes.head_dim)

    def tensors(dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, ...]:
        heads = (case.heads, case.kv_heads, case.kv_heads)
        numbers = [randn((sum(lengths), n, case.head_dim), dtype, device, seed) for seed, n in enumerate(heads)]
        return *numbers, indices(accumulate(lengths, initial=0), device)

    return Pair(
        "ragged_attention", note, tensors,
        num_bytes=lambda dtype: (
            attention_bytes(sum(lengths), sum(lengths), sizes, dtype) + (len(lengths) + 1) * INDEX_BYTES
        ),
        reference=batching.ragged_attention, differences=attention_differences,
        flops=attention_flops(lengths, lengths, sizes),
    )  # fmt: skip


def write_pair(note: str, num_tokens: int, per_page: int, page_size: int, sizes: Sizes) -> Pair:
    """Keys and values written to pages that lie in no order, `per_page` to the beginning of each."""
    num_pages = -(-num_tokens // per_page)

    def tensors(dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, ...]:
        firsts = 2 * [(num_tokens,)] + 2 * [(2 * num_pages, page_size)]
        numbers = [randn((*first, sizes.kv_heads, sizes.head_dim), dtype, device, s) for s, first in enumerate(firsts)]
        generator = torch.Generator(device).manual_seed(4)
        pages = torch.randperm(2 * num_pages, generator=generator, device=device)[:num_pages]
        slots = pages[:, None] * page_size + torch.arange(per_page, device=device)
        return *numbers, slots.flatten()[:num_tokens]

    numbers = 2 * num_tokens * sizes.kv_heads * sizes.head_dim
    return Pair(
        "write_pages", f"{note}, pages of {page_size}", tensors,
        num_bytes=lambda dtype: 2 * numbers * dtype.itemsize + num_tokens * INDEX_BYTES,
        reference=paging.write_pages, differences=copied_differences,
    )  # fmt: skip


def tail_pair(note: str, lengths: tuple[int, ...], sizes: Sizes) -> Pair:
    """The tails of the convolution kept: each row reads one slot and writes another, all of them in one pool."""
    num_rows = len(lengths)
    case = TailCase(note, lengths, tuple(range(num_rows)), tuple(range(num_rows, 2 * num_rows)), sizes.channels)

    def tensors(dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, ...]:
        x = randn((sum(lengths), case.channels), dtype, device, 0)
        tails = randn((2 * num_rows, case.keep, case.channels), dtype, device, 1)
        tables = (indices(values, device) for values in (accumulate(lengths, initial=0), case.read, case.write))
        row_starts, read, write = tables
        return x, row_starts, tails, read, write

    return Pair(
        "tail_copy", note, tensors,
        num_bytes=lambda dtype: (
            2 * num_rows * case.keep * case.channels * dtype.itemsize + (3 * num_rows + 1) * INDEX_BYTES
        ),
        reference=deltanet.tail_copy, differences=copied_differences, options=lambda args: {"out": args[2]},
    )  # fmt: skip


def summed_differences(found, wanted, args) -> list[tuple[float, float]]:
    """Each result is bounded by its own largest number."""
    bounds = [bound(x.dtype, y.abs().max().item()) for x, y in zip(found, wanted, strict=True)]
    errors = [(x.double() - y.double()).abs().max().item() for x, y in zip(found, wanted, strict=True)]
    return list(zip(errors, bounds, strict=True))


def delta_pair(note: str, lengths: tuple[int, ...], sizes: Sizes) -> Pair:
    """The delta rule: values in the dtype, all else wide, as the layers hand it over. Operations: token by token."""
    num, num_rows, (key_heads, heads), (key_dim, value_dim) = (
        sum(lengths), len(lengths), sizes.delta_heads, sizes.delta_dims
    )  # fmt: skip

    def tensors(dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, ...]:
        wide = torch.promote_types(dtype, torch.float32)
        q, k = (randn((num, key_heads, key_dim), wide, device, seed) for seed in (0, 1))
        k, v = torch.nn.functional.normalize(k, dim=-1), randn((num, heads, value_dim), dtype, device, 2)
        g, beta = (randn((num, heads), wide, device, seed).sigmoid() for seed in (3, 4))
        state = randn((num_rows, heads, key_dim, value_dim), wide, device, 5)
        g = (0.8 + 0.19 * g).log()
        return q * key_dim**-0.5, k, v, g, beta, state, indices(accumulate(lengths, initial=0), device)

    def num_bytes(dtype: torch.dtype) -> int:
        wide = 2 * num * key_heads * key_dim + 2 * num * heads + 2 * num_rows * heads * key_dim * value_dim
        wide_bytes = torch.promote_types(dtype, torch.float32).itemsize
        return wide * wide_bytes + 2 * num * heads * value_dim * dtype.itemsize + (num_rows + 1) * INDEX_BYTES

    return Pair(
        "gated_delta_ragged", note, tensors, num_bytes, delta_rule.gated_delta_ragged, summed_differences,
        flops=6 * num * heads * key_dim * value_dim,
    )  # fmt: skip


def convolution_pair(note: str, lengths: tuple[int, ...], sizes: Sizes) -> Pair:
    """The convolution, each row from its own tail."""
    num, rows, channels, keep = sum(lengths), len(lengths), sizes.channels, 3

    def tensors(dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, ...]:
        shapes = ((num, channels), (channels, keep + 1), (rows, keep, channels))
        numbers = (randn(shape, dtype, device, seed) for seed, shape in enumerate(shapes))
        return *numbers, indices(accumulate(lengths, initial=0), device)

    return Pair(
        "conv_tail_ragged", note, tensors,
        num_bytes=lambda dtype: (
            (2 * num + keep + 1 + 2 * rows * keep) * channels * dtype.itemsize + (rows + 1) * INDEX_BYTES
        ),
        reference=convolution.conv_tail_ragged, differences=summed_differences,
    )  # fmt: skip


def pairs(sizes: Sizes) -> Iterator[Pair]:
    """Every kernel, at the sizes of decode, of a prompt, and of both in one step."""
    rows, context, prompt = sizes.decode_rows, sizes.context, sizes.prompt
    decode = f"{rows} decode rows of context {context:,}"
    for page_size in sizes.page_sizes:
        yield paged_pair(decode, (1,) * rows, (context,) * rows, page_size, sizes)
        yield paged_pair(f"a prompt of {prompt:,}", (prompt,), (prompt,), page_size, sizes)
    yield shared_pair(decode, (1,) * rows, (context,) * rows, sizes.page_sizes[0], sizes)
    both = ((1,) * rows + (prompt,), (context,) * rows + (prompt,))
    yield paged_pair(f"{rows} decode rows and a prompt", *both, sizes.page_sizes[0], sizes)
    yield ragged_pair(f"a prompt of {prompt:,}", (prompt,), sizes)
    yield ragged_pair(f"prompts of {', '.join(f'{length:,}' for length in sizes.unequal)}", sizes.unequal, sizes)
    for page_size in sizes.page_sizes:
        yield write_pair(f"a prompt of {prompt:,}", prompt, page_size, page_size, sizes)
    yield write_pair(f"{rows} decode rows", rows, 1, sizes.page_sizes[0], sizes)
    for pair in (delta_pair, convolution_pair):
        yield pair(f"{rows} decode rows", (1,) * rows, sizes)
        yield pair(f"a prompt of {prompt:,}", (prompt,), sizes)
    yield verify_pair(rows, sizes.drafts, sizes.vocab)
    yield tail_pair(f"{rows} decode rows", (1,) * rows, sizes)
    yield tail_pair(f"{rows} decode rows and a prompt", (1,) * rows + (prompt,), sizes)
