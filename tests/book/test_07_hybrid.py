"""The claims of chapter 7, each asserted on what is exact: tokens, counts, bytes, times on the virtual clock.

Functions and classes are those that the chapter shows, taken out of its cells; what they give is counted here anew.
"""

import ast
from collections import defaultdict
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace

import nbformat
import numpy as np
import pytest
import torch
from chapter_rules import ROOT, code_cells

from minserve import LLM, EngineConfig, Parts, SamplingParams
from minserve.cache_hits import cache_hits
from minserve.deltanet.state_pool import StateError, StatePool
from minserve.engine_config import size_caches
from minserve.events import EventKind
from minserve.hybrid.reuse import match_hybrid
from minserve.hybrid.snapshots import Snapshots
from minserve.metrics import request_metrics
from minserve.model.config import FULL
from minserve.model.counting import kv_bytes_per_token, state_bytes
from minserve.model.model_figures import named_config
from minserve.model.tokenizer import chat_prompt
from minserve.paging.page_table import PageAllocator, PageTable
from minserve.radix.radix_tree import RadixTree
from minserve.request import Request
from minserve.tuning.cost_model import machine
from minserve.tuning.engine_support import engine_support
from minserve.tuning.prices import prices
from minserve.tuning.sessions import DEFAULT_SYSTEM, ChatShape, book_session, chat_sessions
from minserve.tuning.workload import standard_library_text

SESSION, PROMPT = book_session(), chat_prompt(book_session())
BIG, HUGE = named_config("qwen3.5-35b-a3b"), named_config("qwen3.8-2.4t-a95b")


def asking(question):
    """The session with another question at its end."""
    return chat_prompt([*SESSION[:-1], {"role": "user", "content": question}])


@pytest.fixture(scope="module")
def chats():
    """Eight chats of six turns, as (time, prompt), with short answers."""
    shape, turns = ChatShape(system=DEFAULT_SYSTEM * 8, mean_turns=12, max_prompt_tokens=8000), defaultdict(list)
    for one in chat_sessions(40, 0.4, standard_library_text(100_000), np.random.default_rng(0), shape):
        turns[one.session].append(replace(one, output_tokens=4))
    long = [rows[:6] for rows in turns.values() if len(rows) >= 6][:8]
    return sorted(chain(*long), key=lambda one: one.time_s)


