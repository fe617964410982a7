"""The claims of chapter 5, each asserted on what is exact: tokens, pages, FLOPs, positions.

Classes and functions are those that the chapter shows, taken out of its cells; what they give is counted here anew.
"""

import ast
import os
from dataclasses import replace
from itertools import permutations
from types import SimpleNamespace

import nbformat
import numpy as np
import pytest
import torch
from chapter_rules import ROOT, code_cells

from minserve import LLM, EngineConfig, Parts, SamplingParams
from minserve.events import EventKind, EventLog
from minserve.llm import shipped_checkpoint
from minserve.model.config import FULL
from minserve.model.model_figures import named_config
from minserve.model.tokenizer import chat_prompt
from minserve.paging.paged_attention import paged_attention
from minserve.radix.node import TreeError
from minserve.radix.radix_tree import RadixTree
from minserve.radix.shared_prefix_attention import positions_read, shared_prefix_attention
from minserve.request import Request
from minserve.tuning.prices import prices
from minserve.tuning.sessions import book_session
from minserve.tuning.workload import standard_library_text

os.environ.update(TRITON_INTERPRET="1", TRITON_DEFAULT_FP_FUSION="1")  # before anything imports triton
SESSION, TEXT, ATTENTION = list(book_session()), standard_library_text(60_000), shipped_checkpoint("tiny_attention")


