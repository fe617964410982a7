"""Prices of verify steps and drafts on a modelled machine, against counts made by hand."""

from dataclasses import replace

import pytest

from minserve.errors import InvalidValue
from minserve.model.config import FULL, LINEAR, ModelConfig
from minserve.model.counting import FP8_EXPERTS, NVFP4_EXPERTS, count_parameters, count_step
from minserve.model.model_figures import named_config
from minserve.speculation.depth import best_depth
from minserve.tuning.cost_model import Machine, machine
from minserve.tuning.draft_costs import count_draft, count_verify_step, draft_costs

LARGE, DENSE = named_config("qwen3.8-2.4t-a95b"), named_config("qwen3.5-27b")
SMALL = ModelConfig(
    vocab_size=10, hidden_size=8, num_hidden_layers=2, layer_types=(LINEAR, FULL), num_attention_heads=2,
    num_key_value_heads=1, head_dim=4, linear_num_key_heads=1, linear_num_value_heads=1, linear_key_head_dim=4,
    linear_value_head_dim=4, partial_rotary_factor=0.5, intermediate_size=6, mtp_num_hidden_layers=1,
)  # fmt: skip
SPARSE = replace(SMALL, intermediate_size=0, num_experts=4, num_experts_per_tok=1, moe_intermediate_size=3,
                 shared_expert_intermediate_size=5)  # fmt: skip
SLOW = Machine("slow", 1e9, 1000.0, {"bfloat16": 1e4, "fp8": 2e4}, overhead_s=0.5, efficiency=0.5)
STATE = 4 * 4 * 4 + 3 * (3 * 4) * 2  # a matrix in float32, and three inputs of q, k and v in bfloat16
KV = 2 * 4 * 2  # key and value of a token in one layer


def test_a_draft_of_a_dense_model_counted_by_hand():
    head = 2 * 8 * 8 + 5 * 8 + (8 * (2 * 8 + 2 * 4 + 8) + 2 * 4) + 3 * 8 * 6  # fc, norms, attention, MLP
    count = count_draft(SMALL, num_rows=3, context_tokens=20)
    assert count.bytes.dense_weights == 2 * head and count.bytes.head == 2 * 80 and count.bytes.expert_weights == 0
    assert (count.bytes.kv_read, count.bytes.kv_written) == (3 * 20 * KV, 3 * KV)
    assert (count.bytes.state_read, count.bytes.state_written) == (0, 0)
    assert count.flops.dense == 2 * head * 3 and count.flops.head == 2 * 80 * 3
    assert count.flops.attention == 3 * 21 * 4 * 2 * 4 and count.flops.experts == count.flops.deltanet == 0
    assert (count.num_rows, count.num_tokens, count.num_logits) == (3, 3, 3)


def test_a_draft_of_a_sparse_model_reads_the_experts_that_its_rows_touch():
    expert, shared, router = 3 * 8 * 3, 3 * 8 * 5 + 8, 8 * 4
    head = 2 * 8 * 8 + 5 * 8 + (8 * (2 * 8 + 2 * 4 + 8) + 2 * 4) + shared + router
    for num_rows, distinct in ((1, 1), (2, 1.75), (3, 2.3125)):  # of four, each token at one of them
        count = count_draft(SPARSE, num_rows, 20, weight_bytes=NVFP4_EXPERTS, kv_dtype_bytes=1)
        assert count.distinct_experts == pytest.approx(distinct)
        assert count.bytes.expert_weights == pytest.approx(distinct * (expert * (0.5 + 1 / 16) + 3 * 8))
        assert count.bytes.dense_weights == 2 * head and count.bytes.kv_read == num_rows * 20 * KV / 2
        assert count.flops.experts == 2 * expert * num_rows and count.flops.dense == 2 * head * num_rows


@pytest.mark.parametrize("num_rows, num_tokens, rows", [(1, 1, [1]), (1, 4, [4]), (2, 8, [4, 4]), (3, 7, [3, 2, 2])])
def test_a_verify_step_reads_rows_once_and_writes_a_state_for_each_token(num_rows, num_tokens, rows):
    count = count_verify_step(SPARSE, num_rows, num_tokens, 20)
    plain = count_step(SPARSE, [(20, 20 + num) for num in rows], num_logits=num_tokens)
    assert count.flops == plain.flops and count.num_logits == num_tokens
    assert count.bytes.kv_read == num_rows * 20 * KV and count.bytes.kv_written == num_tokens * KV
    assert count.bytes.state_read == num_rows * STATE and count.bytes.state_written == num_tokens * STATE
    assert count.bytes.weights == plain.bytes.weights
    assert count.distinct_experts == pytest.approx(4 * (1 - 0.75**num_tokens))


