"""The drafts bench: drafters whose acceptance is known beforehand, outputs that are the same, figures that fit."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from minserve.__main__ import main
from minserve.bench import drafts
from minserve.bench.draft_runs import Load
from minserve.bench.drafts_on_text import acceptance_on_text
from minserve.clock import VirtualClock
from minserve.draft_counts import count_drafts
from minserve.draft_model import DraftModel
from minserve.errors import InvalidValue
from minserve.events import EventLog
from minserve.llm import shipped_checkpoint
from minserve.model.checkpoint import read_config, write_checkpoint
from minserve.model.evaluate import WholeText
from minserve.model.evaluate import acceptance_on_text as evaluated
from minserve.model.hybrid_lm import HybridLM
from minserve.model.shuffled_head import shuffle_head
from minserve.model.step import Step
from minserve.model.tokenizer_files import END_OF_TEXT, byte_tokenizer_files
from minserve.speculation.drafters import NGramDrafter

TEXT = (Path(__file__).parents[2] / "LICENSE").read_text()
NAMES = ("ngram", "ngram-always", "mtp", "model-always", "shuffled-always")


@pytest.fixture(scope="module")
def headed(small_folder, tmp_path_factory):
    """The small model, with an MTP head that has learned nothing either."""
    torch.manual_seed(4)
    config = replace(read_config(small_folder), mtp_num_hidden_layers=1)
    tensors = {name: 0.3 * torch.randn(p.shape) for name, p in HybridLM(config).state_dict().items()}
    folder = tmp_path_factory.mktemp("headed")
    write_checkpoint(folder, config, tensors, files=byte_tokenizer_files())
    return folder


@pytest.fixture(scope="module")
def bench(headed):
    """A bench in float64, in which the small draft model is the model itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafts, "PROMPT_TOKENS", 20)
        patch.setattr(drafts, "FEWEST_PROMPTS", 2)
        return drafts.bench_drafts(
            headed, NAMES, batches=(1, 2), temperatures=(0.0, 0.8), draft_tokens=2, num_tokens=5, rounds=1,
            text_tokens=16, draft_path=headed, dtype="float64", texts=[TEXT],
        )  # fmt: skip


def test_every_drafter_serves_each_case_and_says_the_same(bench):
    cases = [(t, b, name) for t in (0.0, 0.8) for b in (1, 2) for name in ("none", *NAMES)]
    assert [(r.temperature, r.batch, r.drafter) for r in bench.results] == cases
    for r in bench.results:
        assert r.num_outputs == 2
        assert r.num_same == (2 if r.temperature == 0 else None)


def test_a_drafter_that_is_the_model_is_never_wrong(bench):
    for r in bench.results:
        if r.drafter == "model-always":  # at 0.8 drafts are drawn from the very p that they are verified with
            assert r.counts.acceptance == r.counts.conditional_acceptance == [1, 1]
            assert r.counts.tokens_per_step == r.counts.iid_tokens_per_step == 3


def test_what_is_always_drafted_is_drafted_in_each_row(bench):
    for r in bench.results:
        if r.drafter in ("model-always", "shuffled-always"):
            assert r.counts.drafted == (r.counts.num_rows,) * 2
        if r.drafter == "none":
            assert r.counts.drafted == () and r.counts.tokens_per_step == r.ratio == r.needed_tokens_per_step == 1
            assert r.counts.num_rows == 4 * r.num_outputs  # the first of five comes with the prompt


def test_the_gain_is_what_steps_give_over_what_they_need(bench):
    """Three figures of one round: counted from the log, from step times, and from tokens per second."""
    for r in bench.results:
        assert r.ratio * r.needed_tokens_per_step == pytest.approx(r.counts.tokens_per_step, rel=1e-9)
        assert 1e3 * r.batch * r.counts.tokens_per_step / r.step_ms == pytest.approx(r.tokens_per_s, rel=1e-9)
        if r.needed_rate is None:
            assert r.counts.tokens_at(1.0) < r.needed_tokens_per_step
        elif r.needed_rate > 0:
            assert r.counts.tokens_at(r.needed_rate) == pytest.approx(r.needed_tokens_per_step, rel=1e-9)


def test_it_is_shown_in_one_table_and_as_json(bench):
    shown = drafts.table(bench).splitlines()
    assert len(shown) == 4 + 4 * (1 + 6) + 1 + 4
    assert all(shown[i].startswith("temperature") for i in (4, 11, 18, 25)) and shown[32].startswith("on held-out text")
    assert shown[9].split()[0] == "model-always" and " 1.0 1.0 " in shown[9] and shown[9].endswith("2/2")
    told = json.loads(drafts.to_json(bench))
    for row, r in zip(told["results"], bench.results, strict=True):
        assert row["counts"]["acceptance"] == r.counts.acceptance and row["ratio"] == r.ratio
    assert told["on_text"]["mtp"]["drafted"] == list(bench.on_text["mtp"].drafted)


