"""What chapter 8 defines, taken out of its cells without running them: for its tests."""

import ast
from collections import Counter
from copy import deepcopy
from types import SimpleNamespace

import nbformat
import numpy as np
import torch
from chapter_rules import ROOT, code_cells

from minserve import LLM, EngineConfig
from minserve.draft_model import DraftModel
from minserve.llm import shipped_checkpoint
from minserve.model.corpus import is_held_out, is_test, library_documents
from minserve.model.hybrid_lm import HybridLM
from minserve.model.model_figures import named_config
from minserve.model.shuffled_head import shuffle_head
from minserve.model.tokenizer import chat_prompt
from minserve.model.train import initialize
from minserve.tuning.sessions import book_session

NOTEBOOK = nbformat.read(ROOT / "chapters" / "08_speculation.ipynb", as_version=4)
PROMPT = chat_prompt(book_session())
ASSIGNED = {"core", "places", "prices", "draws", "asked", "taken"}  # of what cells assign, what tests use


def shown_in_chapter_8() -> SimpleNamespace:
    """Its functions, classes and places, on models and texts like its own; `names` are what these look up."""
    llm, exact = LLM(), LLM(config=EngineConfig(dtype="float64")).model
    model, encode = llm.model, llm.tokenizer.encode
    texts = [text for name, text in library_documents().items() if is_held_out(name) and not is_test(name)]
    texts = [text for text in texts if len(text) > 5000]
    with torch.no_grad():
        anew, untrained = HybridLM(model.config), deepcopy(model, {id(x): x for x in (model.model, model.lm_head)})
        initialize(anew, seed=0)
    untrained.mtp = anew.mtp
    names = {"llm": llm, "model": model, "config": model.config, "encode": encode, "decode": llm.tokenizer.decode,
             "torch": torch, "np": np, "Counter": Counter, "prompt": PROMPT, "steps": [],
             "small": DraftModel.from_checkpoint(shipped_checkpoint("tiny_draft")),
             "large": named_config("qwen3.8-2.4t-a95b"), "dense": named_config("qwen3.5-27b"),
             "begun": [encode(text[3000:3064]) for text in texts][:16],
             "texts": [encode(text[2000:2600])[:160] for text in texts][:8],
             "shuffled": shuffle_head(model, seed=0), "untrained": untrained}  # fmt: skip
    for cell in code_cells(NOTEBOOK):
        nodes = [node for node in ast.parse(cell.source).body if _is_shown(node)]
        exec(compile(ast.Module(nodes, []), "chapter 8", "exec"), names)
    return SimpleNamespace(**names, names=names, exact=exact)


def _is_shown(node: ast.stmt) -> bool:
    """Whether a statement defines something, without running anything long."""
    if isinstance(node, ast.Assign):
        targets = {name.id for name in ast.walk(node.targets[0]) if isinstance(name, ast.Name)}
        return bool(targets) and targets <= ASSIGNED
    return isinstance(node, (ast.ImportFrom, ast.FunctionDef, ast.ClassDef))