def test_one_token_for_each_row_is_a_plain_step():
    assert count_verify_step(LARGE, 8, 8, 1024) == count_step(LARGE, [(1024, 1025)] * 8)


def test_prices_are_overhead_and_the_larger_of_bytes_and_arithmetic():
    prices = draft_costs(SLOW, SMALL, 20)
    step, draft = count_verify_step(SMALL, 2, 6, 20), count_draft(SMALL, 2, 20)
    assert prices.step_s(2, 6) == pytest.approx(0.5 + max(step.bytes.total / 500, step.flops.total / 1e4))
    assert prices.draft_s(2) == pytest.approx(0.25 + max(draft.bytes.total / 500, draft.flops.total / 1e4))
    cheap = draft_costs(SLOW, SMALL, 20, draft_overhead_s=0.0)
    assert cheap.draft_s(2) == pytest.approx(prices.draft_s(2) - 0.25) and cheap.step_s(2, 6) == prices.step_s(2, 6)


def test_widths_and_formats_reach_both_prices():
    fast = replace(SLOW, bandwidth_bytes_per_s=1e12, overhead_s=0.0)  # arithmetic rules
    plain = draft_costs(fast, SPARSE, 20)
    mixed = draft_costs(fast, SPARSE, 20, expert_format="fp8")
    for count, name in ((count_verify_step(SPARSE, 1, 2, 20), "step"), (count_draft(SPARSE, 1, 20), "draft")):
        times = [prices.step_s(1, 2) if name == "step" else prices.draft_s(1) for prices in (plain, mixed)]
        assert times[0] == pytest.approx(count.flops.total / 1e4)
        assert times[1] == pytest.approx((count.flops.total - count.flops.experts / 2) / 1e4)
    slow = replace(SLOW, flops_per_s={"bfloat16": 1e12}, overhead_s=0.0)  # bytes rule
    wide = draft_costs(slow, SPARSE, 20, kv_dtype_bytes=4, state_dtype_bytes=8)
    usual = draft_costs(slow, SPARSE, 20)
    assert wide.step_s(1, 2) - usual.step_s(1, 2) == pytest.approx((22 * KV + 3 * 4 * 4 * 4) / 500)
    assert wide.draft_s(1) - usual.draft_s(1) == pytest.approx(21 * KV / 500)


def test_the_large_model_reads_twice_the_weights_for_four_tokens():
    one, four = (count_verify_step(LARGE, 1, num, 8192, weight_bytes=FP8_EXPERTS) for num in (1, 4))
    assert [round(count.distinct_experts) for count in (one, four)] == [10, 39]
    assert [round(count.bytes.weights / 1e9) for count in (one, four)] == [140, 274]
    counts = count_parameters(LARGE)
    more = 29.4 * counts.num_layers * counts.per_expert  # experts that three more tokens touch, a byte a parameter
    assert four.bytes.weights - one.bytes.weights == pytest.approx(more, rel=0.02)


def test_a_few_requests_of_a_sparse_model_are_where_no_draft_pays():
    rates, found = [0.648, 0.74, 0.7], {}
    places = {"sparse": (LARGE, machine("b300").times(16), {"weight_bytes": FP8_EXPERTS, "expert_format": "fp8"}),
              "dense": (DENSE, machine("h200"), {})}  # fmt: skip
    for name, (config, where, how) in places.items():
        prices = draft_costs(where, config, 1024, **how)
        found[name] = [
            best_depth(rates, [prices.step_s(n, n * (1 + d)) for d in range(4)], prices.draft_s(n)) for n in (1, 8, 64)
        ]
    assert found == {"sparse": [2, 0, 3], "dense": [3, 3, 3]}


@pytest.mark.parametrize("wrong, match", [
    ({"model_config": replace(SMALL, mtp_num_hidden_layers=0)}, "model_config"), ({"context_tokens": 0}, "context"),
    ({"number_format": "fp4"}, "number_format"), ({"expert_format": "int3"}, "number_format"),
])  # fmt: skip
def test_what_has_no_price_is_a_named_error(wrong, match):
    with pytest.raises(InvalidValue, match=match):
        draft_costs(**{"machine": SLOW, "model_config": SMALL, "context_tokens": 20} | wrong)


def test_a_row_without_a_token_is_a_named_error():
    with pytest.raises(InvalidValue, match="rows"):
        draft_costs(SLOW, SMALL, 20).step_s(3, 2)