def test_texts_are_guessed_at_by_each_drafter_once(bench):
    assert list(bench.on_text) == ["ngram", "mtp", "model", "shuffled"]
    for name, counts in bench.on_text.items():
        assert counts.num_rows == drafts.NUM_TEXTS * (16 - 2 - 2 + 1)
        assert name == "ngram" or counts.drafted == (counts.num_rows,) * 2


def test_ratios_are_of_one_round_and_outputs_are_compared_as_far_as_they_go():
    def ran(step_s, tokens_per_s, outputs):
        engine = SimpleNamespace(log=EventLog(VirtualClock()))
        return SimpleNamespace(engine=engine, step_s=step_s, tokens_per_s=tokens_per_s, outputs=outputs)

    without = ran([1.0, 8.0, 2.0], [40.0, 5.0, 20.0], [[1, 2, 3], [1, 2, 3], [4, 5, 6], [4, 5, 6]])
    run = ran([3.0, 8.0, 3.0], [20.0, 10.0, 40.0], [[1, 2, 3], [1, 2], [4, 6], [5, 5, 6]])
    load = Load(4, 0.0, prompt_tokens=5, num_tokens=3, draft_tokens=1)
    result = drafts._result("ngram", load, run, without)
    assert (result.step_ms, result.needed_tokens_per_step) == (3000, 1.5)  # 3, 1 and 1.5 times as long
    assert (result.tokens_per_s, result.ratio) == (20, 2)  # 0.5, 2 and 2 times as fast
    assert (result.num_same, result.num_outputs) == (2, 4)
    assert drafts._result("ngram", replace(load, temperature=0.8), run, without).num_same is None


def test_a_head_that_knows_nothing_is_seldom_right_and_changes_no_output(monkeypatch):
    """fault E17: the shipped head, and the same with its weights shuffled."""
    monkeypatch.setattr(drafts, "FEWEST_PROMPTS", 1)
    monkeypatch.setattr(drafts, "PROMPT_TOKENS", 40)
    bench = drafts.bench_drafts(
        None, ("mtp-always", "shuffled-always"), batches=(1,), temperatures=(0.0,), num_tokens=12, rounds=1,
        text_tokens=48, dtype="float64", texts=[TEXT],
    )  # fmt: skip
    none, mtp, shuffled = bench.results
    assert none.num_same == mtp.num_same == shuffled.num_same == 1
    assert mtp.counts.acceptance[0] > 0.5 > shuffled.counts.acceptance[0]
    assert bench.on_text["mtp"].num_accepted > 5 * bench.on_text["shuffled"].num_accepted


class Successor:
    """Scores highest the token after the last one."""

    def logits(self, contexts):
        """Score."""
        return torch.nn.functional.one_hot(torch.tensor([context[-1] + 1 for context in contexts]), 12).double()


def test_a_scorer_is_right_as_far_as_the_text_goes_on_like_it():
    tokens = [0, 1, 2, 3, 7, 8, 3, 4, 5, 6]
    #  behind      01: 2 3 | 012: 3 | 0123: - | ...7: 8 | ...8: - | ...3: 4 5 | ...4: 5 6
    counts = acceptance_on_text(Successor(), [tokens], depth=2)
    assert counts == count_drafts({(2, 2): 3, (2, 1): 2, (2, 0): 2}, num_tokens=7 + 3 * 2 + 2)


