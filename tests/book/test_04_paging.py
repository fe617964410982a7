"""The claims of chapter 4, each asserted on what is exact: tokens, pages, bytes, steps.

Classes and functions are those that the chapter shows, taken out of its cells; what they give is counted here anew.
"""

import ast
import os
from collections import Counter
from itertools import takewhile
from types import SimpleNamespace

import nbformat
import numpy as np
import pytest
import torch
from chapter_rules import ROOT, code_cells
from torch.nn.utils.rnn import pad_sequence

from minserve import LLM, EngineConfig, Parts, SamplingParams
from minserve.events import EventKind
from minserve.hybrid.hybrid_cache import HybridCache
from minserve.model.counting import kv_bytes_per_token, state_bytes
from minserve.model.model_figures import named_config
from minserve.model.naive import NaiveMemory
from minserve.model.step import Step
from minserve.model.tokenizer import chat_prompt
from minserve.paging.page_table import PageAllocator, PageError, PageTable, pages_needed
from minserve.paging.paged_attention import paged_attention, write_pages
from minserve.request import Request
from minserve.tuning.cost_model import machine
from minserve.tuning.sessions import book_session
from minserve.tuning.traces import trace_shape, workload_like
from minserve.tuning.workload import standard_library_text

os.environ.update(TRITON_INTERPRET="1", TRITON_DEFAULT_FP_FUSION="1")  # before anything imports triton
BIG, MEMORY, MAXIMUM = named_config("qwen3.5-35b-a3b"), 8 * 16_384, 16_384
PROMPT = chat_prompt(book_session())
DRAWN = workload_like("azure_conversation", 400, np.random.default_rng(0))
LENGTHS = [(arrival.prompt_tokens, arrival.output_tokens) for arrival in DRAWN]
SLABS = {"maximum": lambda ids, out: MAXIMUM, "asked": lambda ids, out: ids + 1000, "oracle": lambda *both: sum(both)}
FEW = [(6, 2), (4, 14), (6, 2), (2, 20), (6, 2), (6, 6), (6, 10)]


@pytest.fixture(scope="module")
def exact():
    return LLM(config=EngineConfig(dtype="float64", prefix_cache=False))


