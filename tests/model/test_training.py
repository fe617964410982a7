"""Training: the same layers under another memory, losses that look at the right tokens, a corpus that does not leak."""

import json
import sysconfig
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from small_checkpoints import DENSE, SPARSE

from minserve.errors import InvalidValue
from minserve.experts.expert_mix import expert_mix, expert_mix_dense
from minserve.model.corpus import Corpus, is_held_out, is_test, library_documents, load_corpus
from minserve.model.hybrid_lm import HybridLM
from minserve.model.losses import TrainMemory, losses
from minserve.model.naive import NaiveMemory
from minserve.model.optimizer import make_optimizers, orthogonalize
from minserve.model.practice import Practice, ids, turn
from minserve.model.shipped_shapes import shape
from minserve.model.step import Step
from minserve.model.tokenizer import chat_prompt
from minserve.model.train import TrainConfig, initialize, make_batch, train

BYTES = replace(SPARSE, vocab_size=264)


def random_model(config, impl="train"):
    torch.manual_seed(1)
    model = HybridLM(config, impl).double()
    for p in model.parameters():
        torch.nn.init.normal_(p, 0, 0.4)
    return model


@pytest.mark.parametrize("config", [SPARSE, DENSE], ids=["sparse", "dense"])
@pytest.mark.parametrize("row_tokens", [1, 5, 64, 65])
def test_the_trainers_rows_are_sequences_that_start_from_nothing(config, row_tokens):
    model, serving = random_model(config), random_model(config, "torch")
    rows = torch.randint(0, config.vocab_size, (2, row_tokens))
    positions = torch.arange(row_tokens).repeat(2)
    step = Step(rows.flatten(), positions, torch.arange(3) * row_tokens, torch.arange(2 * row_tokens))
    with torch.no_grad():
        trained = model(step, TrainMemory(2, row_tokens)).logits.unflatten(0, (2, row_tokens))
        for row, logits in zip(rows.tolist(), trained, strict=True):
            memory = NaiveMemory(config, row_tokens, torch.float64)
            served = serving(Step.one_row(row, 0, every_logit=True), memory).logits
            torch.testing.assert_close(logits, served, rtol=0, atol=1e-9)


@pytest.mark.parametrize("num_tokens,top_k", [(0, 2), (1, 1), (1, 3), (7, 3), (20, 5)])
def test_both_forms_of_the_expert_mix_agree_and_so_do_their_gradients(num_tokens, top_k):
    torch.manual_seed(0)
    x, gate_up, down = (torch.randn(s, dtype=torch.float64) for s in ((num_tokens, 6), (5, 8, 6), (5, 6, 4)))
    expert_ids = torch.rand(num_tokens, 5).argsort(-1)[:, :top_k]
    weights = torch.rand(num_tokens, top_k, dtype=torch.float64)
    gradients = []
    for mix in (expert_mix, expert_mix_dense):
        leaves = [t.clone().requires_grad_() for t in (x, weights, gate_up, down)]
        out = mix(leaves[0], expert_ids, *leaves[1:])
        gradients.append(
            [out.detach(), *torch.autograd.grad(out.sin().sum(), leaves)] if num_tokens else [out.detach()]
        )
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_each_loss_looks_at_its_own_tokens():
    """Depth d reads h of place j, then tokens j+1 .. j+d, and is asked for token j+d+1."""
    model, rows = random_model(SPARSE), torch.randint(0, 40, (1, 9))
    parts = losses(model, rows, deep=True)
    tokens = rows[0].tolist()
    memory = NaiveMemory(SPARSE, 20, torch.float64)
    with torch.no_grad():
        output = model(Step.one_row(tokens[:6], 0, every_logit=True), memory)
        main = torch.nn.functional.cross_entropy(output.logits, torch.tensor(tokens[1:7]))
        hidden, _ = model.draft_hidden(Step.one_row(tokens[1:7], 1), output.hidden, memory)
        first = torch.nn.functional.cross_entropy(model.logits(hidden), torch.tensor(tokens[2:8]))
        fresh = NaiveMemory(SPARSE, 20, torch.float64)  # each depth attends to its own entries
        hidden, _ = model.draft_hidden(Step.one_row(tokens[2:8], 2), hidden, fresh)
        second = torch.nn.functional.cross_entropy(model.logits(hidden), torch.tensor(tokens[3:9]))
    found = [parts[name].item() for name in ("main", "mtp1", "mtp2")]
    assert found == pytest.approx([main.item(), first.item(), second.item()], abs=1e-12)
    assert {"balance", "router"} < parts.keys() and "mtp2" not in losses(model, rows, deep=False)


def test_a_fresh_model_knows_nothing_and_forgets_at_many_speeds():
    model = HybridLM(shape("tiny"))
    initialize(model, 0)
    with torch.no_grad():
        logits = model(Step.one_row([1, 2, 3], 0), NaiveMemory(model.config, 3)).logits
    assert (logits == 0).all()
    slowest = torch.cat([
        (layer.linear_attn.A_log.exp() * torch.nn.functional.softplus(layer.linear_attn.dt_bias)).detach()
        for layer in model.model.layers if layer.kind == "linear_attention"
    ])  # fmt: skip
    assert slowest.max() / slowest.min() > 10


