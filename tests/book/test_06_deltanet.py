"""The claims of chapter 6, each asserted on what is exact: bytes, tokens, errors in float64, counted products.

Classes and functions are those that the chapter shows, taken out of its cells; what they give is counted here anew.
"""

import ast
import copy
import math
from types import SimpleNamespace

import nbformat
import pytest
import torch
from chapter_rules import ROOT, code_cells, load
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from minserve import LLM, EngineConfig, Parts, SamplingParams
from minserve.deltanet.gated_delta import gated_delta_chunked, gated_delta_ragged, gated_delta_recurrent
from minserve.model.counting import count_step, kv_bytes_per_token, state_bytes
from minserve.model.footprint import FP8_EXPERTS
from minserve.model.model_figures import named_config
from minserve.model.naive import NaiveMemory
from minserve.model.step import Step
from minserve.model.tokenizer import chat_prompt
from minserve.tuning.sessions import book_session
from minserve.tuning.workload import standard_library_text

LARGE, PROMPT = named_config("qwen3.8-2.4t-a95b"), chat_prompt(book_session())
SHIPPED = [f"{layer}.{h}" for layer in (0, 1, 2, 4, 5, 6) for h in range(2)]


@pytest.fixture(scope="module", autouse=True)
def no_gradients():
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def chapter(no_gradients):
    """What the chapter defines, and what its functions take from cells that are not run here."""
    llm, exact = LLM(), LLM(config=EngineConfig(dtype="float64"))
    names = {"llm": llm, "exact": exact, "model": llm.model, "config": llm.model.config, "prompt": PROMPT, "F": F}
    names |= {"large": LARGE, "torch": torch, "copy": copy, "math": math, "moments": range(0, 1536, 128)}
    kinds = (ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
    for cell in code_cells(nbformat.read(ROOT / "chapters" / "06_deltanet.ipynb", as_version=4)):
        nodes = [node for node in ast.parse(cell.source).body if isinstance(node, kinds)]
        exec(compile(ast.Module(nodes, []), "chapter 6", "exec"), names)
    names["text"] = llm.tokenizer.encode(standard_library_text(40_000))[:2049]
    names["watching"] = names["Watching"](llm.model.config, 2049)
    llm.model(Step.one_row(names["text"], 0), names["watching"])
    names["at"] = {n: names["remembered"](n, torch.float64, exact.model) for n in (200, 300, 385)}
    names |= dict(zip(("given", "outs", "states"), token_by_token(names["watching"].seen[1]), strict=True))
    return SimpleNamespace(**names)


def token_by_token(seen, num_tokens=128):
    """What a layer is given, in float64, with the output and the state after each token."""
    given = [x[None, :num_tokens].double() for x in seen]
    given[:2] = [x.repeat_interleave(2, dim=2) for x in given[:2]]
    state, outs, states = torch.zeros(1, 2, 64, 64).double(), [], []
    for t in range(num_tokens):
        out, state = gated_delta_recurrent(*(x[:, t : t + 1] for x in given), state)
        outs.append(out), states.append(state)
    return given, outs, states


# --- Pain: pages without their state


def test_pain_pages_alone_are_right_until_little_runs_after_them(chapter):
    # fault A1
    found = {}
    for num_pages in (8, 23, 24):
        for keeps_state in (True, False):
            memory = chapter.remembered(16 * num_pages)
            for pool in () if keeps_state else (memory.tails, memory.states):
                pool.update((layer, torch.zeros_like(kept)) for layer, kept in pool.items())
            found[num_pages, keeps_state] = chapter.answer(memory, 16 * num_pages)[:11] == "port = 8127"
    assert [pages for (pages, _), is_right in found.items() if not is_right] == [24] and not found[24, False]


# --- 6a: two caches, one grows, one does not


def test_6a_the_state_has_its_full_size_at_the_first_token(chapter):
    for num_tokens in (1, 2, 100, 385):
        kv, state = chapter.measured_bytes(num_tokens)
        assert (kv, state) == (num_tokens * kv_bytes_per_token(chapter.config, 4), 215_040)
    assert state_bytes(chapter.config, 4, 4) == 215_040


def test_6a_the_crossing_points(chapter):
    crossing = {name: state_bytes(shape) / kv_bytes_per_token(shape) for name, shape in (
        ("0.8b", named_config("qwen3.5-0.8b")), ("35b", named_config("qwen3.5-35b-a3b")), ("2.4t", LARGE),
        ("shipped", chapter.config))}  # fmt: skip
    assert {name: math.ceil(num) for name, num in crossing.items()} == {
        "0.8b": 1590, "35b": 3144, "2.4t": 6234, "shipped": 402,
    }  # fmt: skip
    assert crossing["2.4t"] == 6234 and (kv_bytes_per_token(LARGE), state_bytes(LARGE)) == (94_208, 587_292_672)
    assert state_bytes(LARGE) / (256 * kv_bytes_per_token(LARGE)) > 24
    assert 0.06 < state_bytes(LARGE) / (100_000 * kv_bytes_per_token(LARGE)) < 0.065


# --- 6b: chunked and token by token are the same function


@pytest.mark.parametrize("chunk", [1, 16, 32, 50])
def test_6b_chunks_are_the_rule_at_every_length(chapter, chunk):
    # fault A10
    def rule(*row):
        return gated_delta_chunked(*row, chunk=chunk)

    assert max(chapter.worst(rule, range(1, 129))) < 1e-13


def test_6b_a_prompt_may_be_cut_anywhere(chapter):
    # fault A11
    for cut in (1, 2, 3, 31, 32, 33, 100, 127):
        _, before = gated_delta_chunked(*(x[:, :cut] for x in chapter.given), torch.zeros(1, 2, 64, 64).double())
        out, after = gated_delta_chunked(*(x[:, cut:] for x in chapter.given), before)
        torch.testing.assert_close(out, torch.cat(chapter.outs[cut:], 1), rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(after, chapter.states[-1], rtol=1e-12, atol=1e-13)


class Products(TorchDispatchMode):
    """Counts matrix products."""

    num = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.num += function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.matmul)
        return function(*args, **(kwargs or {}))


def test_6b_chunks_are_a_handful_of_products(chapter):
    counted = {}
    for rule in (gated_delta_recurrent, gated_delta_chunked):
        with Products() as products:
            rule(*(x[None] for x in chapter.watching.seen[1]), torch.zeros(1, 2, 64, 64))
        counted[rule] = products.num
    assert counted[gated_delta_recurrent] >= 2 * 2049 and 10 * counted[gated_delta_chunked] < 2 * 2049


def test_6b_one_matrix_replaces_what_a_sum_confuses(chapter):
    torch.manual_seed(0)
    found = {(num, times): chapter.share_right(num, times) for num in (16, 32, 256) for times in (1, 3)}
    assert all(delta > 99 for (num, _), (delta, _) in found.items() if num <= 32)
    assert all(summed < 60 for (_, times), (_, summed) in found.items() if times == 3)
    assert found[256, 1][1] > found[256, 1][0] and found[256, 1][0] < 50  # of keys that never change a sum holds more


def test_6b_most_heads_forget_within_a_few_tokens(chapter):
    rows = {}
    for layer in chapter.watching.seen:
        curve = chapter.left_of_a_state(layer, span=256).median(0).values
        halves = chapter.tokens_until_half(layer, curve)
        rows |= {f"{layer}.{h}": [float(half[h]) for half in halves] for h in range(2)}
    assert list(rows) == SHIPPED
    assert sum(row[2] <= 4 for row in rows.values()) == 7 and 80 < max(row[2] for row in rows.values()) < 160
    assert rows["1.1"][0] > 3 * rows["1.1"][1] > 3 * rows["1.1"][2]  # the typical token flatters a slow head


def test_6b_the_kernels_loop():
    source = (ROOT / "minserve" / "deltanet" / "gated_delta_triton.py").read_text("utf-8")
    begin = source.index("        memory = tl.load(old + here")
    loop = source[begin : source.index("@triton.jit\ndef within_chunks_kernel")].rstrip()
    assert len(loop.splitlines()) <= 25 and loop.count("tl.load(old") == 1 and "memory +=" in loop
    from minserve.deltanet import gated_delta_triton as twin

    starts = torch.tensor([0, 6, 7, 15])
    place = torch.cat([torch.arange(n) for n in (6, 1, 8)])
    q, k = (F.one_hot((place - back) % 4, 4).double()[:, None] for back in (3, 0))
    none, stored, v = torch.zeros(15, 1).double(), torch.arange(12.0).double(), torch.arange(40.0, 55).double()
    call = q, k, v.view(15, 1, 1), none, none + 1, stored.view(3, 1, 4, 1), starts
    out, kept = twin.gated_delta_ragged(*call)
    rows = torch.repeat_interleave(starts.diff())
    want = torch.where(place < 3, stored[4 * rows + (place + 1) % 4], v.roll(3))
    assert out.flatten().tolist() == want.tolist()
    torch.testing.assert_close((out, kept), gated_delta_ragged(*call))


# --- 6c: a state cannot be cut, only copied or replaced


def test_6c_append_works_on_both_and_nothing_else_on_a_state(chapter):
    at, joined, mixed = chapter.at, chapter.joined, chapter.mixed
    zeros, grown = NaiveMemory(chapter.config, 640, torch.float64), chapter.run_on(300, copy.deepcopy(at[300]))
    again = chapter.run_on(300, joined(300, at[385], at[300]))
    halved = chapter.run_on(300, joined(300, at[300], mixed(zeros, at[300])))
    sent = joined(385, at[385], at[385])
    for layer in (3, 7):
        for pool in ("keys", "values"):
            getattr(sent, pool)[layer][:300] = getattr(at[300], pool)[layer][:300]
    tries = {"append": (385, grown, grown), "share": (300, at[385], at[385]), "truncate": (200, at[385], at[385]),
             "evict": (385, again, halved), "ship": (385, sent, mixed(at[300], at[385]))}  # fmt: skip
    for name, (n, kv, state) in tries.items():
        assert chapter.wrong(n, kv, at[n]) < 1e-13, name
        assert (chapter.wrong(n, at[n], state) < 1e-13) == (name == "append"), name
        assert name == "append" or chapter.wrong(n, at[n], state) > 1e-3, name
    assert chapter.wrong(300, at[385], copy.deepcopy(at[300])) < 1e-13  # from a copy, and pages that went on


def test_6c_half_of_a_state_is_no_state_of_half_the_tokens(chapter):
    full, half = chapter.at[385], chapter.at[200]
    for layer in full.states:
        assert (full.states[layer] - half.states[layer]).norm() > 0.1 * half.states[layer].norm()
    assert torch.equal(full.keys[3][:200] != 0, half.keys[3][:200] != 0)


def test_6c_the_rule_runs_backwards_only_where_nothing_was_forgotten(chapter):
    good = {(layer, h, kind): sum(error < 0.01 for error in chapter.undone(layer, h, kind))
            for layer, h in ((1, 1), (0, 1)) for kind in (torch.float32, torch.float64)}  # fmt: skip
    assert good[1, 1, torch.float64] == 96 and good[1, 1, torch.float32] > 48
    assert 0 < good[0, 1, torch.float32] < 10 and good[0, 1, torch.float64] < 20


# --- Plug in


def test_plug_in_the_solved_exercise_serves_without_a_wrong_token(chapter):
    solved = load(ROOT / "solutions" / "ch06_deltanet.py").delta_chunk
    asked = [chapter.text[10 * n :][:n] for n in (2, 17, 33, 47, 64, 65, 97)]
    llm = LLM(config=EngineConfig(dtype="float64", batch_tokens=64, check=True), parts=Parts(gated_delta=solved))
    outputs = llm.generate(asked, SamplingParams(max_tokens=12, ignore_eos=True))
    assert [list(output.token_ids) for output in outputs] == [chapter.alone(ids) for ids in asked]


# --- Break: the gate at the padded end


def test_break_the_fault_is_right_only_where_nothing_is_padded(chapter):
    # fault A10
    for rule, right in ((chapter.right_rule, range(1, 65)), (chapter.gate_at_the_padded_end, (1, 16, 32, 48, 64))):
        errors = chapter.state_errors(rule, range(1, 65))
        assert [n for n, error in enumerate(errors, 1) if error < 1e-9] == list(right)


def test_break_the_answer_follows_the_length_of_the_prompt(chapter):
    config, said = EngineConfig(prefix_cache=False), {}
    for rule in (chapter.right_rule, chapter.gate_at_the_padded_end):
        llm = LLM(config=config, parts=Parts(gated_delta=rule))
        outputs = llm.generate([PROMPT[385 - n :] for n in (368, 383, 384)], SamplingParams(max_tokens=12))
        said[rule.__name__] = [output.text == "port = 8127" for output in outputs]
    assert said == {"right_rule": [True] * 3, "gate_at_the_padded_end": [True, False, True]}


# --- Cost


def test_cost_states_are_a_quarter_of_the_bytes_from_some_hundred_requests_on(chapter):
    assert [n for n in (785, 786) if chapter.share(n) >= 0.25] == [786]
    assert [n for n in (524, 525) if chapter.share(n, ["weights"]) >= 0.25] == [525]
    one = count_step(LARGE, [(8191, 8192)], weight_bytes=FP8_EXPERTS, kv_dtype_bytes=1).bytes
    assert one.state_read + one.state_written == 2 * 587_292_672


def test_cost_rounding_the_state_shows_nothing_here(chapter):
    wide, rounded = (chapter.read_on(kind, num_tokens=32).log_softmax(-1) for kind in (NaiveMemory, chapter.Rounding))
    divergence = (wide.exp() * (wide - rounded)).sum(-1).mean() / math.log(2)
    assert 0 < divergence < 1e-4


def test_cost_in_chunks_or_one_by_one_the_session_gets_the_same_answer(chapter):
    config, texts = EngineConfig(prefix_cache=False), []
    for part in (chapter.one_at_a_time, None):
        output = LLM(config=config, parts=Parts(gated_delta=part)).generate([PROMPT], SamplingParams(max_tokens=24))[0]
        texts.append(output.text)
    assert texts == ["port = 8127"] * 2
