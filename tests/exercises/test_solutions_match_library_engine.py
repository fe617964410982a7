"""What a reader writes for one sequence, in chapters 3 and 4, is what the library computes for a batch."""

import numpy as np
import pytest
import torch
from catalogue import ROOT, load

from minserve import model_runner
from minserve.attention_merge import merge_attention
from minserve.batching.batcher import Batcher, Phase
from minserve.batching.ragged_attention import ragged_attention
from minserve.llm import LLM, EngineConfig
from minserve.paging.page_table import PageAllocator, PageError, PageTable, pages_needed
from minserve.paging.paged_attention import paged_attention
from minserve.request import SamplingParams

COUNTED = load(ROOT / "tests" / "batching" / "counted_room.py")
Room = COUNTED.Room
CH03, CH04 = (load(ROOT / "solutions" / f"{name}.py") for name in ("ch03_batching", "ch04_paging"))
CHECKS = load(ROOT / "tests" / "exercises" / "test_ch04_paging.py")


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def check_same(found, wanted):
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def standing(request, phase, room):
    """A request of the library as the exercises see it."""
    num_pages = room.pages_held(request)
    return CH03.Request(request.id, 0.0, request.num_committed, request.num_computed, num_pages, phase.value)


def requests(num, seed):
    lengths = np.random.default_rng(seed).integers(1, 30, num).tolist()
    return [COUNTED.Asked(i, num_committed) for i, num_committed in enumerate(lengths)]


def run(piece, batcher, outputs):
    """Compute a slice, as an engine would; a request ends after its number of outputs."""
    request = piece.request
    request.num_computed = piece.stop
    if piece.stop == request.num_committed:
        request.num_committed += 1
        batcher.starts_decoding(request)
        outputs[request.id] -= 1
    if outputs[request.id] == 0:
        batcher.remove(request)


@pytest.mark.parametrize("batch_tokens, max_running, page_size", [(8, 3, 4), (16, 6, 1), (5, 2, 3), (64, 20, 16)])
def test_plan_equals_the_batcher_while_there_are_pages(batch_tokens, max_running, page_size):
    batcher, room = Batcher(batch_tokens, max_running), Room(10_000, page_size)
    outputs, num_steps = {i: 1 + 5 * i % 7 for i in range(20)}, 0
    for request in requests(20, seed=batch_tokens):
        batcher.add(request)
    while batcher.has_work:
        running = [standing(request, phase, room) for request, phase in batcher.running.values()]
        waiting = [standing(request, Phase.PREFILL, room) for request in batcher.waiting]
        mine = CH03.plan(running, waiting, batch_tokens, max_running, room.free_pages, page_size)
        slices = batcher.plan(room).slices
        assert mine == [(piece.request.id, piece.start, piece.stop, piece.phase.value) for piece in slices]
        for piece in slices:
            run(piece, batcher, outputs)
        num_steps += 1
    assert num_steps > 3 and not any(outputs.values())


@pytest.mark.parametrize("num_running, num_free", [(2, 0), (3, 0), (3, 1), (4, 0), (4, 2)])
def test_preempt_puts_back_whom_the_batcher_does(num_running, num_free):
    page_size = 2
    room = Room(2 * num_running + num_free, page_size)
    batcher = Batcher(32, num_running)
    for request in requests(num_running, seed=0):
        batcher.adopt(request, Phase.DECODE)
        request.num_computed, request.num_committed, room.pages[request.id] = 4, 5, 2
    # In order, each takes a free page; the first for which there is none is in need.
    needy = num_free
    planned = [(i, 4, 5, "decode") for i in range(needy)]
    running = [standing(request, phase, room) for request, phase in batcher.running.values()]
    running = [CH03.replace(row, num_pages=3) if row.id < needy else row for row in running]
    mine = CH03.preempt(needy, running, planned, batch_tokens=32 - needy, free_pages=0)
    plan = batcher.plan(room)
    (victim, _), *_ = plan.preempted
    assert mine["victim"] == CH03.replace(standing(victim, Phase.PREFILL, room), num_pages=0)
    assert [row.id for row in mine["running"]] == [i for i in range(num_running) if i != victim.id]


def test_neither_puts_back_who_is_alone():  # fault D3
    room, batcher = Room(2, 2), Batcher(8, 4)
    (request,) = requests(1, seed=0)
    batcher.adopt(request, Phase.DECODE)
    request.num_computed, request.num_committed, room.pages[request.id] = 4, 5, 2
    assert batcher.plan(room).stuck == [request]
    with pytest.raises(ValueError, match="request 0"):
        CH03.preempt(0, [standing(request, Phase.DECODE, room)], [], 8, 0)


