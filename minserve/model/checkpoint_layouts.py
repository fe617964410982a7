"""The ways in which checkpoints of this family lay out the same tensors, and how each becomes the canonical one.

The canonical names and shapes are transformers' flat text names, which are also the names in `HybridLM.state_dict()`.
A file may instead hold

- `model.language_model.*`: a multimodal checkpoint's text part, beside `model.visual.*`, which nothing here needs;
- `mlp.experts.N.{gate,up,down}_proj.weight`: one tensor per expert, for `experts.gate_up_proj [E, 2I, H]` (gate rows
  first, then up) and `experts.down_proj [E, H, I]`;
- `linear_attn.in_proj_qkvz` and `in_proj_ba` (Qwen3-Next): one matrix for queries, keys, values and output gates, and
  one for beta and decay, interleaved by key head. With r = value heads per key head, the rows of key head j are

      in_proj_qkvz:  | q: dk | k: dk | v: r * dv | z: r * dv |        in_proj_ba:  | b: r | a: r |

- float8 weights with one scale per 128 x 128 block, `NAME_scale_inv` beside `NAME`. In spite of its name the scale is
  multiplied. The grid is [ceil(rows / 128), ceil(columns / 128)]: the last block of a ragged edge is smaller
  (DeepSeek-V3, README_WEIGHTS.md).

A canonical tensor is described as a list of `Piece`s, from names and shapes alone, before any data is read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from minserve.errors import CheckpointError
from minserve.model.config import ModelConfig

VISION_PREFIXES = ("model.visual.", "visual.")
LANGUAGE_PREFIX = "model.language_model."
SCALE_SUFFIX = "_scale_inv"


@dataclass(frozen=True)
class Piece:
    """One stored tensor's part in a canonical one: `canonical[where] = take(stored)`.

    Attributes:
        name: canonical spelling of the stored tensor's name.
        shape: the shape that the stored tensor must have.
        where: index into the canonical tensor.
        take: picks and reorders the stored tensor's rows.
        layout: what this layout is called in a `ReadReport`.
    """

    name: str
    shape: tuple[int, ...]
    where: tuple[int | slice, ...] = ()
    take: Callable[[Tensor], Tensor] = lambda stored: stored
    layout: str = "flat"


def canonical_name(stored_name: str) -> str | None:
    """The name without a multimodal checkpoint's prefix, or None for a vision tensor.

    >>> canonical_name("model.language_model.layers.0.input_layernorm.weight")
    'model.layers.0.input_layernorm.weight'
    >>> canonical_name("model.visual.patch_embed.proj.weight") is None
    True
    """
    if stored_name.startswith(VISION_PREFIXES):
        return None
    if stored_name.startswith(LANGUAGE_PREFIX):
        return "model." + stored_name.removeprefix(LANGUAGE_PREFIX)
    return stored_name


def pieces_of(name: str, shape: tuple[int, ...], config: ModelConfig, stored: Collection[str]) -> list[Piece]:
    """Which stored tensors make up the canonical tensor `name`.

    Arguments:
        name: canonical name.
        shape: the shape that the model wants.
        config: gives the head counts that fused projections are interleaved by.
        stored: canonical spellings of all names in the checkpoint.

    Returns:
        The pieces; a name among them may be absent from `stored`, which means that the tensor is missing.
    """
    module, _, leaf = name.rpartition(".experts.")
    if leaf in ("gate_up_proj", "down_proj") and name not in stored:
        pieces = _expert_pieces(f"{module}.experts", leaf, shape)
        return pieces if any(piece.name in stored for piece in pieces) else [Piece(name, shape)]
    module, _, leaf = name.rpartition(".in_proj_")
    fused = {"qkv.weight": "qkvz", "z.weight": "qkvz", "b.weight": "ba", "a.weight": "ba"}.get(leaf)
    if fused is not None and f"{module}.in_proj_{fused}.weight" in stored:
        return [_fused_piece(f"{module}.in_proj_{fused}.weight", leaf.removesuffix(".weight"), shape[-1], config)]
    return [Piece(name, shape)]


def _expert_pieces(experts: str, leaf: str, shape: tuple[int, ...]) -> list[Piece]:
    """The per-expert matrices of one layer, as places in its stacked tensor."""
    num_experts, num_rows, num_columns = shape
    if leaf == "down_proj":
        parts = [("down_proj", slice(None), num_rows)]
    else:
        half = num_rows // 2
        parts = [("gate_proj", slice(0, half), half), ("up_proj", slice(half, num_rows), half)]
    return [
        Piece(f"{experts}.{expert}.{part}.weight", (rows, num_columns), (expert, where), layout="per-expert")
        for expert in range(num_experts)
        for part, where, rows in parts
    ]


def _fused_piece(name: str, part: str, num_columns: int, config: ModelConfig) -> Piece:
    """The rows of one projection within Qwen3-Next's fused, head-interleaved ones."""
    num_key_heads, repeat = config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads
    key_rows, value_rows = config.linear_key_head_dim, repeat * config.linear_value_head_dim
    if part in ("qkv", "z"):
        sizes = {"q": key_rows, "k": key_rows, "v": value_rows, "z": value_rows}
    else:
        sizes = {"b": repeat, "a": repeat}
    take = partial(_take_interleaved, num_key_heads=num_key_heads, sizes=sizes, parts=part)
    return Piece(name, (num_key_heads * sum(sizes.values()), num_columns), take=take, layout="fused-projections")


def _take_interleaved(
    stored: Float[Tensor, "rows columns"], num_key_heads: int, sizes: dict[str, int], parts: str
) -> Float[Tensor, "taken columns"]:
    """Undoes the interleaving: all heads of the first part, then all of the next."""
    by_head = rearrange(stored, "(head row) column -> head row column", head=num_key_heads)
    split = dict(zip(sizes, by_head.split(list(sizes.values()), dim=1), strict=True))
    return torch.cat([rearrange(split[part], "head row column -> (head row) column") for part in parts])


def scale_grid(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """The shape of the scales of a block-quantised weight; a ragged edge has a block of its own.

    >>> scale_grid((320, 130), (128, 128))
    (3, 2)
    """
    *leading, num_rows, num_columns = shape
    return (*leading, -(-num_rows // block[0]), -(-num_columns // block[1]))


def dequantize_blocks(
    weight: Float[Tensor, "*leading rows columns"],
    scale: Float[Tensor, "*leading row_blocks column_blocks"],
    block: tuple[int, int],
    dtype: torch.dtype,
) -> Float[Tensor, "*leading rows columns"]:
    """The weight times its block's scale, computed in at least float32.

    Arguments:
        weight: float8.
        scale: one per block, bfloat16 or float32.
        block: rows and columns of a block.
        dtype: of the result.

    >>> weight = torch.ones(3, 2).to(torch.float8_e4m3fn)
    >>> dequantize_blocks(weight, torch.tensor([[2.0], [5.0]]), (2, 2), torch.float32)[:, 0].tolist()
    [2.0, 2.0, 5.0]
    """
    wanted = scale_grid(tuple(weight.shape), block)
    if tuple(scale.shape) != wanted:
        raise CheckpointError(f"the scales of a weight {tuple(weight.shape)} are {tuple(scale.shape)}, not {wanted}")
    wide = torch.promote_types(dtype, torch.float32)
    *_, num_rows, num_columns = weight.shape
    per_row = scale.to(wide).repeat_interleave(block[0], dim=-2)[..., :num_rows, :]
    per_weight = per_row.repeat_interleave(block[1], dim=-1)[..., :num_columns]
    return (weight.to(wide) * per_weight).to(dtype)
