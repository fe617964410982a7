"""From a training's state to the folder that ships, on a model that has learned nothing and a handful of texts."""

import functools
import json
from dataclasses import replace

import numpy as np
import torch
from small_checkpoints import SPARSE

from minserve.llm import LLM, SamplingParams
from minserve.model import publish as publishing
from minserve.model.corpus import Corpus
from minserve.model.hybrid_lm import HybridLM
from minserve.model.shipped_shapes import shape

BYTES = replace(SPARSE, vocab_size=264, max_position_embeddings=8192)


def test_a_published_folder_loads_and_says_what_was_measured(tmp_path, monkeypatch):
    texts = {f"{i}.py": f"def f{i}(x):\n    return x + {i}\n" * 30 for i in range(3)}
    nothing = np.zeros(0, np.uint16)
    monkeypatch.setattr(publishing, "load_corpus", lambda: Corpus(nothing, nothing, texts))
    monkeypatch.setattr(publishing, "RECALL_REACH_TOKENS", (50,))
    for name in ("recall_accuracy", "copy_accuracy", "loop_share"):
        monkeypatch.setattr(publishing, name, functools.partial(getattr(publishing, name), num=2))
    torch.manual_seed(0)
    state = {"model": HybridLM(BYTES).state_dict(), "step": 7, "num_tokens": 700, "elapsed_s": 90.0}
    state["model"] = {name: 0.1 * torch.randn_like(tensor) for name, tensor in state["model"].items()}
    torch.save(state, tmp_path / "state.pt")
    out = publishing.publish(tmp_path, BYTES, tmp_path / "out")
    figures, card = json.loads((out / "figures.json").read_text()), (out / "README.md").read_text()
    assert figures["training"] == {"num_steps": 7, "num_tokens": 700, "minutes": 1.5}
    assert figures["held_out"]["num_bytes"] == sum(map(len, texts.values()))
    assert f"{figures['held_out']['bits_per_byte']:.3f} bits per byte" in card and "700 tokens in 7 steps" in card
    assert list(figures["recall_accuracy"]["chat"]) == ["50"] and len(figures["samples"]) == 3
    assert LLM(out).generate("def ", SamplingParams(max_tokens=2, ignore_eos=True))[0].usage.completion_tokens == 2


def test_the_shapes_that_ship_are_small_enough():
    for name, limit_bytes in (("tiny", 10e6), ("tiny_attention", 3e6), ("tiny_draft", 1e6)):
        with torch.device("meta"):
            model = HybridLM(shape(name))
        assert 2 * sum(p.numel() for p in model.parameters()) < limit_bytes
