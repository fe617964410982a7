"""The files of a checkpoint directory: JSON beside safetensors, in one file or in shards with an index.

A safetensors file is a header (name, dtype, shape and byte range of every tensor) and then the bytes. Names and shapes
are read from headers alone; data only when asked for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from minserve.errors import CheckpointError
from minserve.model.checkpoint_layouts import LANGUAGE_PREFIX, canonical_name

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"


def checkpoint_directory(path: str | Path) -> Path:
    """The path, if it is a directory with a config.json; else a CheckpointError that says what it lacks."""
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a directory")
    if not (path / "config.json").is_file():
        raise CheckpointError(f"{path} is no checkpoint: it has no config.json")
    return path


def read_json(file: Path) -> dict:
    """A JSON file's object."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{file.parent} has no {file.name}") from error
    except ValueError as error:
        raise CheckpointError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} holds no JSON object")
    return content


def has_weights(path: Path) -> bool:
    """Whether the directory names any weights, whole or in shards."""
    return (path / SINGLE_FILE).is_file() or (path / INDEX_FILE).is_file()


def stored_names(path: Path) -> set[str]:
    """The names in the files, as stored; shards are not opened, their index is believed."""
    files = _weight_files(path)
    if path / SINGLE_FILE in files:
        return set(_open(path / SINGLE_FILE).keys())
    return set().union(*files.values())


class StoredTensors:
    """The tensors of a checkpoint directory under their canonical names.

    Arguments:
        path: the directory. Every header is read and checked here.

    Attributes:
        shapes: canonical name to stored shape of all tensors but those of a vision tower.
        num_vision: how many tensors a vision tower has.
        is_multimodal: whether the names carry a multimodal checkpoint's prefix.
        num_bytes: canonical name to stored size of what `read` was asked for.

    Raises:
        CheckpointError: names the file that is absent, truncated or corrupt, or the tensor stored twice.
    """

    def __init__(self, path: Path):
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.num_bytes: dict[str, int] = {}
        self.num_vision, self.is_multimodal = 0, False
        self._place: dict[str, tuple[Path, str]] = {}
        self._handles: dict[Path, safe_open] = {}
        for file, expected in _weight_files(path).items():
            self._handles[file] = _open(file)
            names = set(self._handles[file].keys())
            absent = sorted(expected - names)
            if absent:
                raise CheckpointError(f"{file} lacks {absent[0]}, which {INDEX_FILE} places there")
            for name in sorted(names):
                self._add(file, name)

    def _add(self, file: Path, stored_name: str) -> None:
        """Take note of one stored tensor."""
        name = canonical_name(stored_name)
        if name is None:
            self.num_vision += 1
            return
        if name in self.shapes:
            raise CheckpointError(f"{name} is stored twice: in {self._place[name][0]} and in {file}")
        self.is_multimodal |= stored_name.startswith(LANGUAGE_PREFIX)
        self.shapes[name] = tuple(self._handles[file].get_slice(stored_name).get_shape())
        self._place[name] = (file, stored_name)

    def read(self, name: str) -> Tensor:
        """The tensor as stored; it may share memory with the file. Changes: `num_bytes`."""
        file, stored_name = self._place[name]
        try:
            tensor = self._handles[file].get_tensor(stored_name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file}: {stored_name} cannot be read: {error}") from error
        if not tensor.is_floating_point():
            raise CheckpointError(f"{file}: {stored_name} is stored as {tensor.dtype}; only floats are read")
        self.num_bytes[name] = tensor.nbytes
        return tensor


def _weight_files(path: Path) -> dict[Path, set[str]]:
    """The safetensors files and the names that the index, if any, places in each."""
    if (path / SINGLE_FILE).is_file():
        return {path / SINGLE_FILE: set()}
    if not (path / INDEX_FILE).is_file():
        raise CheckpointError(f"{path} has neither {SINGLE_FILE} nor {INDEX_FILE}")
    weight_map = read_json(path / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{path / INDEX_FILE} has no weight_map of names to files")
    files: dict[Path, set[str]] = {}
    for name, file in weight_map.items():
        if Path(file).name != file:
            raise CheckpointError(f"{path / INDEX_FILE} places {name} outside the directory: {file}")
        files.setdefault(path / file, set()).add(name)
    return files


def _open(file: Path) -> safe_open:
    """A safetensors file, its header read and its length checked."""
    try:
        return safe_open(file, framework="pt", device="cpu")
    except FileNotFoundError as error:
        raise CheckpointError(f"{file} is absent, and {INDEX_FILE} names it") from error
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is truncated or no safetensors file: {error}") from error


def write_weights(path: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype, max_shard_bytes: int | None) -> None:
    """Write the tensors as one file, or as shards of at most `max_shard_bytes` (or of one tensor) with an index.

    Changes: weight files of an earlier checkpoint in the directory are removed.
    """
    shards = _split(tensors, dtype, max_shard_bytes)
    names = [SINGLE_FILE]
    if len(shards) > 1:
        names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        # A copy per shard: views of one storage (a fused projection's parts) are not accepted by save_file.
        stored = {key: tensors[key].detach().to("cpu", dtype, copy=True).contiguous() for key in shard}
        write_whole(path / name, lambda place, stored=stored: save_file(stored, place, metadata={"format": "pt"}))
    if len(shards) > 1:
        weight_map = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        total = sum(tensor.numel() for tensor in tensors.values()) * dtype.itemsize
        index = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n"
        write_whole(path / INDEX_FILE, lambda place: place.write_text(index, encoding="utf-8"))
        names.append(INDEX_FILE)
    for stale in {*path.glob("model-*-of-*.safetensors"), path / SINGLE_FILE, path / INDEX_FILE}:
        if stale.name not in names:
            stale.unlink(missing_ok=True)


def write_whole(file: Path, write: Callable[[Path], object]) -> None:
    """Write beside the place, then move there: a reader sees the old file or the new one, never half of one."""
    partial = file.with_name(file.name + ".partial")
    write(partial)
    partial.chmod(0o644)  # the safetensors package writes for its owner alone
    partial.replace(file)


def _split(tensors: Mapping[str, Tensor], dtype: torch.dtype, max_shard_bytes: int | None) -> list[list[str]]:
    """Names by shard, in order, each shard as full as it may be."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * dtype.itemsize
        if max_shard_bytes is not None and shards[-1] and filled + size > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards
