"""Reading and writing checkpoints: a directory with config.json and safetensors, as transformers keeps them.

Reading goes from names to data: every canonical tensor is first given its stored pieces (`checkpoint_layouts.py`) from
the headers, so that a missing, extra or misshapen tensor is an error that names it before any weight is touched. Then
each piece is converted on its way into its place: memory holds the result and one stored tensor, never both wholes.

    config = read_config(path)
    tensors, report = read_tensors(path, config, shapes, torch.float32, "cpu")
    write_checkpoint(path, config, tensors)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from minserve.errors import CheckpointError
from minserve.model.checkpoint_files import (
    StoredTensors,
    checkpoint_directory,
    has_weights,
    read_json,
    stored_names,
    write_weights,
    write_whole,
)
from minserve.model.checkpoint_layouts import SCALE_SUFFIX, Piece, dequantize_blocks, pieces_of, scale_grid
from minserve.model.config import ModelConfig

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class ReadReport:
    """What `read_tensors` found.

    Attributes:
        num_tensors: stored tensors that were read, scales included.
        num_skipped_vision: tensors of a vision tower, left unread.
        num_bytes: size of what was read, as stored.
        layouts: names of the layouts met: flat, multimodal, per-expert, fused-projections, fp8, tied.
    """

    num_tensors: int
    num_skipped_vision: int
    num_bytes: int
    layouts: tuple[str, ...]


def read_config(path: str | Path) -> ModelConfig:
    """What the model in this directory is.

    Two things are settled by the directory and not by config.json alone. The end tokens are generation_config.json's
    where it names any. And the MTP head is there when its tensors are: transformers drops the tensors on saving but
    keeps the field, and other configs never had the field.

    Raises:
        CheckpointError: no directory, no config.json, or one that lacks what the model needs.
        InvalidValue: a field whose value cannot be.
    """
    path = checkpoint_directory(path)
    config = ModelConfig.from_dict(read_json(path / "config.json"))
    generation = path / "generation_config.json"
    eos = read_json(generation).get("eos_token_id") if generation.is_file() else None
    if eos is not None:
        config = replace(config, eos_token_ids=tuple(eos) if isinstance(eos, list) else (eos,))
    if has_weights(path):
        config = replace(config, mtp_num_hidden_layers=int(has_mtp(path)))
    return config


def has_mtp(path: str | Path) -> bool:
    """Whether the checkpoint holds an MTP head (`mtp.*`); reads names only."""
    return any(name.startswith("mtp.") for name in stored_names(checkpoint_directory(path)))


def read_tensors(
    path: str | Path,
    config: ModelConfig,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> tuple[dict[str, Tensor], ReadReport]:
    """The model's tensors under their canonical names, whatever layout the files have.

    Arguments:
        path: the checkpoint's directory.
        config: of the same checkpoint, from `read_config`.
        shapes: canonical name to shape of every tensor that the model wants.
        dtype: of the results; float8 weights are multiplied by their scales.
        device: of the results.

    Returns:
        The tensors, none of which shares memory with a file, and a report of what was found.

    Raises:
        CheckpointError: names the file that cannot be read, or the tensor that is missing, extra or misshapen.
    """
    path = checkpoint_directory(path)
    block = _fp8_block(read_json(path / "config.json"))
    stored = StoredTensors(path)
    plan = {name: pieces_of(name, tuple(shape), config, stored.shapes) for name, shape in shapes.items()}
    _check_plan(path, stored, plan, config, block)
    tensors = {}
    for name, pieces in plan.items():
        tensors[name] = torch.empty(shapes[name], dtype=dtype, device=device)
        for piece in pieces:
            tensors[name][piece.where] = piece.take(_read_weight(path, stored, piece.name, block, dtype))
    if config.tie_word_embeddings and "lm_head.weight" in stored.shapes:
        _check_tied(path, stored)
    return tensors, _report(stored, plan, config)


def write_checkpoint(
    path: str | Path,
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    *,
    dtype: torch.dtype = torch.bfloat16,
    max_shard_bytes: int | None = None,
    files: Mapping[str, str] | None = None,
) -> None:
    """Write a checkpoint that minserve and transformers load as it is.

    Arguments:
        path: a directory, made if absent.
        config: written as config.json and, for the end tokens, generation_config.json.
        tensors: canonical name to tensor; `lm_head.weight` of a tied model is left out.
        dtype: what the weights are stored as.
        max_shard_bytes: split the weights into files of at most this size (or of one tensor); None for one file.
        files: name to text of what else belongs there, such as tokenizer.json.

    Changes: weight files of an earlier checkpoint at the same place are removed.
    """
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    stored_as = str(dtype).removeprefix("torch.")
    texts = {
        "config.json": json.dumps({**config.to_dict(), "dtype": stored_as}, indent=2) + "\n",
        "generation_config.json": json.dumps({"eos_token_id": list(config.eos_token_ids)}, indent=2) + "\n",
        **(files or {}),
    }
    for name, text in texts.items():
        write_whole(path / name, lambda place, text=text: place.write_text(text, encoding="utf-8"))
    is_spare = {"lm_head.weight"} if config.tie_word_embeddings else set()
    write_weights(path, {name: t for name, t in tensors.items() if name not in is_spare}, dtype, max_shard_bytes)


def _fp8_block(raw_config: Mapping) -> tuple[int, int]:
    """Rows and columns that share a scale; the official checkpoints' 128 x 128 unless the config says otherwise."""
    text = raw_config.get("text_config") or {}
    quantization = raw_config.get("quantization_config") or text.get("quantization_config") or {}
    method = quantization.get("quant_method", "fp8")
    if method != "fp8":
        raise CheckpointError(f"config.json: quant_method is {method!r}; only 'fp8' is read")
    block = quantization.get("weight_block_size", [128, 128])
    if not (isinstance(block, list) and len(block) == 2 and all(type(side) is int and side > 0 for side in block)):
        raise CheckpointError(f"config.json: weight_block_size is {block!r}; wanted are two whole numbers")
    return block[0], block[1]