def test_muon_makes_directions_of_equal_size_and_trains_matrices_alone():
    torch.manual_seed(0)
    sizes = torch.linalg.svdvals(orthogonalize(torch.randn(3, 24, 40)))
    assert sizes.min() > 0.5 and sizes.max() < 1.5
    muon, adam = make_optimizers(HybridLM(SPARSE))
    shared = {id(p) for g in muon.param_groups for p in g["params"]} & {
        id(p) for g in adam.param_groups for p in g["params"]
    }
    total = sum(len(g["params"]) for o in (muon, adam) for g in o.param_groups)
    assert not shared and total == len(list(HybridLM(SPARSE).parameters()))
    assert all(p.ndim >= 2 for g in muon.param_groups for p in g["params"])


def test_what_repeats_trained_text_is_cut_from_held_out_text(monkeypatch):
    names = [f"module_{i}.py" for i in range(100)]
    held_out = next(name for name in names if is_held_out(name))
    trained = next(name for name in names if not is_held_out(name))
    licence, own = "A licence that stands in many files, word for word.", "x = 1\n" * 60
    texts = {
        trained: f"def seen(): ...\n\n{licence}\n\nelse:",
        held_out: f"{licence}\n\n{own}\n\nelse:",
        "test/t.py": "y",
    }
    monkeypatch.setattr("minserve.model.corpus.library_documents", lambda: texts)
    corpus = load_corpus()
    assert corpus.held_out == {held_out: f"{own}\n\nelse:"}
    assert bytes(corpus.library[:-1].astype(np.uint8)).decode() == texts[trained] and corpus.library[-1] == 256
    assert corpus.tests.tolist() == [ord("y"), 256]


def test_the_held_out_documents_are_no_training_text():
    documents = library_documents()
    held_out = [name for name in documents if is_held_out(name) and not is_test(name)]
    assert 10 < len(held_out) < len(documents) / 10
    assert Path(sysconfig.get_path("stdlib"), "os.py").read_text() == documents["os.py"]
    assert any(name.startswith("topics/") for name in documents) and not any(
        "site-packages" in name for name in documents
    )


def test_practice_rows_have_the_length_asked_for_and_state_what_they_ask():
    corpus = np.frombuffer(b"some text of a library " * 400, dtype=np.uint8).astype(np.uint16)
    practice = Practice(corpus, np.random.default_rng(0))
    for length in (41, 300, 1000):
        row = practice.row(length)
        assert len(row) == length and max(row) <= 258
    facts = bytes(practice.settings(200)).decode().replace("some text of a library", "")
    stated = [line for line in facts.splitlines() if " = " in line]
    assert len(stated) >= 2 and set(stated[: len(stated) // 2]) == set(stated[len(stated) // 2 :])


def test_batches_repeat_with_their_seed_and_differ_between_steps():
    text = np.random.default_rng(0).integers(32, 120, 20_000).astype(np.uint16)
    corpus = Corpus(text, text[:5000], {})
    a, b, c = (make_batch(corpus, TrainConfig(), 4, 64, [0, step, 0]) for step in (1, 1, 2))
    assert a.shape == (4, 67) and torch.equal(a, b) and not torch.equal(a, c)


def test_training_goes_on_from_where_it_was_stopped(tmp_path):
    config = TrainConfig(
        minutes=0.001, num_processes=1, tokens_per_process=128, row_tokens=((1.0, 64),), compile_layers=False
    )
    train(BYTES, config, tmp_path)
    first = torch.load(tmp_path / "state.pt", weights_only=True)
    train(BYTES, replace(config, minutes=first["elapsed_s"] / 60 + 0.05), tmp_path)
    second = torch.load(tmp_path / "state.pt", weights_only=True)
    assert 0 < first["step"] < second["step"] and second["num_tokens"] == 128 * second["step"]
    lines = [json.loads(line) for line in (tmp_path / "losses.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, second["step"] + 1))
    with pytest.raises(Exception, match="another shape"):
        train(replace(BYTES, hidden_size=32), replace(config, minutes=9), tmp_path)
    with pytest.raises(InvalidValue, match="minutes is 0"):
        TrainConfig(minutes=0)


def test_learning_goes_down():
    """A few steps on one batch, with the optimizers that train the shipped model."""
    model = HybridLM(BYTES, "train")
    initialize(model, 0)
    optimizers, rows, seen = make_optimizers(model), torch.randint(97, 105, (4, 67)), []
    for _ in range(25):
        parts = losses(model, rows, deep=True)
        (parts["main"] + 0.2 * parts["mtp1"]).backward()
        seen.append(parts["main"].item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert seen[-1] < 0.7 * seen[0]


def test_a_practice_chat_has_the_chat_format():
    turns = turn("system", ids("Be brief.")) + turn("user", ids("hi"))
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    assert chat_prompt(messages) == turns + turn("assistant", [])[:-2]
