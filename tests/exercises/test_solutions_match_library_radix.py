"""What a reader writes in chapter 5 is what the library does: it serves the same tokens and finds the same prefixes."""

import numpy as np
import pytest
import torch
from catalogue import ROOT, load
from small_trees import answers, shared_sequences, slots_of, some_calls

from minserve import LLM, EngineConfig, Parts, SamplingParams
from minserve.llm import shipped_checkpoint
from minserve.paging.page_table import PageAllocator
from minserve.paging.paged_attention import paged_attention
from minserve.radix import radix_tree as library
from minserve.radix.shared_prefix_attention import shared_prefix_attention
from minserve.tuning.workload import standard_library_text

CH05 = load(ROOT / "solutions" / "ch05_radix.py")


def test_match_and_insert_equal_a_tree_with_pages_of_one_token():
    root, allocator = CH05.Run([], []), PageAllocator(4000)
    tree = library.RadixTree(allocator, page_size=1)
    allocator.take(4000)
    for tokens, slot in shared_sequences(40, seed=7):
        found = tree.match(tokens)
        pages = tree.pages(found.path[-1], found.num_tokens) if found.path else []
        assert CH05.match({"": root}, tokens) == pages[: len(tokens) - 1]
        tree.insert(tokens, slots_of(tokens, slot % 3000))
        CH05.insert(root, tokens, slots_of(tokens, slot % 3000), len(tokens))


@pytest.mark.parametrize("page_size, seed", [(1, 10), (2, 11), (3, 12), (4, 13), (5, 14)])
def test_the_readers_tree_answers_as_the_librarys(page_size, seed):  # faults C1, C3, C13
    calls = some_calls(40, seed)
    assert answers(CH05.RadixTree, page_size, calls) == answers(library.RadixTree, page_size, calls)


@pytest.mark.parametrize("num_pages", [40, 64, 400])
def test_the_readers_tree_serves_in_the_engine(num_pages):
    text, served = standard_library_text(4000), {}
    prompts = [text[: 100 + 50 * (i % 3)] + text[1000 + 40 * i :][:30] for i in range(12)]
    for tree in (CH05.RadixTree, library.RadixTree):
        config = EngineConfig(num_pages=num_pages, page_size=8, batch_tokens=64, check=True)
        llm = LLM(shipped_checkpoint("tiny_attention"), config=config, parts=Parts(radix_tree=tree))
        outputs = llm.generate(prompts, SamplingParams(max_tokens=6, ignore_eos=True))
        served[tree] = [(output.token_ids, output.usage.cached_tokens) for output in outputs]
    mine, theirs = served.values()
    assert mine == theirs and sum(cached for _, cached in mine) > 0


@pytest.mark.parametrize("heads, kv_heads, num_shared", [(1, 1, 1), (6, 2, 3), (4, 4, 0)])
def test_shared_prefix_attention_equals_the_library(heads, kv_heads, num_shared):
    rng, size, own = np.random.default_rng(0), 4, [3, 9, 1, 6]
    lens = torch.tensor([num_shared * size + num for num in own])
    shared = torch.arange(num_shared).expand(4, num_shared)
    tables = torch.cat([shared, torch.from_numpy(rng.permutation(12) + num_shared).view(4, 3)], 1)
    k_pages, v_pages = torch.randn(2, num_shared + 12, size, kv_heads, 5, dtype=torch.float64)
    q = torch.randn(4, heads, 5, dtype=torch.float64)
    want = shared_prefix_attention(q, k_pages, v_pages, tables, torch.arange(5), lens, num_shared, paged_attention)
    rows = [tables[row, num_shared:] for row in range(4)]
    k, v = (torch.cat([pages[row].flatten(0, 1)[:num] for row, num in zip(rows, own, strict=True)])
            for pages in (k_pages, v_pages))  # fmt: skip
    prefix = (pages[:num_shared].flatten(0, 1) for pages in (k_pages, v_pages))
    found = CH05.shared_prefix_attention(q, *prefix, k, v, [0, *np.cumsum(own).tolist()])
    for mine, theirs in zip(found, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
