"""Partial attentions joined by their log-sum-exp: what all keys together would have given."""

from __future__ import annotations

import pytest
import torch

from minserve.attention_merge import merge_attention

NAN, INF = float("nan"), float("inf")


def attention(q, k, v):
    """Attention of all queries to all keys given: [tokens heads dim], and the log-sum-exp; no keys give 0 and -inf."""
    scores = torch.einsum("thd,khd->thk", q, k)
    return torch.einsum("thk,khd->thd", scores.softmax(-1), v), scores.logsumexp(-1)


def numbers(*size, seed=0, dtype=torch.float64):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("sizes", [[9], [4, 5], [1, 7, 1], [1] * 9, [0, 4, 0, 5]], ids=str)
def test_parts_of_the_keys_make_the_whole(sizes):
    q, k, v = numbers(3, 2, 6), numbers(9, 2, 6, seed=1), numbers(9, 2, 6, seed=2)
    parts = [attention(q, *part) for part in zip(k.split(sizes), v.split(sizes), strict=True)]
    out, lse = merge_attention(*(torch.stack(x) for x in zip(*parts, strict=True)))
    for found, wanted in zip((out, lse), attention(q, k, v), strict=True):
        assert found.dtype == torch.float64 and (found - wanted).abs().max() <= 1e-12


def test_order_and_grouping_do_not_matter():
    outs, lses = numbers(4, 3, 2, 6), numbers(4, 3, 2, seed=1)
    wanted = merge_attention(outs, lses)
    halves = [merge_attention(outs[half], lses[half]) for half in ([3, 1], [0, 2])]
    for found, all_parts in zip(merge_attention(*map(torch.stack, zip(*halves, strict=True))), wanted, strict=True):
        assert (found - all_parts).abs().max() <= 1e-12


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("held", [0.0, NAN, INF])
def test_a_part_without_keys_counts_nothing(dtype, held):
    outs, lses = numbers(3, 2, 2, 4).to(dtype), numbers(3, 2, 2, seed=1).to(torch.promote_types(dtype, torch.float32))
    outs[1, 0], lses[1, 0] = held, -INF
    out, lse = merge_attention(outs, lses)
    without = merge_attention(outs[[0, 2]], lses[[0, 2]])
    assert torch.equal(out[0], without[0][0]) and torch.equal(lse[0], without[1][0])


@pytest.mark.parametrize("held", [0.0, NAN])
@pytest.mark.parametrize("parts", [0, 1, 3])
def test_no_key_in_any_part_gives_zero_and_no_nan(parts, held):
    out, lse = merge_attention(torch.full((parts, 2, 1, 3), held), torch.full((parts, 2, 1), -INF))
    assert torch.equal(out, torch.zeros(2, 1, 3)) and torch.equal(lse, torch.full((2, 1), -INF))


def test_one_part_is_itself():
    outs, lses = numbers(1, 3, 2, 4, dtype=torch.float32), numbers(1, 3, 2, dtype=torch.float32)
    out, lse = merge_attention(outs, lses)
    assert torch.equal(out, outs[0]) and torch.equal(lse, lses[0])


@pytest.mark.parametrize("shift", [-1000.0, 1000.0])
def test_sums_that_exp_cannot_hold(shift):
    outs, lses = numbers(3, 2, 2, 4), numbers(3, 2, 2, seed=1)
    (out, lse), (far_out, far_lse) = merge_attention(outs, lses), merge_attention(outs, lses + shift)
    assert (far_out - out).abs().max() <= 1e-9 and (far_lse - lse - shift).abs().max() <= 1e-9


def test_results_keep_their_dtypes():
    out, lse = merge_attention(numbers(2, 1, 1, 4).half(), numbers(2, 1, 1).to(torch.float32))
    assert out.dtype == torch.float16 and lse.dtype == torch.float32


def test_there_is_a_gradient():
    outs, lses = numbers(3, 2, 1, 2).requires_grad_(), numbers(3, 2, 1, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(merge_attention, (outs, lses))
