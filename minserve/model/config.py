"""What the model is: the text configuration of the Qwen3.5 family, under the names of its config.json.

One class describes every member: dense (`num_experts == 0`) and sparse, hybrid and all-attention. A layer is
"linear_attention" (Gated DeltaNet, a state of fixed size) or "full_attention" (gated attention, a cache that grows).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import inf
from types import MappingProxyType

from minserve.errors import CheckpointError, InvalidValue

LINEAR, FULL = "linear_attention", "full_attention"
MODEL_TYPES = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a model, in the field's names; see the properties for what follows from it.

    Fields not obvious from their names: `layer_types` has one entry per layer; `num_experts` 0 means a dense MLP of
    `intermediate_size`; `partial_rotary_factor` is the share of each attention head that RoPE turns;
    `mtp_num_hidden_layers` is 1 when the checkpoint has a multi-token-prediction head, else 0.
    Raises InvalidValue naming the field when sizes do not fit each other.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    layer_types: tuple[str, ...]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    linear_num_key_heads: int = 0
    linear_num_value_heads: int = 0
    linear_key_head_dim: int = 0
    linear_value_head_dim: int = 0
    linear_conv_kernel_dim: int = 4
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    shared_expert_intermediate_size: int = 0
    intermediate_size: int = 0
    mtp_num_hidden_layers: int = 0
    rope_theta: float = 10_000.0
    partial_rotary_factor: float = 0.25
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 32_768
    eos_token_ids: tuple[int, ...] = ()
    model_type: str = "qwen3_5_moe_text"

    def __post_init__(self):
        self._check_types()
        for field in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
                      "head_dim", "max_position_embeddings"):  # fmt: skip
            self._require(field, getattr(self, field) >= 1, "at least 1")
        self._require("layer_types", len(self.layer_types) == self.num_hidden_layers, "one entry per hidden layer")
        self._require("layer_types", set(self.layer_types) <= {LINEAR, FULL}, f"made of {LINEAR!r} and {FULL!r}")
        self._require("num_attention_heads", self.num_attention_heads % self.num_key_value_heads == 0,
                      f"a multiple of num_key_value_heads ({self.num_key_value_heads})")  # fmt: skip
        if LINEAR in self.layer_types:
            for field in ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim",
                          "linear_value_head_dim", "linear_conv_kernel_dim"):  # fmt: skip
                self._require(field, getattr(self, field) >= 1, "at least 1 in a model with linear_attention layers")
            self._require("linear_num_value_heads", self.linear_num_value_heads % self.linear_num_key_heads == 0,
                          f"a multiple of linear_num_key_heads ({self.linear_num_key_heads})")  # fmt: skip
        if self.is_moe:
            self._require("num_experts_per_tok", 1 <= self.num_experts_per_tok <= self.num_experts,
                          f"between 1 and num_experts ({self.num_experts})")  # fmt: skip
            self._require("moe_intermediate_size", self.moe_intermediate_size >= 1, "at least 1 with experts")
        else:
            self._require("intermediate_size", self.intermediate_size >= 1, "at least 1 in a dense model")
        self._require("rope_theta", 0 < self.rope_theta < inf, "a finite number above 0")
        self._require("rms_norm_eps", 0 < self.rms_norm_eps < inf, "a finite number above 0")
        self._require("partial_rotary_factor", 0 < self.partial_rotary_factor <= 1, "in (0, 1]")
        self._require("rotary_dim", self.rotary_dim % 2 == 0, "even: head_dim x partial_rotary_factor")
        self._require("mtp_num_hidden_layers", self.mtp_num_hidden_layers in (0, 1), "0 or 1")

    def _check_types(self) -> None:
        """Raise InvalidValue for the first field that is not of its type: a config.json may hold anything."""
        kinds = {"int": int, "float": (int, float), "bool": bool, "str": str}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type.startswith("tuple"):
                kind = {"tuple[int, ...]": int, "tuple[str, ...]": str}[field.type]
                fine = isinstance(value, tuple) and all(type(x) is kind for x in value)
                limit = f"a list of {kind.__name__}"
            else:
                fine = isinstance(value, kinds[field.type]) and (field.type == "bool") == isinstance(value, bool)
                limit = f"of type {field.type}"
            self._require(field.name, fine, limit)

    def _require(self, field: str, fine: bool, limit: str) -> None:
        """Raise InvalidValue unless `fine`."""
        if not fine:
            raise InvalidValue(field, getattr(self, field), limit)

    @property
    def is_moe(self) -> bool:
        """True when the MLPs are mixtures of experts."""
        return self.num_experts > 0

    @property
    def key_dim(self) -> int:
        """Width of all DeltaNet keys of a token."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_dim(self) -> int:
        """Width of all DeltaNet values of a token."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def conv_channels(self) -> int:
        """Channels of the DeltaNet convolution: queries, keys and values side by side."""
        return 2 * self.key_dim + self.value_dim

    @property
    def rotary_dim(self) -> int:
        """How many of an attention head's dimensions RoPE turns."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def num_full_layers(self) -> int:
        """Layers with a KV cache, the MTP layer not included."""
        return self.layer_types.count(FULL)

    @property
    def num_linear_layers(self) -> int:
        """Layers with a recurrent state."""
        return self.layer_types.count(LINEAR)

    @classmethod
    def from_dict(cls, raw: Mapping) -> ModelConfig:
        """Read the content of a config.json; a multimodal one is read at its `text_config`.

        Accepts `layer_types` or `full_attention_interval` (4 when neither is given), RoPE settings at the top or in
        `rope_parameters`, one end token or a list. Keys that are known not to change the text decoder are ignored.
        Raises CheckpointError naming a missing or unknown field, a model type or a feature this decoder does not have.
        """
        text = dict(raw)
        if isinstance(raw.get("text_config"), Mapping):
            # The tie is between the whole model's ends, so the outer config's word goes before the inner one's.
            outer = {name: raw[name] for name in ("tie_word_embeddings",) if raw.get(name) is not None}
            text = {**raw["text_config"], **outer}
        rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
        if not isinstance(rope, Mapping):
            raise CheckpointError(f"config.json: rope_parameters is {rope!r}, not an object")
        text = {**text, **{k: rope[k] for k in ("rope_theta", "partial_rotary_factor") if k in rope}}
        if text.get("model_type") not in MODEL_TYPES:
            raise CheckpointError(f"config.json: model_type is {text.get('model_type')!r}; known are {MODEL_TYPES}")
        _refuse_unsupported(text, rope)
        known = {f.name for f in fields(cls)}
        unknown = sorted(text.keys() - known - _HARMLESS - _SUPPORTED.keys())
        if unknown:
            raise CheckpointError(f"config.json: field {unknown[0]!r} is unknown, and might change what is computed")
        if text["model_type"] == "qwen3_5_text":
            text["num_experts"] = 0
        text["layer_types"] = _layer_types(text)
        required = (*_REQUIRED, *(_REQUIRED_DENSE if text.get("num_experts") == 0 else _REQUIRED_MOE),
                    *(_REQUIRED_LINEAR if LINEAR in text["layer_types"] else ()))  # fmt: skip
        missing = [name for name in required if text.get(name) is None]
        if missing:
            raise CheckpointError(f"config.json: required field {missing[0]!r} is missing")
        eos = text.get("eos_token_id")
        text["eos_token_ids"] = () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
        return cls(**{k: v for k, v in text.items() if k in known and v is not None})

    def to_dict(self) -> dict:
        """The config.json of this model, as other engines read it."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        theta, factor = plain.pop("rope_theta"), plain.pop("partial_rotary_factor")
        eos = plain.pop("eos_token_ids")
        # A text-only position uses one coordinate, so the split of the rotary pairs is free; others want to see one.
        third = self.rotary_dim // 2 // 3
        section = [self.rotary_dim // 2 - 2 * third, third, third]
        return {
            **plain,
            # The canonical tensor names are Qwen3.5's, so that is what a written checkpoint is.
            "architectures": ["Qwen3_5MoeForCausalLM" if self.is_moe else "Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_moe_text" if self.is_moe else "qwen3_5_text",
            "layer_types": list(self.layer_types),
            "eos_token_id": list(eos),
            "rope_parameters": {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": factor,
                                "mrope_section": section, "mrope_interleaved": True},
            "hidden_act": "silu", "attn_output_gate": True, "attention_bias": False, "norm_topk_prob": True,
            "mamba_ssm_dtype": "float32",
        }  # fmt: skip


_REQUIRED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
             "rms_norm_eps", "max_position_embeddings")  # fmt: skip
_REQUIRED_LINEAR = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
_REQUIRED_MOE = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
_REQUIRED_DENSE = ("intermediate_size",)

# What this decoder computes; another value would silently change the numbers.
_SUPPORTED = MappingProxyType({
    "hidden_act": "silu", "attention_bias": False, "attn_output_gate": True, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": (), "mtp_use_dedicated_embeddings": False, "use_sliding_window": False,
})  # fmt: skip

# Fields of published configs that say nothing about what the text decoder computes (or that are read elsewhere).
_HARMLESS = frozenset({
    "_name_or_path", "architectures", "attention_dropout", "auto_map", "bos_token_id", "chunk_size_feed_forward",
    "dtype", "eos_token_id", "full_attention_interval", "id2label", "initializer_range", "is_encoder_decoder",
    "label2id", "language_model_only", "mamba_ssm_dtype", "mrope_interleaved", "mrope_section", "name_or_path",
    "output_attentions", "output_hidden_states", "output_router_logits", "pad_token_id", "problem_type",
    "quantization_config", "return_dict", "rope_parameters", "rope_scaling", "router_aux_loss_coef", "torch_dtype",
    "transformers_version", "use_cache",
})  # fmt: skip


def _layer_types(text: Mapping) -> tuple[str, ...]:
    """The kind of every layer: listed, or every `full_attention_interval`-th layer full."""
    listed, count = text.get("layer_types"), text.get("num_hidden_layers")
    if listed is not None:
        return tuple(listed) if isinstance(listed, list | tuple) else (listed,)
    interval = 4 if text.get("full_attention_interval") is None else text["full_attention_interval"]
    for field, value in (("num_hidden_layers", count), ("full_attention_interval", interval)):
        if type(value) is not int or value < 1:
            raise InvalidValue(field, value, "a whole number, at least 1")
    return tuple(FULL if i % interval == interval - 1 else LINEAR for i in range(count))


def _refuse_unsupported(text: Mapping, rope: Mapping) -> None:
    """Name what this decoder does not compute."""
    for field, value in _SUPPORTED.items():
        given = tuple(text[field]) if isinstance(text.get(field), list) else text.get(field)
        if given is not None and given != value:
            raise CheckpointError(f"config.json: {field} is {text[field]!r}; this decoder computes {value!r}")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise CheckpointError(f"config.json: rope_type is {kind!r}; this decoder computes 'default'")