def test_what_is_looked_up_is_compared_with_the_text():
    tokens = torch.randint(0, 3, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    rows = Counter()
    for at in range(2, 60 - 3 + 1):
        said = NGramDrafter().propose(tokens[:at], 3)
        rows[len(said), max(n for n in range(len(said) + 1) if said[:n] == tokens[at : at + n])] += 1
    counts = acceptance_on_text(NGramDrafter(), [tokens], depth=3)
    assert counts == count_drafts(rows, sum((kept + 1) * num for (_, kept), num in rows.items()))
    assert counts.num_accepted > 10 and len(rows) > 5


def test_the_head_is_asked_as_the_model_card_asks_it():
    model, texts = HybridLM.from_checkpoint(shipped_checkpoint()), [TEXT[:300], TEXT[500:750]]
    counts = acceptance_on_text(model, [[END_OF_TEXT, *text.encode()] for text in texts], depth=3)
    assert counts.acceptance == pytest.approx(evaluated(model, texts, depth=3)[0], rel=1e-6)
    assert counts.num_rows == 301 - 4 + 251 - 4


def test_a_model_knows_on_text_what_it_knows_of_the_whole(headed):
    """One pass over the text says what follows each place; the draft model is asked place by place."""
    model, tokens = HybridLM.from_checkpoint(headed, torch.float64), list(TEXT[:60].encode())
    likeliest = model(Step.one_row(tokens, 0, every_logit=True), WholeText(60)).logits.argmax(-1).tolist()
    right = [token == said for token, said in zip(tokens[2:], likeliest[1:-1], strict=True)]
    counts = acceptance_on_text(DraftModel(model), [tokens], depth=1)
    assert counts == count_drafts({(1, 1): sum(right), (1, 0): 58 - sum(right)}, 58 + sum(right))


@pytest.mark.parametrize("tokens, depth, named", [([1, 2, 3], 2, r"len\(tokens\)"), ([1, 2, 3], 0, "depth")])
def test_a_text_too_short_to_be_guessed_at_is_named(tokens, depth, named):
    with pytest.raises(InvalidValue, match=named):
        acceptance_on_text(NGramDrafter(), [tokens], depth)


def test_a_shuffled_head_has_the_same_weights_in_another_order_and_the_rest_is_shared(headed):
    """fault E17"""
    model = HybridLM.from_checkpoint(headed)
    before = {name: p.clone() for name, p in model.named_parameters()}
    one, same, other = shuffle_head(model, 0), shuffle_head(model, 0), shuffle_head(model, 1)
    its, again, others = (dict(shuffled.named_parameters()) for shuffled in (one, same, other))
    assert its.keys() == before.keys()
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]), "the model itself has changed"
        if not name.startswith("mtp."):
            assert its[name] is p
            continue
        assert torch.equal(its[name].flatten().sort().values, p.flatten().sort().values)
        assert torch.equal(its[name], again[name])
        assert not torch.equal(its[name], p) and not torch.equal(its[name], others[name])


def test_a_shuffled_head_runs_on_its_own_weights(headed):
    """As a model does that has read them from a file: no joined copy of the old ones is left."""
    shuffled = shuffle_head(HybridLM.from_checkpoint(headed, torch.float64), 0)
    read = HybridLM(shuffled.config)
    read.load_state_dict(shuffled.state_dict(), assign=True)
    with torch.inference_mode():
        found = []
        for model in (shuffled, read.eval()):
            hidden = torch.linspace(-1, 1, 24, dtype=torch.float64).expand(3, 24)
            step = Step(torch.tensor([5, 6, 7]), torch.tensor([1, 2, 3]), torch.tensor([0, 3]), torch.arange(3))
            found.append(model.draft_hidden(step, hidden, WholeText(3))[0])
    assert (found[0] - found[1]).abs().max() < 1e-12
    assert all(block._still_joined() for block in joined(shuffled.mtp)) and len(joined(shuffled.mtp)) == 2


def joined(module):
    """The joined projections of a module's parts."""
    return [part.projections for part in module.modules() if hasattr(part, "projections")]


WRONG = [({"drafters": ("oracle",)}, "drafter"), ({"batches": (0,)}, "batches"), ({"batches": ()}, "batches"),
         ({"draft_tokens": 0}, "draft_tokens"), ({"num_tokens": 1}, "num_tokens"), ({"rounds": 0}, "rounds"),
         ({"temperatures": (-1.0,)}, "temperatures"), ({"drafters": ("shuffled",)}, "MTP head"),
         ({"drafters": ("mtp",)}, "mtp"), ({"text_tokens": 4}, r"len\(tokens\)")]  # fmt: skip


@pytest.mark.parametrize("wrong, named", WRONG)
def test_what_cannot_be_measured_is_named(small_folder, wrong, named):
    with pytest.raises(InvalidValue, match=named):
        drafts.bench_drafts(small_folder, **{"drafters": ("ngram",), "texts": [TEXT], **wrong})


def test_the_command_measures_what_it_is_asked_for(headed, capsys, monkeypatch):
    monkeypatch.setattr(drafts, "load_corpus", lambda: SimpleNamespace(held_out={"a file": TEXT}))
    monkeypatch.setattr(drafts, "FEWEST_PROMPTS", 1)
    asked = ["--model", str(headed), "--draft-model", str(headed), "--draft", "mtp", "model", "--quick"]
    assert main(["bench", "drafts", *asked, "--batch", "2", "--temperature", "0"]) == 0
    out = capsys.readouterr().out
    assert "up to 3 drafts a step; prompts of 128 tokens, outputs of 8; float32" in out
    assert [out.count(f"\n{name} ") for name in ("none", "mtp", "model", "ngram")] == [1, 2, 2, 0]
    assert out.count("temperature 0.0, batch 2") == out.count("temperature") == 1
    assert main(["bench", "drafts", "--draft", "oracle"]) == 2 and "oracle" in capsys.readouterr().err
    assert main(["bench", "serve", "--quick"]) == 2 and "--quick" in capsys.readouterr().err
