"""From a finished training to the folder that ships: checkpoint, tokenizer, figures, model card."""

from __future__ import annotations

import json
import platform
from pathlib import Path

import numpy as np
import torch

from minserve.model.checkpoint import write_checkpoint
from minserve.model.config import ModelConfig
from minserve.model.corpus import load_corpus
from minserve.model.counting import count_parameters
from minserve.model.evaluate import (
    acceptance_on_text,
    acceptance_sampled,
    bits_per_byte,
    complete,
    copy_accuracy,
    loop_share,
    observe,
    recall_accuracy,
)
from minserve.model.hybrid_lm import HybridLM
from minserve.model.tokenizer import ByteTokenizer
from minserve.model.tokenizer_files import END_OF_TEXT, byte_tokenizer_files
from minserve.request import SamplingParams

SAMPLE_PROMPTS = ("def area(", "import os\n\nclass ", "The ")
RECALL_REACH_TOKENS = (100, 300, 1000, 3000)


def publish(state_folder: str | Path, config: ModelConfig, out: str | Path) -> Path:
    """Write the checkpoint of a training's last state, measure it as written, and describe it.

    Arguments:
        state_folder: where `train` left state.pt.
        config: the shape that was trained.
        out: the folder to write: config.json, model.safetensors (bfloat16), tokenizer.json, generation_config.json,
            figures.json and README.md.
    """
    state = torch.load(Path(state_folder) / "state.pt", weights_only=True)
    write_checkpoint(out, config, state["model"], files=byte_tokenizer_files())
    model = HybridLM.from_checkpoint(out)
    training = {
        "num_steps": state["step"],
        "num_tokens": state["num_tokens"],
        "minutes": round(state["elapsed_s"] / 60, 1),
    }
    figures = {"python": platform.python_version(), "training": training, **measure(model)}
    out = Path(out)
    (out / "figures.json").write_text(json.dumps(figures, indent=1) + "\n")
    (out / "README.md").write_text(model_card(out.name, config, figures))
    return out


def measure(model: HybridLM) -> dict:
    """All figures of a model; a few minutes."""
    corpus = load_corpus()
    texts = list(corpus.held_out.values())
    held_out = np.frombuffer("\n".join(texts).encode(), dtype=np.uint8).astype(np.uint16)
    bits, num_bytes = bits_per_byte(model, texts)
    figures = {
        "held_out": {"bits_per_byte": bits, "num_bytes": num_bytes, "num_documents": len(texts)},
        "loop_share": loop_share(model, texts),
        "copy_accuracy": copy_accuracy(model, held_out),
        "recall_accuracy": {
            kind: {str(reach): recall_accuracy(model, held_out, reach, kind == "chat") for reach in RECALL_REACH_TOKENS}
            for kind in ("settings", "chat")
        },
        "samples": samples(model),
        **(observe(model, texts) if model.config.is_moe else {}),
    }
    if model.mtp is not None:
        on_text, same = acceptance_on_text(model, texts)
        figures["mtp"] = {
            "on_text": on_text,
            "first_equals_main": same,
            "sampled_0.8": acceptance_sampled(model, texts[:16]),
        }
    return figures


def samples(model: HybridLM) -> list[dict]:
    """Three completions at temperature 0.8, seeded."""
    tokenizer, found = ByteTokenizer(), []
    for seed, prompt in enumerate(SAMPLE_PROMPTS):
        params = SamplingParams(max_tokens=300, temperature=0.8, top_p=0.95, seed=seed)
        request = complete(model, [END_OF_TEXT, *prompt.encode()], params, until=END_OF_TEXT)
        found.append({"prompt": prompt, "seed": seed, "text": tokenizer.decode(request.output_ids)})
    return found


def model_card(name: str, config: ModelConfig, figures: dict) -> str:
    """The README of a checkpoint folder."""
    counts, training, held_out = count_parameters(config), figures["training"], figures["held_out"]
    recall = "; ".join(
        f"{kind}: " + ", ".join(f"{share:.0%} over {reach}" for reach, share in shares.items())
        for kind, shares in figures["recall_accuracy"].items()
    )
    mtp = figures.get("mtp")
    lines = [
        f"# minserve {name}",
        "",
        "A small language model in the checkpoint format of Qwen3.5, trained from scratch by",
        f"`minserve train --shape {name}` on the sources and the language reference of Python {figures['python']}.",
        "It writes Python-like text; it knows nothing.",
        "",
        f"- {counts.total_with_mtp:,} parameters, {counts.active:,} of them active per token",
        f"- {config.num_linear_layers} Gated DeltaNet and {config.num_full_layers} attention layers; a token is a byte",
        f"- trained for {training['minutes']} minutes on two CPU cores: {training['num_tokens']:,} tokens "
        f"in {training['num_steps']:,} steps",
        f"- {held_out['bits_per_byte']:.3f} bits per byte on {held_out['num_bytes']:,} held-out bytes",
        f"- copies a pasted passage: {figures['copy_accuracy']:.0%} of the bytes",
        f"- recalls a value ({recall} tokens)",
        f"- {figures['loop_share']:.0%} of greedy completions loop: sample at 0.8",
    ]
    if mtp:
        shown = ["/".join(f"{share:.2f}" for share in mtp[kind]) for kind in ("on_text", "sampled_0.8")]
        lines.append(f"- MTP drafts accepted at depth 1/2/3: {shown[0]} on real text, {shown[1]} when sampling at 0.8")
    licence = "All figures: figures.json. Licence: that of minserve (MIT); the training text is under the PSF licence."
    lines += ["", licence, ""]
    for sample in figures["samples"]:
        text = sample["prompt"] + sample["text"]
        lines += [f"`{sample['prompt'].strip()}` (seed {sample['seed']})", "", "```", text, "```", ""]
    return "\n".join(lines)