def test_pack_equals_the_packing_of_each_step(monkeypatch):  # fault D10: a short prompt and a long one
    packed, steps = model_runner.pack, []

    def pack_both(slices, *rest):
        step, places = packed(slices, *rest)
        mine = CH03.pack([([*piece.request.tokens], piece.start, piece.stop) for piece in slices])
        steps.append((step, mine))
        return step, places

    monkeypatch.setattr(model_runner, "pack", pack_both)
    llm = LLM(config=EngineConfig(batch_tokens=8, page_size=4, num_pages=64, max_running=4))
    llm.generate(["x = 5", "def area(width, height): return width * h", "a"], SamplingParams(max_tokens=4))
    for step, mine in steps:
        assert step.tokens.tolist() == mine["token_ids"] and step.positions.tolist() == mine["positions"]
        assert step.row_starts.tolist() == mine["row_starts"]
        assert step.chosen.tolist() == [at for at in mine["chosen_at"] if at is not None]
    assert any(None in mine["chosen_at"] and len(mine["chosen_at"]) > 1 for _, mine in steps)


def test_merge_softmax_equals_merge_attention():
    outs, lses = random(2, 6, 3, 4, seed=1), 50 * random(2, 6, 3, seed=2)
    lses[0, 1], lses[1, 2], lses[:, 3] = -torch.inf, -torch.inf, -torch.inf
    outs[lses == -torch.inf] = 0
    out, lse = merge_attention(outs, lses)
    for head in range(3):
        found = CH03.merge_softmax(outs[0, :, head], lses[0, :, head], outs[1, :, head], lses[1, :, head])
        check_same(found, (out[:, head], lse[:, head]))


@pytest.mark.parametrize("heads, kv_heads", [(1, 1), (6, 2), (4, 4)])
def test_ragged_attention_equals_the_library(heads, kv_heads):
    row_starts = torch.tensor([0, 3, 3, 4, 80, 81])
    q, k, v = random(81, heads, 5, seed=1), random(81, kv_heads, 5, seed=2), random(81, kv_heads, 5, seed=3)
    check_same(CH03.ragged_attention(q, k, v, row_starts, row_starts), ragged_attention(q, k, v, row_starts))


class Librarys:
    """The library's allocator under the exercise's error."""

    def __init__(self, num_pages):
        self._pages = PageAllocator(num_pages)
        self.num_pages, self.ref_count, self.take = num_pages, self._pages.ref_count, self._pages.take

    @property
    def num_free(self):
        return self._pages.num_free

    def share(self, pages):
        return self._as_value_error(self._pages.share, pages)

    def release(self, pages):
        return self._as_value_error(self._pages.release, pages)

    def check(self):
        return self._pages.check()

    @staticmethod
    def _as_value_error(method, pages):
        try:
            return method(pages)
        except PageError as error:
            raise ValueError(str(error)) from None


@pytest.mark.parametrize("num_pages", [1, 3, 4, 17, 100])
def test_page_allocators_answer_alike(num_pages):  # fault B1
    calls, want = CHECKS.some_calls(num_pages, 100, seed=num_pages)
    assert CHECKS.answers(CH04.PageAllocator, num_pages, calls) == want
    assert CHECKS.answers(Librarys, num_pages, calls) == want


@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
def test_slots_pages_needed_and_fork_equal_the_page_table(page_size):
    for num_tokens in range(1, 20):
        allocator, twin = PageAllocator(60), PageAllocator(60)
        allocator.take(3), twin.take(3)
        table = PageTable(allocator, page_size)
        needed = CH04.pages_needed(0, num_tokens, page_size, max_tokens=10**6)
        pages = twin.take(needed)
        assert table.grow(num_tokens) and table.pages == pages
        assert table.slots(0, num_tokens) == CH04.slots(pages, 0, num_tokens, page_size)
        needed = CH04.pages_needed(num_tokens, 5, page_size, max_tokens=10**6)
        assert needed == pages_needed(num_tokens + 5, page_size) - len(pages)
        branch, copies = table.fork(num_tokens)
        tables, mine = CH04.fork(twin, pages, num_tokens, page_size, num_branches=2)
        assert tables == [table.pages, branch.pages] and mine == copies
        assert [allocator.ref_count(page) for page in range(60)] == [twin.ref_count(page) for page in range(60)]


@pytest.mark.parametrize("page_size, heads, kv_heads", [(1, 1, 1), (4, 6, 2), (16, 4, 4)])
def test_paged_attention_equals_the_library(page_size, heads, kv_heads):
    contexts, row_starts = [1, 9, 16, 33], torch.tensor([0, 1, 4, 5, 38])
    tables = np.random.default_rng(0).permutation(160).reshape(4, 40)
    k_pages, v_pages = torch.full((2, 161, page_size, kv_heads, 5), torch.nan).double()
    for row, context in enumerate(contexts):
        slots = torch.tensor(CH04.slots(tables[row].tolist(), 0, context, page_size))
        for pages, seed in ((k_pages, row), (v_pages, 10 + row)):
            pages.view(-1, kv_heads, 5)[slots] = random(context, kv_heads, 5, seed=seed)
    q, page_tables = random(38, heads, 5, seed=20), torch.tensor(tables)
    out, lse = paged_attention(q, k_pages, v_pages, page_tables, row_starts, torch.tensor(contexts))
    for row, context in enumerate(contexts):
        mine = slice(row_starts[row], row_starts[row + 1])
        found = CH04.paged_attention(q[mine], k_pages, v_pages, page_tables[row].tolist(), context)
        check_same(found, (out[mine], lse[mine]))