@pytest.fixture(scope="module")
def chapter():
    """What the chapter defines."""
    llm = LLM(ATTENTION)
    names = {"llm": llm, "attention_only": ATTENTION, "session": SESSION, "text": TEXT, "torch": torch, "np": np}
    names |= {"encode": llm.tokenizer.encode, "LLM": LLM, "EngineConfig": EngineConfig, "Request": Request}
    names |= {"SamplingParams": SamplingParams, "Parts": Parts, "EventKind": EventKind, "EventLog": EventLog}
    kinds = (ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
    for cell in code_cells(nbformat.read(ROOT / "chapters" / "05_radix.ipynb", as_version=4)):
        nodes = [node for node in ast.parse(cell.source).body if isinstance(node, kinds)]
        exec(compile(ast.Module(nodes, []), "chapter 5", "exec"), names)
    return SimpleNamespace(**names, names=names)


@pytest.fixture(scope="module")
def loads(chapter):
    few = [chapter.encode(TEXT[:400] + TEXT[1000 + 30 * who :][:24]) for who in range(64)]
    return {"session": [[chat_prompt(SESSION[:stop])] for stop in (2, 4, 6)], "few": [few],
            "chats": [[chapter.chat(who, turn) for who in range(8)] for turn in range(6)]}  # fmt: skip


def num_beginnings(prompts):
    """How many different beginnings prompts have: the tokens that must be computed at least."""
    return len({tuple(prompt[:stop]) for prompt in prompts for stop in range(1, len(prompt) + 1)})


def asked(load):
    """All prompts of a load."""
    return [prompt for wave in load for prompt in wave]


# --- 5a: a shared prefix is stored once and computed once


@pytest.mark.parametrize("name, least", [("session", 0.4), ("few", 0.92)])
def test_5a_a_shared_prefix_is_computed_once(chapter, loads, name, least):
    prompts = asked(loads[name])
    without, with_tree = (chapter.serve(loads[name], kept) for kept in (False, True))
    assert [r.output_ids for r in with_tree[0]] == [r.output_ids for r in without[0]]
    assert without[2] == sum(map(len, prompts)) and with_tree[2] < (1 - least) * without[2]
    assert with_tree[2] <= num_beginnings(prompts) + 2 * len(prompts)  # each computes its last token anew
    if name == "few":
        assert with_tree[2] <= 400 + 64 * 24
        # 400 tokens are 25 full pages, 24 more and 11 outputs are 3; without the tree, all 28 for each.
        assert max(with_tree[1]) == 25 + 64 * 3 and max(without[1]) >= 64 * 27


def test_5a_most_of_what_chats_send_was_read_before(chapter, loads):
    prompts = asked(loads["chats"])
    requests, _, num_computed = chapter.serve(loads["chats"])
    assert num_beginnings(prompts) < 0.25 * sum(map(len, prompts))
    assert num_computed <= num_beginnings(prompts) + 2 * len(prompts) and len(requests) == 48


def test_5a_a_node_is_stored_in_pages_once_though_prompts_part_inside_one(chapter):
    allocator = chapter.PageAllocator(32)
    tree, found = RadixTree(allocator, 4), []
    for line in (b"def area(width, height):", b"def area(radius):", b"def add(a, b):", b"class Point:"):
        found.append(chapter.take_in(tree, allocator, list(line)))
    assert [(num, shared, len(own)) for num, shared, own in found] == [
        (0, [], 6), (9, [0, 1], 3), (5, [0], 3), (0, [], 3)]  # fmt: skip
    assert tree.num_pages == 15 == 32 - allocator.num_free


# --- 5b: cached input can be sold cheap


def test_5b_a_found_token_costs_its_keys_and_no_more(chapter):
    large = named_config("qwen3.8-2.4t-a95b")
    twin = replace(large, layer_types=(FULL,) * large.num_hidden_layers)
    small = chapter.llm.model.config
    shares = [chapter.share_of_a_miss(config, 8000) for config in (small, twin)]
    for config, share in zip((small, twin), shares, strict=True):
        attends = 4 * config.num_hidden_layers * config.num_attention_heads * config.head_dim  # FLOPs a pair of tokens
        step = chapter.count_step(config, [(0, 8000)])
        missed = (step.flops.total - step.flops.head) / 8000 + 256 * attends
        assert share == pytest.approx(100 * 256 * attends / missed, rel=1e-3)
    assert shares[0] < 6 and shares[1] < 1
    assert all(100 * price.cached_share > shares[1] for price in prices())
    by_date = sorted(prices(), key=lambda price: price.as_of)
    assert by_date[0].cached_share > 0.25 and max(price.cached_share for price in by_date[1:]) <= 0.125


# --- 5c: which request runs next decides the hit rate


@pytest.mark.parametrize("num_pages", [9, 10])
def test_5c_depth_first_is_the_best_of_all_orders(chapter, num_pages):
    rng = np.random.default_rng(0)
    a, b, a1, a2, *ends = (rng.integers(256, size=size).tolist() for size in (16, 16, 8, 8, *[10] * 7))
    five = [start + end for start, end in zip((a + a1, b, a + a2, b, a + a1), ends, strict=False)]
    found = [chapter.found_in_order(order, num_pages) for order in permutations(five)]
    best = 100 - 100 * num_beginnings(five) / sum(map(len, five))
    assert max(map(len, five)) <= 4 * 9, "the cache holds the longest"
    assert chapter.found_in_order(sorted(five), num_pages) == pytest.approx(best) == pytest.approx(max(found))
    assert found[0] < max(found) and min(found) < best / 2


def test_5c_longest_prefix_first_comes_close_to_the_optimum(chapter):
    rng = np.random.default_rng(1)
    prefixes = [rng.integers(256, size=400).tolist() for _ in range(12)]
    queued = [prefixes[rng.integers(12)] + rng.integers(256, size=40).tolist() for _ in range(60)]
    chapter.names["queued"] = queued
    found = {policy: chapter.share_cached(policy, 256) for policy in ("fcfs", "longest_prefix")}
    optimum = 100 - 100 * num_beginnings(queued) / sum(map(len, queued))
    assert found["fcfs"] < 0.85 * optimum < 0.96 * optimum < found["longest_prefix"] <= optimum + 1e-9
    # Prefixes alone are 300 pages, and what hangs on them needs room, too.
    room = [chapter.share_cached("fcfs", num_pages) for num_pages in (300, 12 * 25 + 60 * 4)]
    assert room[0] < 0.98 * optimum and room[1] == pytest.approx(optimum)


# --- the kernel's idea


def test_the_prefix_is_read_once_and_the_parts_are_merged():
    from minserve.radix import shared_prefix_attention as module  # noqa: PLC0415

    assert module.__file__.endswith("shared_prefix_attention.py")
    source = (ROOT / "minserve" / "radix" / "shared_prefix_attention_triton.py").read_text("utf-8")
    merge = source[source.index("    # A tail is one more part") : source.index("\n\n\ndef shared_prefix_attention")]
    assert len(merge.split("\n")) <= 25 and "shrink" in merge and "target += num_tokens" in merge
    row_starts, lens = torch.arange(65), torch.full((64,), 430)
    assert [positions_read(row_starts, lens, num) for num in (400, 0)] == [400 + 64 * 30, 64 * 430]
    tables = torch.cat([torch.arange(25).expand(64, 25), 25 + torch.arange(128).view(64, 2)], 1)
    q, *pools = (torch.randn(shape, dtype=torch.float64) for shape in ((64, 4, 32), *[(153, 16, 2, 32)] * 2))
    once, _ = shared_prefix_attention(q, *pools, tables, row_starts, lens, 25, paged_attention)
    each, _ = paged_attention(q, *pools, tables, row_starts, lens)
    assert (once - each).abs().max() < 1e-12 * each.abs().max()


# --- Break: a lock that holds more than was matched


def test_break_bob_is_told_anns_port(chapter, capsys):
    # fault C3
    chapter.two_users(RadixTree)
    right = capsys.readouterr().out.splitlines()
    chapter.two_users(chapter.LocksTheWholeNode)
    wrong = capsys.readouterr().out.splitlines()
    assert all("'port = 8127'" in line for line in right[1:]) and right[0] == wrong[0]
    assert all("Bob, port = 8127" in line and line.endswith("'port = 9001'") for line in wrong[1:])
    with pytest.raises(TreeError, match="a lock holds 106 tokens, and 89 were matched"):
        chapter.two_users(chapter.EndsWhereItMatched)


# --- Cost


def test_cost_each_turn_computes_what_is_new(loads):
    llm, usages = LLM(ATTENTION), []
    for (prompt,) in loads["session"]:
        output = llm.generate([prompt], SamplingParams(max_tokens=24))[0]
        usages.append((output.usage.prompt_tokens, output.usage.cached_tokens))
    assert usages == [(106, 0), (160, 121), (385, 160)] and output.text == "port = 8127"


def test_cliff_the_tree_alone_forgets_the_port(chapter):
    # fault A1
    as_if = Parts(match_hybrid=lambda page_hit, snapshots, num_tokens: page_hit, state_pool=chapter.TrustingPool)
    recall = chapter.encode("port = 8127\ndef area(width, height):\n    return width * height\nport =")
    hybrids = {name: LLM(parts=parts, config=EngineConfig(snapshot_every=4096))
               for name, parts in (("right", None), ("as if", as_if))}  # fmt: skip
    for prompt, more in ((chat_prompt(SESSION), "port = 8127, thank you. Now show me some more code."),
                         (recall, " 8127 is what it was. And now some more code:")):  # fmt: skip
        texts = {}
        for name, hybrid in hybrids.items():
            hybrid.generate([[*prompt, *chapter.encode(more)]], SamplingParams(max_tokens=4))
            output = hybrid.generate([prompt], SamplingParams(max_tokens=16))[0]
            texts[name] = output.text, output.usage.cached_tokens
        assert "8127" in texts["right"][0] and "8127" not in texts["as if"][0]
        assert texts["as if"][1] == len(prompt) - 1 and texts["right"][1] == 0
