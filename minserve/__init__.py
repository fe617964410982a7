"""minserve: serving large language models, from scratch, small enough to read.

>>> from minserve import LLM, SamplingParams
>>> output = LLM().generate("def area(", SamplingParams(max_tokens=8))[0]
>>> output.usage.prompt_tokens, output.usage.completion_tokens
(9, 8)
"""

from importlib import import_module
from types import MappingProxyType

__version__ = "0.1.0"

# Loaded on first use, so that `import minserve` is quick.
_HOME = MappingProxyType({
    "LLM": "minserve.llm",
    "EngineConfig": "minserve.engine_config",
    "Parts": "minserve.parts",
    "SamplingParams": "minserve.request",
    "Output": "minserve.request",
})  # fmt: skip
__all__ = ["LLM", "EngineConfig", "Output", "Parts", "SamplingParams"]


def __getattr__(name: str) -> object:
    """Import a public name from its module when it is first asked for."""
    if name not in _HOME:
        raise AttributeError(f"module 'minserve' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    """The public names, loaded or not."""
    return sorted({*globals(), *__all__})