def _check_plan(
    path: Path, stored: StoredTensors, plan: Mapping[str, list[Piece]], config: ModelConfig, block: tuple[int, int]
) -> None:
    """Raise CheckpointError for the first tensor that is missing or misshapen, or that nothing asked for."""
    used = {"lm_head.weight"} if config.tie_word_embeddings else set()
    pieces = [piece for parts in plan.values() for piece in parts]
    missing = [piece.name for piece in pieces if piece.name not in stored.shapes]
    if missing:
        raise CheckpointError(f"{path}: tensor {missing[0]} is missing{_and_others(missing)}")
    for piece in pieces:
        scale = piece.name + SCALE_SUFFIX
        wanted = {piece.name: piece.shape}
        if scale in stored.shapes:
            wanted[scale] = scale_grid(piece.shape, block)
        for name, shape in wanted.items():
            if stored.shapes[name] != shape:
                raise CheckpointError(f"{path}: tensor {name} has shape {stored.shapes[name]}; wanted is {shape}")
        used |= wanted.keys()
    extra = sorted(stored.shapes.keys() - used)
    if extra:
        raise CheckpointError(f"{path}: tensor {extra[0]} has no place in this model{_and_others(extra)}")


def _report(stored: StoredTensors, plan: Mapping[str, list[Piece]], config: ModelConfig) -> ReadReport:
    """What was read, once it has been."""
    layouts = {piece.layout for pieces in plan.values() for piece in pieces}
    layouts |= {"multimodal"} if stored.is_multimodal else set()
    layouts |= {"tied"} if config.tie_word_embeddings else set()
    layouts |= {"fp8"} if any(name.endswith(SCALE_SUFFIX) for name in stored.num_bytes) else set()
    sizes = stored.num_bytes.values()
    return ReadReport(len(sizes), stored.num_vision, sum(sizes), tuple(sorted(layouts)))


def _and_others(names: list[str]) -> str:
    """How many more names have the same fault."""
    return f" (and {len(names) - 1} others)" if len(names) > 1 else ""


def _read_weight(path: Path, stored: StoredTensors, name: str, block: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """One stored weight; a float8 one multiplied by its scales."""
    weight, scale = stored.read(name), name + SCALE_SUFFIX
    if (weight.dtype in FP8_DTYPES) != (scale in stored.shapes):
        fault = "is missing" if weight.dtype in FP8_DTYPES else f"belongs to a weight stored as {weight.dtype}"
        raise CheckpointError(f"{path}: tensor {scale} {fault}")
    return dequantize_blocks(weight, stored.read(scale), block, dtype) if scale in stored.shapes else weight


def _check_tied(path: Path, stored: StoredTensors) -> None:
    """A tied model's file may repeat the embedding as lm_head, but must not hold another one."""
    if not torch.equal(stored.read("lm_head.weight"), stored.read("model.embed_tokens.weight")):
        raise CheckpointError(f"{path}: lm_head.weight differs from the embedding, and config.json ties the two")
