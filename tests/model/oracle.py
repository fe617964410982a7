"""The oracle: random checkpoints written by transformers' own classes, and what those classes compute from them.

In float32 transformers is asked as it stands. In float64 it is no oracle as it stands, since it casts to float32 in
its norms, softmaxes and delta rule (5e-5 of the logits). So its modelling source is read, each such cast is widened
to float64, and the result is executed as a module of its own.

    python tests/model/oracle.py        prints the table of differences
"""

from __future__ import annotations

import functools
import importlib
import re
import sys
import tempfile
import types
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from minserve.model.hybrid_lm import HybridLM
from minserve.model.naive import NaiveMemory
from minserve.model.step import Step

NUM_TOKENS = 132  # whole delta-rule chunks, and a rest
CHUNKS = range(1, 71)
KINDS = {"dense": "qwen3_5", "moe": "qwen3_5_moe", "next": "qwen3_next"}
CLASSES = {"dense": "Qwen3_5ForCausalLM", "moe": "Qwen3_5MoeForCausalLM", "next": "Qwen3NextForCausalLM"}
SIZES = {
    "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4, "max_position_embeddings": 512, "eos_token_id": [5, 6],
    "attn_implementation": "eager",
}  # fmt: skip
MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}
EXTRA = {"dense": {"intermediate_size": 96, "tie_word_embeddings": True}, "moe": MOE, "next": MOE}


@dataclass(frozen=True)
class Oracle:
    """One checkpoint on disk, and the tokens whose logits are compared."""

    kind: str
    path: Path
    token_ids: list[int]


def modelling(kind: str) -> types.ModuleType:
    """transformers' module with the classes of one family."""
    return importlib.import_module(f"transformers.models.{KINDS[kind]}.modeling_{KINDS[kind]}")


@functools.cache
def widened_modelling(kind: str) -> types.ModuleType:
    """The same module, with every cast to float32 in its source made one to float64."""
    original = modelling(kind)
    source = Path(original.__file__).read_text(encoding="utf-8")
    source = re.sub(r"\btorch\.float(32)?\b", "torch.float64", source).replace(".float()", ".double()")
    module = types.ModuleType(original.__name__ + "_in_float64")
    module.__package__, module.__file__ = original.__package__, original.__file__
    sys.modules[module.__name__] = module  # dataclasses look their module up
    exec(compile(source, original.__file__, "exec", dont_inherit=True), module.__dict__)
    return module


def write_oracle(kind: str, path: Path, seed: int = 0) -> Oracle:
    """Write a random checkpoint with transformers' class; every weight is drawn so that a mistake would show."""
    module = modelling(kind)
    model_class = getattr(module, CLASSES[kind])
    model = model_class(model_class.config_class(**SIZES, **EXTRA[kind]))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if name.endswith(("A_log", "dt_bias")):  # from -3 to -1: a state that lasts tens of tokens
                weight.copy_(-3 + 2 * torch.rand(weight.shape, generator=generator))
            elif weight.ndim == 1:  # norms: away from the 0 or 1 that they start at
                weight.add_(0.3 * noise)
            else:
                weight.copy_(noise * {"embed_tokens": 1.0}.get(name.split(".")[1], 1.5 * weight.shape[-1] ** -0.5))
    model.save_pretrained(path)
    token_ids = torch.randint(0, SIZES["vocab_size"], (NUM_TOKENS,), generator=generator).tolist()
    return Oracle(kind, path, token_ids)


def reference_model(oracle: Oracle, dtype: torch.dtype) -> torch.nn.Module:
    """transformers' model: as it stands in float32, widened in float64."""
    model = getattr(modelling(oracle.kind), CLASSES[oracle.kind]).from_pretrained(oracle.path, dtype=torch.float32)
    # The plain loops: torch's own grouped products know no float64.
    model.config._attn_implementation = model.config._experts_implementation = "eager"
    if dtype == torch.float64:
        wide = getattr(widened_modelling(oracle.kind), CLASSES[oracle.kind])(model.config).double()
        wide.load_state_dict({name: weight.double() for name, weight in model.state_dict().items()})
        model = wide
    return model.eval()


@torch.no_grad()
def reference_logits(oracle: Oracle, dtype: torch.dtype) -> torch.Tensor:
    """transformers' logits of every token, [tokens, vocab]."""
    return reference_model(oracle, dtype)(torch.tensor([oracle.token_ids]), use_cache=False).logits[0]


def new_memory(model: HybridLM) -> NaiveMemory:
    """The memory of one sequence that has not begun, with room for a few drafts."""
    return NaiveMemory(model.config, NUM_TOKENS + 8, model.model.embed_tokens.weight.dtype)


@torch.no_grad()
def minserve_logits(model: HybridLM, token_ids: list[int], chunk: int) -> torch.Tensor:
    """minserve's logits of every token, prefilled `chunk` tokens at a time."""
    memory = new_memory(model)
    starts = range(0, len(token_ids), chunk)
    steps = [Step.one_row(token_ids[start : start + chunk], start, every_logit=True) for start in starts]
    return torch.cat([model(step, memory).logits for step in steps])


def difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference, as a share of the largest wanted value."""
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    return ((found - wanted).abs().max() / wanted.abs().max()).item()


def add_mtp_head(oracle: Oracle, seed: int = 1) -> dict[str, torch.Tensor]:
    """Add a random MTP head to a checkpoint; transformers has none to write. Returns its tensors."""
    model = reference_model(oracle, torch.float32)
    full = model.config.layer_types.index("full_attention")
    layer = {f"layers.0.{name}": weight for name, weight in model.model.layers[full].state_dict().items()}
    hidden = SIZES["hidden_size"]
    shapes = {"fc.weight": (hidden, 2 * hidden), **{name: tuple(weight.shape) for name, weight in layer.items()}}
    shapes |= {f"{name}.weight": (hidden,) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    generator = torch.Generator().manual_seed(seed)
    head = {}
    for name, shape in shapes.items():
        scale = 0.3 if len(shape) == 1 else 1.5 * shape[-1] ** -0.5
        head["mtp." + name] = scale * torch.randn(shape, generator=generator)
    file = oracle.path / "model.safetensors"
    save_file({**load_file(file), **head}, file, metadata={"format": "pt"})
    return head


def oracle_table() -> list[tuple[str, str, float, float, float]]:
    """Rows of (model, dtype, at once, worst of chunks of 1..70, token by token): differences from transformers."""
    rows = []
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as folder:
            oracle = write_oracle(kind, Path(folder))
            for dtype in (torch.float32, torch.float64):
                model, wanted = HybridLM.from_checkpoint(folder, dtype=dtype), reference_logits(oracle, dtype)
                at_once = difference(minserve_logits(model, oracle.token_ids, NUM_TOKENS), wanted)
                chunked = [difference(minserve_logits(model, oracle.token_ids, chunk), wanted) for chunk in CHUNKS]
                rows.append((kind, str(dtype).removeprefix("torch."), at_once, max(chunked), chunked[0]))
    return rows


if __name__ == "__main__":
    print("largest difference of a logit from transformers', as a share of the largest logit")
    print(f"{'model':8}{'dtype':10}{'at once':>12}{'chunks 1..70':>14}{'by token':>12}")
    for name, dtype_name, *values in oracle_table():
        print(f"{name:8}{dtype_name:10}{values[0]:12.1e}{values[1]:14.1e}{values[2]:12.1e}")
