"""What a model holds in memory, counted from its configuration: parameters, weights, KV cache, state.

Per full-attention layer and token the cache keeps 2 x KV heads x head_dim numbers; per DeltaNet layer and request the
state is value heads x dk x dv numbers (float32) and the convolution's tail the last kernel - 1 inputs of each channel.
What a step *costs* is in `minserve.model.counting`.
"""

from __future__ import annotations

from dataclasses import dataclass

from minserve.model.config import ModelConfig


@dataclass(frozen=True)
class ParameterCounts:
    """Parameters of a model by what they are for; the parts are disjoint.

    `norms` are the layers' and the final RMSNorms (those inside attention and DeltaNet count there). `lm_head` is 0
    when tied: its matrix is then `embedding`. `mtp` is the whole MTP head, of which `mtp_routed_experts` are experts.
    The four last fields describe work and not storage: parameters in one expert, in the matrix that gives logits, and
    experts and layers per token.
    """

    embedding: int
    lm_head: int
    full_attention: int
    deltanet: int
    routed_experts: int
    shared_experts: int
    routers: int
    dense_mlp: int
    norms: int
    mtp: int
    mtp_routed_experts: int
    per_expert: int
    head: int
    experts_per_token: int
    num_layers: int

    @property
    def always_read(self) -> int:
        """Parameters that every step reads: all layers but their routed experts; neither embedding nor head."""
        mixers = self.full_attention + self.deltanet
        return mixers + self.shared_experts + self.routers + self.dense_mlp + self.norms

    @property
    def total(self) -> int:
        """Parameters resident in memory without the MTP head."""
        return self.embedding + self.lm_head + self.routed_experts + self.always_read

    @property
    def total_with_mtp(self) -> int:
        """Parameters resident in memory with the MTP head."""
        return self.total + self.mtp

    @property
    def active_experts(self) -> int:
        """Parameters of the routed experts that one token uses."""
        return self.per_expert * self.experts_per_token * self.num_layers

    @property
    def active(self) -> int:
        """Parameters that one token uses: head counted, embedding (one row is looked up) not."""
        return self.always_read + self.active_experts + self.head


@dataclass(frozen=True)
class WeightBytes:
    """How many bytes a stored parameter takes, scales included, by the part of the model it is in.

    `dense` is everything but the routed experts, the embedding and the head. `per_expert_matrix` are the bytes that
    each expert matrix needs besides: per-tensor scales.
    """

    dense: float = 2.0
    experts: float = 2.0
    head: float = 2.0
    per_expert_matrix: float = 0.0


BFLOAT16 = WeightBytes()
FLOAT32 = WeightBytes(dense=4.0, experts=4.0, head=4.0)
FP8_EXPERTS = WeightBytes(experts=1 + 2 / 128**2)
"""Routed experts in E4M3 with one bfloat16 scale per 128 x 128 block, the rest bfloat16."""
NVFP4_EXPERTS = WeightBytes(experts=0.5 + 1 / 16, per_expert_matrix=8.0)
"""Routed experts in 4 bits with one FP8 scale per 16 and two FP32 scalars per matrix, the rest bfloat16."""


def count_parameters(config: ModelConfig) -> ParameterCounts:
    """The parameters of a model, part by part, equal to the sizes of its checkpoint's tensors.

    >>> from minserve.model.model_figures import named_config
    >>> count_parameters(named_config("qwen3.8-2.4t-a95b")).total_with_mtp
    2446182725504
    """
    hidden, num_layers = config.hidden_size, config.num_hidden_layers
    expert, shared, router, dense = _mlp_parameters(config)
    attention = _full_attention_parameters(config)
    experts = config.num_experts * expert
    has_mtp = config.mtp_num_hidden_layers
    # fc joins embedding and hidden state; five norms: one on each of its inputs, two in the layer, one at the end.
    mtp = 2 * hidden * hidden + 5 * hidden + attention + experts + shared + router + dense
    vocabulary = config.vocab_size * hidden
    return ParameterCounts(
        embedding=vocabulary,
        lm_head=0 if config.tie_word_embeddings else vocabulary,
        full_attention=config.num_full_layers * attention,
        deltanet=config.num_linear_layers * _deltanet_parameters(config),
        routed_experts=num_layers * experts,
        shared_experts=num_layers * shared,
        routers=num_layers * router,
        dense_mlp=num_layers * dense,
        norms=(2 * num_layers + 1) * hidden,
        mtp=has_mtp * mtp,
        mtp_routed_experts=has_mtp * experts,
        per_expert=expert,
        head=vocabulary,
        experts_per_token=config.num_experts_per_tok if config.is_moe else 0,
        num_layers=num_layers,
    )


