"""The claims of chapter 8, each asserted on what is exact: tokens, counts, bytes, prices, times on the virtual clock.

Functions, classes and places are those that the chapter shows (`speculation_shown.py`); what they give is counted anew.
"""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from chapter_rules import code_cells, markdown
from speculation_shown import NOTEBOOK, PROMPT, shown_in_chapter_8

from minserve import Parts
from minserve.bench.drafts_on_text import acceptance_on_text
from minserve.draft_counts import draft_counts
from minserve.draft_model import DraftModel
from minserve.events import EventKind
from minserve.llm import shipped_checkpoint
from minserve.model.counting import FP8_EXPERTS, count_step, expected_distinct_experts
from minserve.model.naive import NaiveMemory
from minserve.model.step import Step
from minserve.speculation.depth import expected_tokens
from minserve.speculation.drafters import NGramDrafter

CORE, DENSE, LARGE = "ours, a core", "27B, H200", "2.4T, 16 B300"
DRAWN, GREEDY = {"temperature": 0.8, "ignore_eos": True}, {"max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def chapter():
    """What the chapter defines."""
    return shown_in_chapter_8()


@pytest.fixture(scope="module")
def odds(chapter):
    """The exact probability of every answer."""
    with torch.inference_mode():
        return chapter.odds_of_answers()


@pytest.fixture(scope="module")
def likeliest(chapter):
    """Answers of likeliest tokens, without drafts."""
    with torch.inference_mode():
        return chapter.serve(chapter.fresh(model=chapter.exact, dtype="float64"), chapter.begun[:4], **GREEDY)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.inference_mode():
        yield


def steps_of(log):
    """What is said of each step."""
    return [event.data for event in log if event.kind is EventKind.STEP]


# --- 8a: verifying several tokens costs about one step, when bytes rule


def test_8a_each_token_is_a_step_that_hauls_the_weights(chapter):
    engine = chapter.fresh()
    (answer,) = chapter.serve(engine, [PROMPT], max_tokens=16)
    spans = [event.data for event in engine.log.of(0) if event.data.get("phase") == "decode"]
    assert len(spans) == len(answer) - 1 == 11 and all(data["stop"] - data["start"] == 1 for data in spans)
    step = count_step(chapter.large, [(len(PROMPT), len(PROMPT) + 1)], weight_bytes=FP8_EXPERTS)
    assert round(step.bytes.weights / 1e9) == 140


@pytest.mark.parametrize("name, num_rows, rules, least, most", [
    (CORE, 1, "overhead", 1.0, 1.1), (DENSE, 1, "bytes", 1.0, 1.03), (CORE, 32, "arithmetic", 1.7, 2.5),
    (LARGE, 1, "bytes", 1.9, 2.0),
])  # fmt: skip
def test_8a_four_tokens_in_three_regimes(chapter, name, num_rows, rules, least, most):
    price = chapter.prices[name]
    assert least < price.step_s(num_rows, 4 * num_rows) / price.step_s(num_rows, num_rows) < most
    assert chapter.regime(name, num_rows, 4 * num_rows) == rules


def test_8a_the_engine_verifies_all_of_a_rows_drafts_in_one_step(chapter):
    engine = chapter.fresh(chapter.Hopeless(), draft_tokens=5)
    chapter.serve(engine, [PROMPT[:16]] * 3, max_tokens=4, ignore_eos=True)
    assert [(step["num_rows"], step["num_tokens"]) for step in steps_of(engine.log)] == [
        (3, 48),
        (3, 9),
        (3, 6),
        (3, 3),
    ]  # no more drafts than tokens may still come


# --- 8b: it never changes the distribution


def test_8b_the_likeliest_tokens_are_the_same(chapter, likeliest):
    small = DraftModel.from_checkpoint(shipped_checkpoint("tiny_draft"), torch.float64)
    for draft in ("mtp", "ngram", small, chapter.Hopeless()):
        engine = chapter.fresh(draft, model=chapter.exact, dtype="float64", check=True)
        assert chapter.serve(engine, chapter.begun[:4], **GREEDY) == likeliest
        assert draft_counts(engine.log).num_drafted > 0


@pytest.mark.parametrize("draft", ["none", "mtp", "small"])
def test_8b_drawn_answers_come_as_often_as_they_should(chapter, odds, draft):
    assert sum(odds.values()) == pytest.approx(1) and len(odds) > 20
    counts, found = chapter.answers(chapter.small if draft == "small" else draft)
    assert counts.total() == 500 and counts.keys() <= odds.keys()
    assert chapter.p_value(counts, odds) > 1e-3
    assert (found.num_drafted > 500) == (draft != "none")


def test_8b_the_p_value_is_that_of_chi_square(chapter):
    odds = {"a": 0.5, "b": 0.499, "c": 0.001}  # c is expected once in 1,000 and counts as rare
    for counts, chi_square in (((500, 499, 1), 0), ((530, 468, 2), 30**2 / 500 + 31**2 / 499 + 1)):
        found = chapter.p_value(Counter(dict(zip("abc", counts, strict=True))), odds)
        assert found == pytest.approx(math.exp(-chi_square / 2), rel=1e-5)  # two degrees of freedom


def test_8b_three_tokens_come_out_as_p_has_them(chapter):
    pairs = list(zip([0.3, 0.5, 0.2], [0.6, 0.2, 0.2], strict=True))
    printed = "".join(output.get("text", "") for cell in code_cells(NOTEBOOK) for output in cell.outputs)
    for name, kept in (("drawn from q", sum(map(min, pairs))), ("looked up   ", sum(p * q for p, q in pairs))):
        assert f"{name}   first token 0.30 0.50 0.20   kept {kept:.2f}" in printed


# --- 8c: the acceptance rate is the whole game, at small batch


@pytest.fixture(scope="module")
def on_text(chapter):
    drafters = {"MTP": (chapter.model, 8), "n-gram": (NGramDrafter(), 8), "untrained": (chapter.untrained, 1),
                "shuffled": (chapter.shuffled, 1)}  # fmt: skip
    return {name: acceptance_on_text(drafter, chapter.texts, depth) for name, (drafter, depth) in drafters.items()}


def test_8c_acceptance_by_depth_and_given_those_before(on_text):
    head, ngram = on_text["MTP"], on_text["n-gram"]
    assert 0.6 < head.acceptance[0] < 0.8 and all(0.6 < rate < 0.85 for rate in head.conditional_acceptance[:3])
    assert list(head.acceptance) == sorted(head.acceptance, reverse=True)
    assert ngram.conditional_acceptance[0] + 0.08 < ngram.conditional_acceptance[1] < ngram.conditional_acceptance[3]
    assert head.tokens_per_step == pytest.approx(1 + sum(head.acceptance))


def test_8c_the_formula_against_the_truth(on_text):
    def both(name):
        rates = on_text[name].conditional_acceptance
        return (1 - rates[0] ** 9) / (1 - rates[0]), expected_tokens(rates)

    (head, its_truth), (lookup, truth) = both("MTP"), both("n-gram")
    assert abs(head / its_truth - 1) < 0.1 and truth > 1.25 * lookup


def test_8c_a_small_model_drafts_as_well_as_the_head(chapter):
    found = {}
    for name, draft in (("head", "mtp"), ("small", chapter.small), ("n-gram", "ngram")):
        engine = chapter.fresh(draft, max_running=8, num_states=8)
        chapter.serve(engine, chapter.begun[:8], max_tokens=20, **DRAWN)
        found[name] = draft_counts(engine.log)
    assert found["head"].tokens_per_step > 2.4 and found["small"].tokens_per_step > 2.2
    assert 1 < found["n-gram"].tokens_per_step < 1.8
    assert found["head"].acceptance[0] > 0.75 and found["head"].conditional_acceptance[2] > 0.6


def test_8c_what_breaks_even_at_which_batch(chapter):
    need = {name: [chapter.needed(price, n) for n in (1, 8, 32, 256)] for name, price in chapter.prices.items()}
    assert need[CORE][0] < 20 and need[CORE][2] < 50 and need[CORE][3] > 100  # arithmetic, in the end
    assert max(need[DENSE][:3]) < 20
    assert need[LARGE][1] == max(need[LARGE]) and round(need[LARGE][1]) == 69 and need[LARGE][3] < 15


@pytest.mark.parametrize("name, num_rows, least, most", [(DENSE, 1, 2.0, 3.0), (CORE, 1, 1.7, 3.0),
                                                         (CORE, 32, 0.5, 1.2), (LARGE, 1, 1.2, 1.7)])  # fmt: skip
def test_8c_speed_with_three_drafts_on_the_virtual_clock(chapter, name, num_rows, least, most):
    price, begun = chapter.prices[name], (chapter.begun * 2)[:num_rows]
    engine = chapter.fresh("mtp", prices=price, max_running=num_rows, num_states=num_rows)
    chapter.serve(engine, begun, max_tokens=16, **DRAWN)
    took = [step["duration_s"] for step in steps_of(engine.log)[1:]]
    assert took[0] == pytest.approx(price.step_s(num_rows, 4 * num_rows) + 3 * price.draft_s(num_rows))
    assert least < 15 * price.step_s(num_rows, num_rows) / sum(took) < most


def test_8c_and_8g_published_figures_stand_beside_ours():
    said = " ".join(markdown(NOTEBOOK).split())
    for figure in ("64.8 %", "85 % and 90 %", "+3.4 % at concurrency 1, -9 %", "-23 % at 256", "abs/2412.19437"):
        assert figure in said


# --- 8d: a draft never agreed with is only heat


def test_8d_the_engine_switches_a_shuffled_head_off(chapter):
    plain_s = chapter.prices[LARGE].step_s(1, 1)
    found, each_s, made = chapter.play(chapter.shuffled, num_tokens=64)
    assert found.num_drafted == sum(made) < 40 and max(made[:3]) > 0 and not any(made[40:]) and len(made) > 50
    assert 0.9 < plain_s / each_s < 1
    found, each_s, made = chapter.play(chapter.shuffled, adapts=False, num_tokens=32)
    assert found.num_drafted > 60 and 0.4 < plain_s / each_s < 0.6
    found, each_s, made = chapter.play(chapter.model, num_tokens=48)
    assert found.num_accepted > 0.6 * found.num_drafted and plain_s / each_s > 1.3 and min(made[:-1]) > 0


# --- 8e: on a sparse model verification is not free


def test_8e_distinct_experts_against_tokens(chapter):
    large = chapter.large
    assert [round(expected_distinct_experts(large, num)) for num in (1, 4)] == [10, 39]
    steps = [count_step(large, [(8192, 8192 + num)], weight_bytes=FP8_EXPERTS, num_logits=num) for num in (1, 4)]
    assert [round(step.bytes.weights / 1e9) for step in steps] == [140, 274]
    runs = [chapter.model(Step.one_row(ids, 0), NaiveMemory(chapter.config, len(ids))) for ids in chapter.texts]
    chosen = [torch.stack([routing.expert_ids for routing in run.routing]).tolist() for run in runs]
    chapter.names["routed"] = [torch.nn.functional.one_hot(torch.tensor(layers), 16).amax(-2) for layers in chosen]
    for num in (1, 4, 8):
        sets = [{expert for token in layer[at : at + num] for expert in token}
                for layers in chosen for layer in layers for at in range(0, len(layer) - num + 1, num)]  # fmt: skip
        counted = np.mean([len(experts) for experts in sets])
        assert chapter.touched(num) == pytest.approx(counted)
        assert counted <= expected_distinct_experts(chapter.config, num) + 1e-9
    assert chapter.touched(1) == 2 and 4.5 < chapter.touched(4) < 6.6


# --- 8f: first mismatch kept, the rest thrown away


def test_8f_a_step_keeps_drafts_up_to_the_first_mismatch_and_one_token_more(chapter):
    chapter.steps.clear()
    engine = chapter.fresh("mtp", Parts(verify=chapter.noted))
    (answer,) = chapter.serve(engine, chapter.begun[:1], max_tokens=40, **DRAWN)
    drafts = [event.data for event in engine.log.of(0) if event.kind is EventKind.DRAFTS]
    assert [(len(step[0]), step[1]) for step in chapter.steps] == [(d["drafted"], d["accepted"]) for d in drafts]
    told = [text for drafts, num_kept, follows in chapter.steps for text in [*drafts[:num_kept], follows]]
    said = [chapter.char(token) for token in answer[1:]]
    assert said[: len(told)] == told and len(said) - len(told) <= 1
    lost = [step for step in chapter.steps if step[1] < len(step[0])]
    assert lost and any(step[1] == 0 for step in lost) and all(step[0][step[1]] != step[2] for step in lost)


def test_8f_drafts_states_and_pages_thrown_away(chapter):
    chapter.taken.clear()
    parts = Parts(state_pool=chapter.States, page_allocator=chapter.Pages)
    engine = chapter.fresh("mtp", parts, page_size=4, check=True)
    chapter.serve(engine, chapter.begun[:1], max_tokens=49, **DRAWN)
    pages, num_states, held = 0, 0, 0
    for event in engine.log.of(0):
        if event.kind is EventKind.SLICE:
            start, stop = event.data["start"], event.data["stop"]
            pages += -(-stop // 4) - held
            num_states += stop - start if event.data["phase"] == "decode" else 1
            held = -(-(start + 1 if event.data["phase"] == "decode" else stop) // 4)
        elif event.kind is EventKind.DRAFTS:
            held = -(-(start + 1 + event.data["accepted"]) // 4)
    assert chapter.taken == {"pages": pages, "states": num_states}
    found = draft_counts(engine.log)
    assert num_states - 1 == found.num_rows + found.num_drafted and found.num_accepted < found.num_drafted


# --- 8g: a head trained for it drafts better


def test_8g_trained_against_untrained(on_text):
    first = {name: found.accepted[0] / found.num_rows for name, found in on_text.items()}
    assert first["MTP"] > 0.6 > 0.25 > first["untrained"] > first["shuffled"] and first["shuffled"] < 0.05


# --- the kernel's trace, Break, and what users see


def test_the_kernel_reads_a_number_of_each_kept_draft_and_one_row():
    names = {"np": np, "torch": torch}
    cells = [cell.source for cell in code_cells(NOTEBOOK)]
    for cell in cells:
        if "table = torch.rand" in cell or "decides, plain" in cell:
            exec(cell.partition("names = [")[0], names)
    read = (~names["decides"].isnan()).tolist()
    alone = [[token == kept for token in range(8)] for kept in (3, 2)]
    assert read == [alone[0], [True] * 8, [False] * 8, [False] * 8, alone[1], [True] * 8]


def test_break_the_rule_is_green_on_likeliest_tokens_and_caught_by_counting(chapter, odds, likeliest):
    faulty = Parts(verify=chapter.sure_enough)
    engine = chapter.fresh("mtp", faulty, model=chapter.exact, dtype="float64")
    assert chapter.serve(engine, chapter.begun[:4], **GREEDY) == likeliest
    counts, found = chapter.answers("mtp", faulty)
    assert chapter.p_value(counts, odds) < 1e-12 and found.num_accepted > 0


@pytest.mark.parametrize("name", [CORE, DENSE, LARGE])
def test_the_sessions_answer_takes_fewer_steps_and_less_time(chapter, name):
    told, steps = {}, {}
    for draft in ("none", "mtp"):
        engine = chapter.fresh(draft, prices=chapter.prices[name])
        told[draft] = chapter.decode(chapter.serve(engine, [PROMPT], max_tokens=16)[0])
        steps[draft] = [step["duration_s"] for step in steps_of(engine.log)[1:]]
    assert told["none"] == told["mtp"] == "port = 8127"
    assert len(steps["none"]) == 11 and len(steps["mtp"]) <= 4
    assert sum(steps["none"]) == pytest.approx(11 * chapter.prices[name].step_s(1, 1))
    assert sum(steps["mtp"]) < 0.7 * sum(steps["none"])