@pytest.fixture(scope="module")
def chapter(chats):
    """What the chapter defines."""
    exact = LLM(config=EngineConfig(dtype="float64"))
    names = {"exact": exact, "config": exact.model.config, "encode": exact.tokenizer.encode, "np": np, "torch": torch,
             "text": exact.tokenizer.encode(standard_library_text(200_000)), "cut": 256, "chats": chats,
             "models": {"35B": BIG}, "h200": machine("h200", overhead_s=2e-3)}  # fmt: skip
    kinds = (ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
    for cell in code_cells(nbformat.read(ROOT / "chapters" / "07_hybrid.ipynb", as_version=4)):
        nodes = [node for node in ast.parse(cell.source).body if isinstance(node, kinds)]
        exec(compile(ast.Module(nodes, []), "chapter 7", "exec"), names)
    naive = Parts(match_hybrid=lambda page_hit, *rest: page_hit, state_pool=names["TrustingPool"])
    return SimpleNamespace(**names, names=names, naive=naive, decode=exact.tokenizer.decode)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.inference_mode():
        yield


# --- 7a: reuse on a hybrid is silently wrong without the state


def test_7a_pages_without_a_state_answer_wrongly_and_silently(chapter):  # fault A1
    answers = {}
    for name, parts in (("pages alone", chapter.naive), ("both", Parts())):
        engine = chapter.fresh(parts)
        cold = chapter.serve(engine, [PROMPT], max_tokens=12)
        if name == "pages alone":
            engine.cache.snapshots.evict(0)
        warm = chapter.serve(engine, [PROMPT], max_tokens=12)
        hits = [event.data["cached_tokens"] for event in engine.log if event.kind is EventKind.ADMITTED]
        assert hits == [0, len(PROMPT) - 1]
        answers[name] = [chapter.decode(ids) for (ids,) in (cold, warm)]
    assert answers["both"] == ["port = 8127"] * 2
    assert answers["pages alone"][0] == "port = 8127" and "8127" not in answers["pages alone"][1]


def test_7a_state_scars_heal_and_page_scars_do_not(chapter):
    rng, far = np.random.default_rng(0), defaultdict(list)
    for start in rng.integers(0, len(chapter.text) - 400, 5):
        known = chapter.text[start : start + int(rng.integers(200, 257))]
        coming = chapter.text[start + len(known) :][:96]
        ways = chapter.scarred(known, coming, chapter.text[rng.integers(100_000) :][:32])
        right, *wrong = (chapter.read(coming, memory, len(known)) for memory in ways.values())
        for name, logprobs in zip(list(ways)[1:], wrong, strict=True):
            far[name].append((right.exp() * (right - logprobs)).sum(-1))
    first, last = ({name: torch.stack(kl)[:, part].mean() for name, kl in far.items()}
                   for part in (slice(0, 8), slice(72, 96)))  # fmt: skip
    states = [name for name in far if name.startswith("state")]
    assert len(states) == 3 and all(first[name] > 0.2 and last[name] < 0.1 * first[name] for name in states)
    left = {name: last[name] / first[name] for name in far}
    assert all(left["pages: zeros"] > 2 * left[name] and last["pages: zeros"] > 2 * last[name] for name in states)


def test_7a_the_recall_question_with_somebody_elses_state(chapter):  # fault A6
    answers = {}
    for name, parts in (("right", Parts()), ("wrong", Parts(match_hybrid=chapter.somebody_elses,
                                                            state_pool=chapter.TrustingPool))):  # fmt: skip
        engine = chapter.fresh(parts, snapshot_every=16)
        _, answer = (chapter.serve(engine, [ids], max_tokens=12)[0] for ids in (asking("What is a port?"), PROMPT))
        answers[name] = chapter.decode(answer)
    assert answers["right"] == "port = 8127" and "8127" not in answers["wrong"]


# --- 7b: the state has no inverse: reuse, preemption, forking need snapshots


WANTS = {"max_tokens": 24, "temperature": 0.8, "ignore_eos": True}


@pytest.fixture(scope="module")
def truth(chapter):
    """Six answers by an engine that keeps nothing for anybody."""
    with torch.inference_mode():
        return chapter.serve(chapter.fresh(prefix_cache=False), [PROMPT] * 6, **WANTS)


@pytest.mark.parametrize("name, num_pages, riders, most", [("reuse", None, 0, 12), ("preemption", 32, 5, 24),
                                                           ("fork", None, 5, 12)])  # fmt: skip
def test_7b_wrong_without_and_identical_with(chapter, truth, name, num_pages, riders, most):
    truth, wants = [ids[:most] for ids in truth], WANTS | {"max_tokens": most}
    alone = chapter.pages_alone(chapter.fresh(chapter.naive, num_pages=num_pages), name == "fork")
    assert chapter.serve(alone, [PROMPT] * 6, riders, **wants) != truth
    engine = chapter.fresh(num_pages=num_pages, check=True)
    assert chapter.serve(engine, [PROMPT] * 6, riders, **wants) == truth
    kinds = [event.kind for event in engine.log]
    assert (EventKind.PREEMPTED in kinds) == (name == "preemption")


# --- 7c: how dear snapshots are


def test_7c_bytes_of_a_snapshot():
    assert round(state_bytes(HUGE) / 1e6) == 587 and kv_bytes_per_token(HUGE) == 94_208
    times = {every: state_bytes(HUGE) / (every * kv_bytes_per_token(HUGE)) for every in (256, 2080)}
    assert round(times[256], 1) == 24.4 and round(times[2080], 1) == 3.0
    assert state_bytes(BIG) // kv_bytes_per_token(BIG) == 3144


def test_7c_spacing_at_equal_memory(chapter):
    found = {}
    for gb in (4, 16):
        for every in (32, 128, 2048):
            knobs = EngineConfig(max_running=8, cache_bytes=gb * 10**9, snapshot_every=every)
            assert size_caches(knobs, BIG).total_bytes <= gb * 10**9
            found[gb, every] = chapter.share(chapter.play(cache_bytes=gb * 10**9, snapshot_every=every))
    assert found[4, 32] + 15 < found[4, 128] < found[4, 2048] - 15
    assert found[16, 128] > found[16, 2048] > found[16, 32]


# --- 7d: every operation twice


def test_7d_an_edited_turn_reuses_up_to_a_state_that_it_shares(chapter):  # fault A6
    engine = chapter.fresh(check=True)
    for messages, num in ((SESSION[:2], 16), (SESSION[:4], 1)):
        chapter.serve(engine, [chat_prompt(messages)], max_tokens=num)
    edited = chat_prompt([*SESSION[:3], {"role": "user", "content": "Show me a test."}])
    request = Request("edited", edited, SamplingParams(max_tokens=4), seed=0)
    hit = engine.cache.prefixes.find(request)
    counts = [node.stop for node in hit.match.path if node in engine.cache.snapshots]
    assert (len(edited), hit.match.num_tokens, counts, hit.num_tokens) == (157, 137, [96, 121, 144], 121)
    engine.add(request)
    engine.step()
    mine, theirs = engine.cache.tables["edited"].pages, engine.cache.tree.pages(hit.place)
    assert mine[: 121 // 16] == theirs[:7] and mine[7] != theirs[7] and len(theirs) == 8


def test_7d_pages_are_cut_shared_and_evicted_otherwise_than_states(chapter):
    allocator, states = PageAllocator(8), StatePool(2)
    table, slot = PageTable(allocator, 4), states.take()
    assert table.grow(13)
    states.stamp(slot, 13)
    for num_tokens in (9, 3):  # cut: pages anywhere, a state never
        table.shrink(num_tokens)
        with pytest.raises(StateError, match="has seen 13"):
            states.expect(slot, num_tokens)
    assert [match_hybrid(hit, [4, 8], 99) for hit in range(10)] == [0] * 4 + [4] * 4 + [8] * 2  # share
    # Evict: the oldest page has one behind it and stays, the oldest state may go.
    allocator, pool = PageAllocator(4), StatePool(4)
    tree, snapshots, pages = RadixTree(allocator, 2), Snapshots(pool), allocator.take(2)
    nodes = [tree.insert([1, 2], pages[:1]), tree.insert([1, 2, 3, 4], pages)]
    allocator.release(pages)
    for node in nodes:
        slot = pool.take()
        pool.stamp(slot, node.stop)
        snapshots.put(node, slot)
        pool.release(slot)
    snapshots.evict(1)
    assert [node in snapshots for node in nodes] == [False, True] and tree.evict(1) == nodes[1:]


def test_7d_the_table_of_engines_has_each_ability():
    abilities = {row.ability.split(",")[0] for row in engine_support()}
    assert abilities == {"prefix cache", "speculation", "disaggregation"}


# --- 5b again, and what users see


def test_the_sessions_prefill_shrinks_to_a_token_and_keeps_states_in_no_step_more(chapter):
    llm = LLM(config=EngineConfig())
    outputs = [llm.generate([chat_prompt(SESSION[:end])], SamplingParams(max_tokens=num))[0]
               for end, num in ((2, 16), (4, 2), (6, 1), (6, 12))]  # fmt: skip
    assert [output.usage.cached_tokens for output in outputs] == [0, 121, 144, 384]
    steps = [[event.data["stop"] for event in llm.log.of(i) if event.data.get("phase") == "prefill"] for i in range(4)]
    assert steps == [[106], [160], [385], [385]] and outputs[3].text == "port = 8127"


@pytest.mark.parametrize("length, every, parts", [(385, 256, [256, 128, 1]), (106, 256, [96, 10]), (17, 256, [16, 1]),
                                                  (40, 16, [16, 16, 8]), (16, 256, [16])])  # fmt: skip
def test_a_cold_prompt_runs_in_one_step_and_only_the_delta_rule_in_parts(chapter, length, every, parts):
    for caches, wanted in ((False, [length]), (True, parts)):
        runs = []

        def noted(*row, runs=runs):
            runs.append(len(row[0]))
            return [x[0] for x in chapter.gated_delta_chunked(*(x[None] for x in row))]

        engine = chapter.fresh(Parts(gated_delta=noted), prefix_cache=caches, snapshot_every=every)
        chapter.serve(engine, [PROMPT[:length]], max_tokens=1)
        assert runs == 6 * wanted and sum(event.kind is EventKind.STEP for event in engine.log) == 1
        kept = [node.stop for node in engine.cache.tree.nodes() if node in engine.cache.snapshots]
        assert sorted(kept) == (np.cumsum(parts).tolist() if caches else [])


def test_5b_a_found_token_is_attended_to_and_a_few_are_run_again(chapter):
    memory = {"cache_bytes": 16 * 10**9}
    known, reused = (
        {event.request_id: event.data["cached_tokens"] for event in log if event.kind is EventKind.ADMITTED}
        for log in (chapter.play(chapter.seconds, parts, **memory) for parts in (chapter.naive, Parts()))
    )
    lengths = {(one.session, one.turn): one.prompt_tokens for one in chapter.chats}
    chapter.names.update(known=known, reused=reused, lengths=lengths)
    pairs, costs = sum(known[one] * (num - known[one]) for one, num in lengths.items()), []
    for model in (chapter.config, BIG, HUGE):
        attends, again = chapter.cost_of_found(model)
        step = chapter.count_step(model, [(0, 1)]).flops
        per_pair = 4 * model.layer_types.count(FULL) * model.num_attention_heads * model.head_dim  # FLOPs
        per_token = step.total - step.head - step.attention
        met = sum(num * (num + 1) - (num - known[one]) * (num - known[one] + 1) for one, num in lengths.items()) / 2
        missed = sum(known.values()) * per_token + met * per_pair
        assert attends == pytest.approx(100 * pairs * per_pair / missed, rel=1e-9)
        assert again == pytest.approx(100 * (1 - sum(reused.values()) / sum(known.values())), rel=0.02)
        costs.append(attends + again)
    assert costs[0] > costs[1] > costs[2] and costs[1] < 100 * min(price.cached_share for price in prices())


def test_a_chat_waits_less_for_its_first_token(chapter):
    knobs = {"cache_bytes": 16 * 10**9}
    logs = [chapter.play(chapter.seconds, prefix_cache=caches, **knobs) for caches in (False, True)]
    without, cached = (np.median([m.ttft for m in request_metrics(log).values()]) for log in logs)
    tokens = [cache_hits(log).prefill_tokens for log in logs]
    assert cached < 0.3 * without and tokens[1] < 0.2 * tokens[0]
    assert chapter.seconds([(0, 64)]) > 0.8 * chapter.seconds([(0, 512)])  # so the wait shrinks less than the tokens


# --- Break: a token in the state, and fed again


def test_break_wrong_at_multiples_of_the_spacing_and_caught_at_any_length(chapter):  # fault A3
    trusting = Parts(match_hybrid=chapter.sees_it_twice, state_pool=chapter.TrustingPool)
    wrong = dict(zip(range(9, 49), chapter.wrong_by_length(trusting), strict=True))
    assert {length for length, num in wrong.items() if num} == {32, 48} and not any(chapter.wrong_by_length(Parts()))
    for length in (16, 32, 48):
        engine = chapter.fresh(Parts(match_hybrid=chapter.sees_it_twice), snapshot_every=16, page_size=4)
        with pytest.raises(StateError, match=f"has seen {length} tokens; its reader expects {length - 1}"):
            for _ in range(2):
                chapter.serve(engine, [chapter.text[:length]], max_tokens=1)


def test_break_every_fault_is_caught_by_the_stamp(chapter):  # faults A1, A3, A6
    for fault, every in ((chapter.naive.match_hybrid, 256), (chapter.sees_it_twice, len(PROMPT)),
                         (chapter.somebody_elses, 16)):  # fmt: skip
        engine = chapter.fresh(Parts(match_hybrid=fault), snapshot_every=every)
        with pytest.raises(StateError, match="its reader expects"):
            for ids in (asking("What is a port?"), PROMPT, PROMPT):
                chapter.serve(engine, [ids], max_tokens=1)
