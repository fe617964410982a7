"""`minserve doctor`: what this machine has, what the model is, and what is missing for what."""

from __future__ import annotations

import platform
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import torch

from minserve.llm import shipped_checkpoint
from minserve.model.checkpoint import read_config
from minserve.model.counting import count_parameters, expected_distinct_experts, kv_bytes_per_token, state_bytes

# package -> what needs it, and the extra that brings it
OPTIONAL = (
    ("matplotlib", "pictures of the chapters", "notebooks"),
    ("transformers", "comparing with the public implementation", "notebooks"),
    ("tokenizers", "tokenizers of real checkpoints", "hf"),
    ("jinja2", "chat templates of real checkpoints", "hf"),
    ("triton", "kernels", "triton"),
)


def report(path: str | Path | None = None) -> str:
    """The report as text.

    Arguments:
        path: a checkpoint folder; None takes the shipped model.
    Raises CheckpointError when the folder is no checkpoint.
    """
    folder = Path(path) if path else shipped_checkpoint()
    return "\n".join([*_machine(), "", *_model(folder), "", *_optional()])


def _machine() -> list[str]:
    """Versions, device, and which implementation runs."""
    cuda = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"
    return [
        f"minserve      {metadata.version('minserve') if _installed('minserve') else 'from a checkout'}",
        f"python        {platform.python_version()} on {platform.system()} {platform.machine()}",
        f"torch         {torch.__version__}, {torch.get_num_threads()} threads",
        f"GPU           {cuda}",
        "runs on       cpu, impl torch (the plain PyTorch references)",
    ]


def _model(folder: Path) -> list[str]:
    """What the model in this folder keeps, reads and remembers."""
    config = read_config(folder)
    counts = count_parameters(config)
    total = counts.total_with_mtp
    lines = [
        f"model         {folder.name}: {config.num_linear_layers} Gated DeltaNet + {config.num_full_layers} gated "
        f"attention layers, context {config.max_position_embeddings}",
        f"parameters    {total:,} resident, {counts.active:,} active per token ({counts.active / total:.0%})",
    ]
    if config.is_moe:
        at_32 = expected_distinct_experts(config, 32)
        lines.append(f"experts       {config.num_experts} per layer, {config.num_experts_per_tok} chosen per token; "
                     f"32 tokens touch {at_32:.1f} if all are equally liked")  # fmt: skip
    lines += [
        f"KV cache      {kv_bytes_per_token(config, dtype_bytes=4):,} bytes per token in float32, growing",
        f"state         {state_bytes(config, conv_dtype_bytes=4):,} bytes per request, whatever its length",
        f"MTP head      {'yes' if config.mtp_num_hidden_layers else 'no'}",
    ]
    return lines


def _optional() -> list[str]:
    """Each optional package: its version, or what is missed without it and how to get it."""
    return [
        f"{package:13} {metadata.version(package)}" if _installed(package)
        else f"{package:13} missing, needed for {what}: pip install 'minserve[{extra}]'"
        for package, what, extra in OPTIONAL
    ]  # fmt: skip


def _installed(package: str) -> bool:
    """Whether a package is installed with its metadata, without importing it."""
    if find_spec(package) is None:
        return False
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True
