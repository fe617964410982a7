"""What one step costs, counted from the model's configuration and the batch alone: bytes and FLOPs.

A step runs a list of rows, one per request: row (start, stop) computes positions start..stop-1 while `start` positions
are cached already. (4096, 4097) decodes one token, (0, 512) prefills 512. Rules of the count:

- Weights are read once per step, however many rows there are; of the routed experts only the distinct ones chosen.
- KV cache and state are read and written once per row. The new keys and values are written, and not read back.
- One multiply-add is 2 FLOPs, so a matrix costs 2 FLOPs per element and token. Causal attention at position p costs
  4 x heads x head_dim x (p + 1). The delta rule costs 7 x dk x dv per value head: one product for the decay, a
  multiply-add each for reading k, adding k delta^T and reading q (recurrent form; chunks cost more arithmetic).
- Logits are computed where a token is chosen: by default once per row.

Left out, being small: activations, looked-up embedding rows, norms and gates (FLOPs), the MTP head (it is no part of a
plain step). Distinct experts under uniform routing: E (1 - (1 - k/E)^n) for n tokens; real routers are skewed and
touch fewer, so pass the measured number where there is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minserve.errors import InvalidValue
from minserve.model.config import ModelConfig
from minserve.model.footprint import (
    BFLOAT16,
    FLOAT32,
    FP8_EXPERTS,
    NVFP4_EXPERTS,
    ParameterCounts,
    WeightBytes,
    conv_tail_bytes,
    count_parameters,
    kv_bytes_per_token,
    resident_bytes,
    state_bytes,
)

# Whoever counts finds everything here, the standing costs of `footprint` too.
__all__ = [
    "BFLOAT16", "FLOAT32", "FP8_EXPERTS", "NVFP4_EXPERTS", "ParameterCounts", "StepBytes", "StepCount", "StepFlops",
    "WeightBytes", "conv_tail_bytes", "count_parameters", "count_step", "expected_distinct_experts",
    "kv_bytes_per_token", "resident_bytes", "state_bytes",
]  # fmt: skip


@dataclass(frozen=True)
class StepBytes:
    """Bytes that one step moves between memory and processor, by kind."""

    dense_weights: float
    expert_weights: float
    head: float
    kv_read: float
    kv_written: float
    state_read: float
    state_written: float

    @property
    def weights(self) -> float:
        """Bytes of all weights read."""
        return self.dense_weights + self.expert_weights + self.head

    @property
    def total(self) -> float:
        """All bytes."""
        return self.weights + self.kv_read + self.kv_written + self.state_read + self.state_written


@dataclass(frozen=True)
class StepFlops:
    """FLOPs of one step, by kind; a multiply-add is 2.

    `attention` are the scores and the weighted sum of values, `deltanet` the state update; the projections of both
    are in `dense`.
    """

    dense: int
    experts: int
    attention: int
    deltanet: int
    head: int

    @property
    def total(self) -> int:
        """All FLOPs."""
        return self.dense + self.experts + self.attention + self.deltanet + self.head


@dataclass(frozen=True)
class StepCount:
    """One step, counted: its batch, its bytes and its FLOPs."""

    num_rows: int
    num_tokens: int
    num_logits: int
    distinct_experts: float
    bytes: StepBytes
    flops: StepFlops


def expected_distinct_experts(config: ModelConfig, num_tokens: int) -> float:
    """How many experts of a layer `num_tokens` tokens touch on average, if routing were uniform; 0 in a dense model.

    >>> from minserve.model.model_figures import named_config
    >>> [round(expected_distinct_experts(named_config("qwen3.8-2.4t-a95b"), n)) for n in (1, 4, 32, 256)]
    [10, 39, 240, 509]
    """
    if not config.is_moe:
        return 0.0
    return config.num_experts * (1 - (1 - config.num_experts_per_tok / config.num_experts) ** num_tokens)


def count_step(
    config: ModelConfig, rows: Sequence[tuple[int, int]], *, weight_bytes: WeightBytes = BFLOAT16,
    kv_dtype_bytes: float = 2, state_dtype_bytes: float = 4, conv_dtype_bytes: float = 2,
    distinct_experts: float | None = None, num_logits: int | None = None,
) -> StepCount:  # fmt: skip
    """The bytes and FLOPs of one step, from the model's shape and the batch alone.

    Arguments:
        rows: (start, stop) per request, 0 <= start < stop: positions computed now, after `start` cached ones.
        weight_bytes: bytes per parameter.
        kv_dtype_bytes, state_dtype_bytes, conv_dtype_bytes: bytes per number in the caches.
        distinct_experts: experts touched per layer, mean over the layers; expected under uniform routing unless given.
        num_logits: positions whose logits are wanted; one per row unless given.

    Raises:
        InvalidValue: a row with start < 0 or stop <= start.

    >>> from minserve.model.model_figures import named_config
    >>> step = count_step(named_config("qwen3.8-2.4t-a95b"), [(8191, 8192)], weight_bytes=FP8_EXPERTS)
    >>> f"{step.bytes.weights / 1e9:.0f} GB of weights, {step.flops.total / 1e9:.0f} GFLOP"
    '140 GB of weights, 200 GFLOP'
    """
    counts, num_tokens = count_parameters(config), _count_tokens(rows)
    num_logits = len(rows) if num_logits is None else num_logits
    if distinct_experts is None:
        distinct_experts = expected_distinct_experts(config, num_tokens)
    weights = _weights_read(counts, weight_bytes, bool(rows), distinct_experts, bool(num_logits))
    per_token = kv_bytes_per_token(config, kv_dtype_bytes)
    per_request = state_bytes(config, state_dtype_bytes, conv_dtype_bytes)
    moved = StepBytes(
        *weights,
        kv_read=per_token * sum(start for start, _ in rows),
        kv_written=per_token * num_tokens,
        state_read=per_request * sum(start > 0 for start, _ in rows),  # a request that begins has no state to read
        state_written=per_request * len(rows),
    )
    flops = _count_flops(config, counts, rows, num_tokens, num_logits)
    return StepCount(len(rows), num_tokens, num_logits, distinct_experts, moved, flops)


def _count_tokens(rows) -> int:
    """Positions computed by the rows; a row that is none is an error."""
    for start, stop in rows:
        if not 0 <= start < stop:
            raise InvalidValue("rows", (start, stop), "pairs with 0 <= start < stop")
    return sum(stop - start for start, stop in rows)


def _weights_read(counts: ParameterCounts, width: WeightBytes, any_rows: bool, distinct: float, any_logits: bool):
    """Bytes of dense weights, expert weights and head that a step reads."""
    per_expert = width.experts * counts.per_expert + 3 * width.per_expert_matrix
    experts = distinct * counts.num_layers * per_expert
    return width.dense * counts.always_read * any_rows, experts, width.head * counts.head * any_logits


def _count_flops(config, counts: ParameterCounts, rows, num_tokens: int, num_logits: int) -> StepFlops:
    """The FLOPs of a step; see the module's rules."""
    # Positions attended to, summed over the new tokens: the one at p sees p + 1.
    attended = sum((stop * (stop + 1) - start * (start + 1)) // 2 for start, stop in rows)
    head_sizes = config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim
    vectors = counts.norms + config.num_full_layers * 2 * config.head_dim
    vectors += config.num_linear_layers * (2 * config.linear_num_value_heads + config.linear_value_head_dim)
    return StepFlops(
        dense=2 * (counts.always_read - vectors) * num_tokens,
        experts=2 * counts.active_experts * num_tokens,
        attention=4 * config.num_full_layers * config.num_attention_heads * config.head_dim * attended,
        deltanet=7 * config.num_linear_layers * head_sizes * num_tokens,
        head=2 * counts.head * num_logits,
    )
