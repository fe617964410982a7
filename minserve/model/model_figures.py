"""The published shapes of the Qwen3.5 family, so that what is counted here can be counted for models nobody here owns.

Each file of `minserve/data/models/` holds one text decoder: the fields of its config.json that fix sizes, where they
were read, and when. No weights: a shape is enough to count parameters, bytes and FLOPs (`minserve.model.counting`).
"""

from __future__ import annotations

import json
from importlib.resources import files

from minserve.errors import InvalidValue
from minserve.model.config import ModelConfig


def model_names() -> tuple[str, ...]:
    """The names that `named_config` knows, sorted.

    >>> len(model_names()), model_names()[-1]
    (10, 'qwen3.8-2.4t-a95b')
    """
    file_names = (entry.name for entry in _folder().iterdir())
    return tuple(sorted(name.removesuffix(".json") for name in file_names if name.endswith(".json")))


def named_config(name: str) -> ModelConfig:
    """The configuration of a published model, by its lower-case name.

    Raises:
        InvalidValue: no such name; the message lists the known ones.

    >>> named_config("qwen3.8-2.4t-a95b").num_experts
    512
    """
    return ModelConfig.from_dict(_read(name)["config"])


def config_sources(name: str) -> tuple[str, ...]:
    """Where the figures of a published model were read: the day, then the addresses.

    Raises:
        InvalidValue: no such name; the message lists the known ones.

    >>> config_sources("qwen3.5-0.8b")[0]
    'read on 2026-11-29'
    """
    content = _read(name)
    return (f"read on {content['read_on']}", *content["sources"])


def _folder():
    """The folder of the data files, also inside a wheel."""
    return files("minserve") / "data" / "models"


def _read(name: str) -> dict:
    """One data file."""
    if name not in model_names():
        raise InvalidValue("name", name, "one of " + ", ".join(model_names()))
    return json.loads((_folder() / f"{name}.json").read_text(encoding="utf-8"))
