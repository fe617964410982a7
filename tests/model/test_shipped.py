"""The weights that ship: their size, their figures, and that others can load them."""

import json

import pytest
import torch

from minserve.llm import LLM, SamplingParams, shipped_checkpoint
from minserve.model.corpus import is_held_out, is_test, library_documents
from minserve.model.evaluate import bits_per_byte
from minserve.model.hybrid_lm import HybridLM
from minserve.model.naive import NaiveMemory
from minserve.model.shipped_shapes import shape
from minserve.model.step import Step
from minserve.model.tokenizer import load_tokenizer

LIMIT_BYTES = {"tiny": 10e6, "tiny_attention": 3e6, "tiny_draft": 1e6}
NAMES = tuple(LIMIT_BYTES)


@pytest.fixture(scope="module")
def figures():
    return json.loads((shipped_checkpoint() / "figures.json").read_text())


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_holds_all_that_a_reader_needs_and_is_small(name):
    folder = shipped_checkpoint(name)
    for file in (
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "model.safetensors",
        "figures.json",
        "README.md",
    ):
        assert (folder / file).is_file(), file
    assert (folder / "model.safetensors").stat().st_size < LIMIT_BYTES[name]
    model = HybridLM.from_checkpoint(folder)
    assert model.config == shape(name) and model.config.max_position_embeddings == 8192


@pytest.mark.parametrize("name", NAMES)
def test_transformers_loads_it_unmodified_and_gives_the_same_logits(name):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, text = shipped_checkpoint(name), "def area(width, height):\n    return width * height\n" * 3
    ids = load_tokenizer(folder).encode(text)
    assert AutoTokenizer.from_pretrained(folder)(text)["input_ids"] == ids
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = HybridLM.from_checkpoint(folder)
    with torch.inference_mode():
        ours = model(Step.one_row(ids, 0, every_logit=True), NaiveMemory(model.config, len(ids))).logits
        wanted = theirs(torch.tensor([ids])).logits[0]
    assert (ours - wanted).abs().max() < 1e-4 * wanted.abs().max()


def test_it_compresses_text_that_it_never_saw_as_the_figures_say(figures):
    """On a few held-out documents of this Python, whose version may differ from the one that was trained on."""
    held_out = [
        t for n, t in library_documents().items() if is_held_out(n) and not is_test(n) and 2000 < len(t) < 12000
    ]
    assert figures["held_out"]["bits_per_byte"] <= 1.20
    bits, num_bytes = bits_per_byte(HybridLM.from_checkpoint(shipped_checkpoint()), held_out[:4])
    assert num_bytes > 8000 and bits < 1.2 * figures["held_out"]["bits_per_byte"]


def test_the_figures_are_complete_and_possible(figures):
    mtp, recall = figures["mtp"], figures["recall_accuracy"]
    for kind in ("on_text", "sampled_0.8"):
        depths = mtp[kind]
        assert len(depths) == 3 and 1 > depths[0] > depths[1] > depths[2] > 0
    assert all(0 <= share <= 1 for kind in recall.values() for share in kind.values())
    assert len(figures["expert_share"]) == 8 and all(abs(sum(s) - 1) < 1e-6 for s in figures["expert_share"].values())
    assert len(figures["half_life_tokens"]) == 6 and len(figures["samples"]) == 3
    assert 0 <= figures["loop_share"] <= 1 and figures["training"]["num_tokens"] > 0


def test_it_answers_a_question_about_something_said_early():
    question = "port = 8127\n" + "import os\n\n\ndef join(a, b):\n    return os.path.join(a, b)\n" * 3 + "\nport = "
    output = LLM().generate(question, SamplingParams(max_tokens=5))[0]
    assert output.text == "8127\n"