@pytest.fixture(scope="module")
def chapter(exact):
    """What the chapter defines, around the model in float64."""
    text = exact.tokenizer.encode(standard_library_text(40_000))
    names = {"big": BIG, "llm": exact, "exact": exact, "config": exact.model.config, "text": text, "torch": torch}
    names["encode"] = exact.tokenizer.encode
    kinds = (ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
    for cell in code_cells(nbformat.read(ROOT / "chapters" / "04_paging.ipynb", as_version=4)):
        nodes = [node for node in ast.parse(cell.source).body if isinstance(node, kinds)]
        exec(compile(ast.Module(nodes, []), "chapter 4", "exec"), names)
    return SimpleNamespace(**names)


def measured(serve, num_steps, slabs=None, page_size=1):
    """Per step, per running request: (tokens written, held, in the end); and what the next one asks for."""

    def look(engine):
        rows = [request for request, _ in engine.batcher.running.values()]
        held = [slabs.sizes[r.id] if slabs else len(engine.cache.tables[r.id].pages) * page_size for r in rows]
        ends = [len(r.prompt_ids) + r.params.max_tokens for r in rows]
        asks = slabs.sizes[engine.batcher.waiting[0].id] if slabs else None
        return np.array([[r.num_committed for r in rows], held, ends]), asks

    return serve(LENGTHS, MEMORY, look, num_steps, slabs, page_size)[1]


@pytest.fixture(scope="module")
def runs(chapter):
    sizes = {name: [size(*row) for row in LENGTHS] for name, size in SLABS.items()}
    found = {name: measured(chapter.serve, 300, chapter.Slabs(MEMORY, sizes[name])) for name in SLABS}
    return found | {size: measured(chapter.serve, 150, page_size=size) for size in (4, 16, 64, 256, 1024)}


def num_running(seen):
    return np.mean([rows.shape[1] for rows, _ in seen])


def written(seen):
    return np.mean([rows[0].sum() for rows, _ in seen]) / MEMORY


# --- 4a: a slab per request, sized for the maximum, runs out with memory free


def test_4a_most_requests_fill_little_of_the_longest_ones_slab(exact):
    for name in ("azure_code", "azure_conversation", "mooncake_conversation"):
        shape, drawn = trace_shape(name), workload_like(name, 2000, np.random.default_rng(0))
        longest = shape.prompt_tokens.quantiles[100] + shape.output_tokens.quantiles[100]
        assert np.median([one.prompt_tokens + one.output_tokens for one in drawn]) < longest / 6
    assert (len(PROMPT) + 12) / exact.model.config.max_position_embeddings == 397 / 8192


def test_4a_the_slabs_are_all_taken_and_nearly_empty(runs):
    assert {rows.shape[1] for rows, _ in runs["maximum"]} == {MEMORY // MAXIMUM}
    assert all(asks == MAXIMUM for _, asks in runs["maximum"]) and 0.05 < written(runs["maximum"]) < 0.1


def test_4a_pages_let_more_in_and_small_ones_most(runs):
    order = ["maximum", "asked", "oracle"]
    assert [num_running(runs[name]) for name in order] == sorted(num_running(runs[name]) for name in order)
    assert num_running(runs[16]) > 1.25 * num_running(runs["oracle"]) and num_running(runs[16]) > 12 * 8
    shares = [written(runs[size]) for size in (4, 16, 64, 256, 1024)]
    assert shares == sorted(shares, reverse=True) and shares[1] > 0.96 and shares[4] < 0.5


# --- 4d: you fragment, and are refused with memory free


@pytest.mark.parametrize("page_size", [1, 2, 4])
def test_4d_a_request_is_refused_with_memory_free(chapter, page_size):
    slabs = chapter.Slabs(64, [sum(lengths) for lengths in FEW])
    _, seen = chapter.serve(FEW, 64, lambda _: dict(slabs.slabs), 99, slabs)
    free = [64 - sum(stop - start for start, stop in now.values()) for now in seen if 5 not in now and len(now) > 1]
    assert free == [0] * 2 + [24] * 12 and 5 in seen[14] and sum(FEW[5]) == 12
    _, seen = chapter.serve(FEW, 64, lambda engine: {*engine.cache.tables}, 99, page_size=page_size)
    assert {0, 1, 2, 3, 4, 5} <= seen[0]


def test_4d_a_free_page_is_never_in_the_wrong_place():
    # fault B11
    allocator = PageAllocator(8)
    held = allocator.take(8)
    allocator.release(held[::2])
    assert len(set(allocator.take(4))) == 4 and not allocator.num_free


def test_4d_three_kinds_of_waste_apart(runs):
    waste = {}
    for name in SLABS:
        kinds = Counter()
        for (now, held, ends), asks in runs[name]:
            free, later = MEMORY - held.sum(), np.minimum(held, ends).sum() - now.sum()
            assert free >= 0 and (held >= ends).all()
            kinds += Counter(reserved=later, internal=(held - ends).sum(), external=free if free >= asks else 0)
        waste[name] = {kind: kinds[kind] / len(runs[name]) / MEMORY for kind in ("reserved", "internal", "external")}
    assert waste["maximum"]["internal"] > 0.9 and waste["maximum"]["external"] == 0
    assert waste["oracle"]["internal"] == 0 and waste["asked"]["internal"] > 0.25
    assert min(waste["asked"]["external"], waste["oracle"]["external"]) > 1 / 9
    assert waste["oracle"]["reserved"] > 0.1


# --- 4b: pages pack, are shared, are evicted; only the last page is wasted


@pytest.mark.parametrize("page_size", [1, 3, 4, 16, 64])
def test_4b_the_last_page_wastes_half_a_page(page_size):
    table, unused = PageTable(PageAllocator(5), page_size), []
    for num_tokens in range(1, 5 * page_size + 1):
        assert table.grow(num_tokens)
        unused.append(table.capacity - num_tokens)
    assert np.mean(unused) == (page_size - 1) / 2 and max(unused) == page_size - 1


def test_4b_the_formula_holds_below_what_lengths_vary_by(runs):
    unused = {}
    for size in (4, 16, 64, 1024):
        each = np.concatenate([held - now for (now, held, _), _ in runs[size]])
        assert each.min() >= 0 and each.max() < size
        unused[size] = each.mean()
    assert [round(unused[size], 1) for size in (4, 16)] == [1.5, 7.5] and unused[1024] > 600


def test_4b_eight_answers_share_their_prompts_pages():
    llm, found = LLM(config=EngineConfig(prefix_cache=False)), {}
    params = SamplingParams(max_tokens=24, temperature=0.8, ignore_eos=True)
    for forked in (True, False):
        eight, held = [Request((forked, i), PROMPT, params, seed=i) for i in range(8)], []
        for family in [eight] if forked else [[request] for request in eight]:
            llm.engine.add(family[0], family[1:])
        while llm.engine.has_work:
            llm.engine.step()
            held.append(llm.engine.sizes.num_pages - llm.engine.cache.allocator.num_free)
        found[forked] = max(held), [request.output_ids for request in eight]
    assert found[True][0] == 24 + 8 * 2 and found[False][0] == 8 * 26 and found[True][1] == found[False][1]


def test_4b_a_request_finishes_on_evicted_pages(chapter):
    engine, requests = chapter.fresh(18), chapter.asked((40, 60), (25, 90), (60, 40), (30, 50), (20, 40))
    for request in requests:
        engine.add(request)
    taken, heirs, tables = {}, set(), {}
    while engine.has_work:
        mark, tables = len(engine.log), {who: set(table.pages) for who, table in engine.cache.tables.items()}
        engine.step()
        for event in list(engine.log)[mark:]:
            if event.kind is EventKind.PREEMPTED:
                taken |= dict.fromkeys(tables[event.request_id], event.request_id)
            if event.kind is EventKind.FINISHED:
                evicted = {page for page in tables[event.request_id] & taken.keys() if taken[page] != event.request_id}
                heirs |= {event.request_id} if evicted else set()
    assert set(taken.values()) == {"D", "E"} and heirs == set("ABCDE")
    assert [request.output_ids for request in requests] == [chapter.alone(request) for request in requests]


# --- 4c: attention through a page table equals attention on a contiguous cache


class Noting(NaiveMemory):
    """A contiguous cache that keeps the last queries and answers of each layer."""

    def attend(self, layer, q, k, v):
        self.last = getattr(self, "last", {}) | {layer: (q, super().attend(layer, q, k, v))}
        return self.last[layer][1]


@pytest.mark.parametrize("num_queries", [1, 64])
@torch.inference_mode()
def test_4c_attention_through_a_table_is_attention(chapter, exact, num_queries):
    n, memory = len(PROMPT), Noting(exact.model.config, len(PROMPT), torch.float64)
    for start, stop in ((0, n - num_queries), (n - num_queries, n)):
        exact.model(Step.one_row(PROMPT[start:stop], start), memory)
    for layer, page_size in ((3, 1), (3, 16), (7, 4), (7, 16), (7, 64)):
        allocator, (q, wanted) = PageAllocator(2 * n // page_size), memory.last[layer]
        allocator.release(np.random.default_rng(0).permutation(allocator.take(allocator.num_pages)).tolist())
        table, shape = PageTable(allocator, page_size), (2, allocator.num_pages, page_size, 2, 32)
        assert table.grow(n) and table.pages != sorted(table.pages)
        pools = torch.full(shape, torch.nan, dtype=torch.float64)
        write_pages(memory.keys[layer], memory.values[layer], *pools, torch.tensor(table.slots(0, n)))
        row = torch.tensor([table.pages]), torch.tensor([0, num_queries]), torch.tensor([n])
        with chapter.Gathered() as read:
            out, _ = paged_attention(q, *pools, *row)
        assert (out - wanted).abs().max() < 1e-12 * wanted.abs().max()
        assert read.num_bytes == pages_needed(n, page_size) * page_size * 2 * 2 * 32 * 8


def test_4c_the_kernels_addresses():
    from minserve.paging import paged_attention_triton as twin

    source = (ROOT / "minserve" / "paging" / "paged_attention_triton.py").read_text("utf-8")
    offsets = source[source.index("@triton.jit") : source.index("@triton.jit\ndef paged_attention_kernel")]
    new = source[source.index("            table = page_tables") : source.index("                scores = tl.dot")]
    assert len((offsets + new).split("\n")) <= 25 and "tl.int64" in offsets and "table + place" in new
    allocator = PageAllocator(8)
    one, two = (PageTable(allocator, 4) for _ in range(2))
    assert one.grow(4) and two.grow(7) and one.grow(10)
    three, copies = one.fork(10)
    assert three.grow(13) and copies == [(one.pages[2], three.pages[2])] and one.pages[:2] == three.pages[:2]
    lens, pools = torch.tensor([10, 7, 13]), torch.full((2, 8, 4, 1, 1), torch.nan)
    slots = [torch.tensor(table.slots(0, num)) for table, num in zip((one, two, three), lens.tolist(), strict=True)]
    for to in slots:
        write_pages(200.0 * torch.arange(len(to)).view(-1, 1, 1), to.float().view(-1, 1, 1), *pools, to)
    tables = pad_sequence([torch.tensor(table.pages) for table in (one, two, three)], True, -1)
    looked, _ = twin.paged_attention(torch.ones(30, 1, 1), *pools, tables, torch.tensor([0, 10, 17, 30]), lens)
    assert torch.equal(looked.flatten(), torch.cat(slots).float())
    # A 35B's pool of one layer passes 2^31 numbers before its cache fills an H200.
    assert 2**31 // (BIG.num_key_value_heads * BIG.head_dim) * kv_bytes_per_token(BIG) < machine("h200").memory_bytes


# --- Break: the half-full last page is shared


def test_break_branches_read_each_other_and_no_count_is_wrong(chapter):
    # fault B4
    copied, shared = (chapter.three_answers(kind) for kind in (HybridCache, chapter.SharesTheHalfFullPage))
    assert [ours == theirs for ours, theirs in zip(copied, shared, strict=True)] == [False, False, True]
    assert chapter.three_answers(HybridCache, chapter.one_pen_per_page) == copied
    with pytest.raises(PageError, match="request 1 is to write position 9 to page 0, which 3 requests hold"):
        chapter.three_answers(chapter.SharesTheHalfFullPage, chapter.one_pen_per_page)


# --- Cost


def test_cost_the_session_waits_for_a_slab_and_not_for_pages(chapter):
    waited, config = {}, EngineConfig(num_pages=256, max_context=1024, prefix_cache=False)
    wants = [SamplingParams(max_tokens=80, ignore_eos=True)] * 4 + [SamplingParams(max_tokens=24)]
    for name, parts in (("slabs", Parts(plan=chapter.Slabs(4096, [1024] * 5).plan)), ("pages", None)):
        llm = LLM(config=config, parts=parts)
        output = llm.generate([chapter.text[900 * i :][:60] for i in range(4)] + [PROMPT], wants)[-1]
        before = takewhile(lambda event: (event.kind, event.request_id) != (EventKind.ADMITTED, 4), llm.log)
        waited[name] = sum(event.kind is EventKind.STEP for event in before), output.text
    assert waited == {"slabs": (80, "port = 8127"), "pages": (0, "port = 8127")}


def test_cost_a_page_as_large_as_a_state():
    large = named_config("qwen3.8-2.4t-a95b")
    state, token = state_bytes(large) / large.num_linear_layers, kv_bytes_per_token(large) / large.num_full_layers
    page = 16 * pages_needed(int(state), int(16 * token))
    assert page == 2080 and round((page - 1) / 2 * kv_bytes_per_token(large) / 1e6) == 98