def resident_bytes(config: ModelConfig, weight_bytes: WeightBytes = BFLOAT16, with_mtp: bool = True) -> float:
    """Bytes that the weights take in memory, or in a checkpoint.

    >>> from minserve.model.model_figures import named_config
    >>> resident_bytes(named_config("qwen3.8-2.4t-a95b"), NVFP4_EXPERTS)
    1447265951488.0
    """
    counts = count_parameters(config)
    experts = counts.routed_experts + with_mtp * counts.mtp_routed_experts
    dense = counts.always_read + with_mtp * (counts.mtp - counts.mtp_routed_experts)
    num_matrices = 3 * experts // counts.per_expert if experts else 0
    return (
        weight_bytes.dense * dense
        + weight_bytes.experts * experts
        + weight_bytes.per_expert_matrix * num_matrices
        + weight_bytes.head * (counts.embedding + counts.lm_head)
    )


def kv_bytes_per_token(config: ModelConfig, dtype_bytes: float = 2, with_mtp: bool = False) -> float:
    """Bytes of keys and values that each token leaves in the caches of the full-attention layers.

    Arguments:
        dtype_bytes: bytes per number: 2 for bfloat16, 1 for FP8.
        with_mtp: count the MTP layer's cache too, as an engine that drafts with it must.
    """
    num_layers = config.num_full_layers + (config.mtp_num_hidden_layers if with_mtp else 0)
    return num_layers * 2 * config.num_key_value_heads * config.head_dim * dtype_bytes


def conv_tail_bytes(config: ModelConfig, dtype_bytes: float = 2) -> float:
    """Bytes of one request's convolution tails: the last kernel - 1 inputs of every channel of every DeltaNet layer."""
    return config.num_linear_layers * config.conv_channels * (config.linear_conv_kernel_dim - 1) * dtype_bytes


def state_bytes(config: ModelConfig, state_dtype_bytes: float = 4, conv_dtype_bytes: float = 2) -> float:
    """Bytes that one request needs in the DeltaNet layers, however long it is: recurrent state and convolution tail.

    >>> from minserve.model.model_figures import named_config
    >>> round(state_bytes(named_config("qwen3.8-2.4t-a95b")) / 2**20)
    560
    """
    per_layer = config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim
    recurrent = config.num_linear_layers * per_layer * state_dtype_bytes
    return recurrent + conv_tail_bytes(config, conv_dtype_bytes)


def _full_attention_parameters(config: ModelConfig) -> int:
    """One gated full-attention layer: q is twice as wide (query and gate), k, v, o, and the norms of q and k."""
    q_width, kv_width = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    return config.hidden_size * (2 * q_width + 2 * kv_width + q_width) + 2 * config.head_dim


def _deltanet_parameters(config: ModelConfig) -> int:
    """One Gated DeltaNet layer: q, k, v and z, the two gates, convolution, A_log, dt_bias, norm, output."""
    num_heads, value_dim = config.linear_num_value_heads, config.value_dim
    projections = config.hidden_size * (config.conv_channels + value_dim + 2 * num_heads + value_dim)
    convolution = config.conv_channels * config.linear_conv_kernel_dim
    return projections + convolution + 2 * num_heads + config.linear_value_head_dim


def _mlp_parameters(config: ModelConfig) -> tuple[int, int, int, int]:
    """One routed expert, and per layer: the shared expert with its gate, the router, the dense MLP."""
    hidden = config.hidden_size
    if not config.is_moe:
        return 0, 0, 0, 3 * hidden * config.intermediate_size
    shared = 3 * hidden * config.shared_expert_intermediate_size + hidden
    return 3 * hidden * config.moe_intermediate_size, shared, hidden * config.num_experts, 0
