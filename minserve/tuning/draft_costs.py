"""What drafts and the steps that verify them cost on a machine that nobody here owns.

    a step of r rows and t tokens, t >= r:  a row runs its newest token and its drafts
    a draft for each of r rows:             one pass of the MTP head, a layer with matrices of its own, and the logits

Both are counted, then timed by the cost model. More tokens in a step are more arithmetic, and that is not all:

- On a sparse model they touch more experts, E (1 - (1 - k/E)^t) in each layer if routing is uniform.
- A row's keys and values are read once, however many of its tokens attend to them. Its state is read once, too, and
  written once for each token, since nobody knows yet which one will be kept.
- Each token has its own row of logits.

The head's first pass after a step runs over all that the step has left for good. It is counted as if it were one token
for each row, as the passes after it are.
"""

from __future__ import annotations

from dataclasses import replace

from minserve.errors import InvalidValue
from minserve.model.config import ModelConfig
from minserve.model.counting import (
    BFLOAT16,
    StepBytes,
    StepCount,
    StepFlops,
    WeightBytes,
    count_parameters,
    count_step,
    expected_distinct_experts,
    kv_bytes_per_token,
    state_bytes,
)
from minserve.step_costs import CostTable
from minserve.tuning.cost_model import Machine, step_time


def draft_costs(
    machine: Machine, model_config: ModelConfig, context_tokens: int, *, weight_bytes: WeightBytes = BFLOAT16,
    kv_dtype_bytes: float = 2, state_dtype_bytes: float = 4, number_format: str = "bfloat16",
    expert_format: str | None = None, draft_overhead_s: float | None = None,
) -> CostTable:  # fmt: skip
    """The prices by which an engine on this machine would choose how many drafts to verify; also for a virtual clock.

    Arguments:
        machine: its overhead is paid by each step.
        model_config: a model with an MTP head.
        context_tokens: what each row has cached, at least 1.
        weight_bytes, kv_dtype_bytes, state_dtype_bytes: as in `count_step`, for the head as for the layers.
        number_format, expert_format: as in `step_time`.
        draft_overhead_s: what a pass of the head takes besides; the machine's overhead over the model's layers, one of
            which it resembles, unless given.
    Returns prices in seconds. A drafter that is looked up costs nothing: `replace(prices, draft_s=lambda rows: 0.0)`.
    Errors: InvalidValue for a model without a head, too short a context, or a format that the machine has no rate for.

    >>> from minserve.model.counting import FP8_EXPERTS
    >>> from minserve.model.model_figures import named_config
    >>> from minserve.tuning.cost_model import machine
    >>> large = named_config("qwen3.8-2.4t-a95b")
    >>> prices = draft_costs(machine("b300").times(16), large, 8192, weight_bytes=FP8_EXPERTS, expert_format="fp8")
    >>> [round(1e3 * prices.step_s(1, num_tokens), 1) for num_tokens in (1, 2, 3, 4)], round(1e3 * prices.draft_s(1), 2)
    ([1.4, 1.9, 2.4, 2.8], 0.06)
    """
    if not model_config.mtp_num_hidden_layers:
        raise InvalidValue("model_config", "a model without an MTP head", "one whose head drafts")
    if context_tokens < 1:
        raise InvalidValue("context_tokens", context_tokens, "at least 1")
    widths = {"weight_bytes": weight_bytes, "kv_dtype_bytes": kv_dtype_bytes}
    formats = {"number_format": number_format, "expert_format": expert_format}
    machine.rate(number_format), machine.rate(expert_format or number_format)
    if draft_overhead_s is None:
        draft_overhead_s = machine.overhead_s / model_config.num_hidden_layers
    beside = replace(machine, overhead_s=draft_overhead_s)

    def step_s(num_rows: int, num_tokens: int) -> float:
        """See CostTable."""
        count = count_verify_step(
            model_config, num_rows, num_tokens, context_tokens, state_dtype_bytes=state_dtype_bytes, **widths
        )
        return step_time(count, machine, **formats).total_s

    def draft_s(num_rows: int) -> float:
        """See CostTable."""
        return step_time(count_draft(model_config, num_rows, context_tokens, **widths), beside, **formats).total_s

    return CostTable(step_s, draft_s)


def count_verify_step(
    config: ModelConfig, num_rows: int, num_tokens: int, context_tokens: int, *,
    weight_bytes: WeightBytes = BFLOAT16, kv_dtype_bytes: float = 2, state_dtype_bytes: float = 4,
) -> StepCount:  # fmt: skip
    """The bytes and FLOPs of a step that verifies drafts.

    Arguments:
        num_rows, num_tokens: tokens are shared out among the rows evenly, at least one for each.
        context_tokens: what each row has cached.
        weight_bytes, kv_dtype_bytes, state_dtype_bytes: as in `count_step`.
    Errors: InvalidValue for fewer tokens than rows.

    >>> from minserve.model.model_figures import named_config
    >>> one, four = (count_verify_step(named_config("qwen3.8-2.4t-a95b"), 1, n, 8192) for n in (1, 4))
    >>> round(one.distinct_experts), round(four.distinct_experts), four.bytes.kv_read == one.bytes.kv_read
    (10, 39, True)
    """
    share, more = divmod(num_tokens, num_rows)
    rows = [(context_tokens, context_tokens + share + (row < more)) for row in range(num_rows)]
    count = count_step(
        config, rows, weight_bytes=weight_bytes, kv_dtype_bytes=kv_dtype_bytes,
        state_dtype_bytes=state_dtype_bytes, num_logits=num_tokens,
    )  # fmt: skip
    written = num_tokens * state_bytes(config, state_dtype_bytes)
    return replace(count, bytes=replace(count.bytes, state_written=written))


def count_draft(
    config: ModelConfig, num_rows: int, context_tokens: int, *, weight_bytes: WeightBytes = BFLOAT16,
    kv_dtype_bytes: float = 2,
) -> StepCount:  # fmt: skip
    """The bytes and FLOPs of one pass of the MTP head, for one token of each row; arguments as `count_verify_step`.

    >>> from minserve.model.model_figures import named_config
    >>> one, many = (count_draft(named_config("qwen3.8-2.4t-a95b"), rows, 8192).bytes for rows in (1, 32))
    >>> f"{one.weights / 1e9:.1f} GB of weights, {many.weights / 1e9:.1f} GB for 32 rows"
    '6.3 GB of weights, 29.4 GB for 32 rows'
    """
    counts, distinct = count_parameters(config), expected_distinct_experts(config, num_rows)
    dense = counts.mtp - counts.mtp_routed_experts
    per_token = kv_bytes_per_token(config, kv_dtype_bytes, with_mtp=True) - kv_bytes_per_token(config, kv_dtype_bytes)
    moved = StepBytes(
        dense_weights=weight_bytes.dense * dense,
        expert_weights=distinct * (weight_bytes.experts * counts.per_expert + 3 * weight_bytes.per_expert_matrix),
        head=weight_bytes.head * counts.head,
        kv_read=per_token * context_tokens * num_rows,
        kv_written=per_token * num_rows,
        state_read=0,
        state_written=0,
    )
    flops = StepFlops(
        dense=2 * dense * num_rows,
        experts=2 * counts.per_expert * counts.experts_per_token * num_rows,
        attention=4 * config.num_attention_heads * config.head_dim * (context_tokens + 1) * num_rows,
        deltanet=0,
        head=2 * counts.head * num_rows,
    )
    return StepCount(num_rows, num_rows, num_rows, distinct, moved, flops)
