"""The claims of chapter 3, each asserted on what is exact: counts, steps, tokens, virtual time."""

import contextlib
import os
from itertools import groupby

import numpy as np
import pytest
import torch
from chapter_rules import ROOT, load

from minserve import LLM, EngineConfig, SamplingParams
from minserve.clock import VirtualClock
from minserve.engine import Engine, EngineStuck
from minserve.errors import PromptTooLong
from minserve.events import EventKind, EventLog
from minserve.metrics import request_metrics, steps, summary
from minserve.model.counting import count_step
from minserve.model.model_figures import named_config
from minserve.model.naive import run_alone
from minserve.model.static_batch import serve_static
from minserve.model.tokenizer import ByteTokenizer, chat_prompt
from minserve.paging.paged_attention import paged_attention
from minserve.parts import Parts
from minserve.request import Request, check_prompt
from minserve.tuning.cost_model import machine, step_time
from minserve.tuning.sessions import book_session
from minserve.tuning.traces import trace_shape
from minserve.tuning.workload import gamma_times, quantile_lengths, standard_library_text

os.environ.update(TRITON_INTERPRET="1", TRITON_DEFAULT_FP_FUSION="1")  # before anything imports triton
BIG, GPU = named_config("qwen3.5-35b-a3b"), machine("h200", overhead_s=40 * 80e-6)
SESSION = chat_prompt(book_session())


@pytest.fixture(scope="module")
def exact():
    return LLM(config=EngineConfig(dtype="float64"))


def cost(rows):
    return step_time(count_step(BIG, rows), GPU).total_s


def asked(name, prompt, num_tokens):
    return Request(name, prompt, SamplingParams(max_tokens=int(num_tokens), ignore_eos=True), seed=0)


def chats(num, rate, cv, seed, shrink=1):
    rng, shape = np.random.default_rng(seed), trace_shape("azure_conversation")
    lengths = [quantile_lengths(num, kind.quantiles, rng) // shrink + (shrink > 1)
               for kind in (shape.prompt_tokens, shape.output_tokens)]  # fmt: skip
    text, times = ByteTokenizer().encode(standard_library_text(100_000)), gamma_times(num, rate, cv, rng).tolist()
    rows = enumerate(zip(times, *lengths, strict=True))
    return [(time_s, asked(i, text[900 * i :][:size], out)) for i, (time_s, size, out) in rows]


def burst():
    load = chats(12, rate=60, cv=2, seed=3, shrink=16)
    session = Request("session", SESSION, SamplingParams(max_tokens=24), seed=0)
    return load[:5] + [(load[4][0], session)] + load[5:]


def engine(log, model=None, config=BIG, parts=None, kind=Engine, **knobs):
    sizes = {"dtype": "float64", "num_pages": 65_536, "num_states": 64, "check": config is not BIG,
             "prefix_cache": False}  # fmt: skip
    return kind(model, config, EngineConfig(**sizes | knobs), log, ByteTokenizer().incremental, parts, cost)


def serve(served, load):
    coming, clock = list(load), served.log.clock
    while coming or served.has_work:
        if not served.has_work:
            clock.advance_to(max(clock.now(), coming[0][0]))
        while coming and coming[0][0] <= clock.now():
            served.add(coming.pop(0)[1])
        served.step()


def play(load, batch_size=None, **knobs):
    """The log, and each request's TTFT from its arrival."""
    log = EventLog(VirtualClock())
    if batch_size:
        serve_static(None, load, log, batch_size, 0.0, cost)
    else:
        serve(engine(log, **knobs), load)
    lives = request_metrics(log)
    return log, [lives[request.id].first_token - time_s for time_s, request in load]


def rows_of_steps(log):
    slices = [event for event in log if event.kind is EventKind.SLICE]
    return [list(rows) for _, rows in groupby(slices, key=lambda event: event.data["step"])]


def times_of(log, kind):
    """Per request, when something happened to it for the last time."""
    return {event.request_id: event.time_s for event in log if event.kind is kind}


# --- 3a: a request joins and another leaves at every step


def test_3a_the_small_example():
    wanted = {"A": 2, "B": 7, "C": 3, "D": 5, "E": 2}
    load = [(0.0, asked(name, [0], num)) for name, num in wanted.items()]
    log, _ = play(load, max_running=3)
    shown = ["".join(event.request_id for event in rows) for rows in rows_of_steps(log)]
    assert shown == ["ABC", "ABC", "BCD", "BDE", "BDE", "BD", "BD"]
    assert len(steps(play([(t, asked(r.id, [0], wanted[r.id])) for t, r in load], batch_size=3)[0])) == 12


def test_3a_who_is_done_leaves_and_who_comes_joins():
    static, _ = play(burst(), batch_size=4)
    continuous, _ = play(burst())
    for log, leaves in ((static, False), (continuous, True)):
        told, ended = times_of(log, EventKind.TOKENS), times_of(log, EventKind.FINISHED)
        assert all(told[name] == ended[name] for name in told) == leaves
    batches = sorted(set(times_of(static, EventKind.ADMITTED).values()))
    ends = sorted(set(times_of(static, EventKind.FINISHED).values()))
    assert len(batches) == len(ends) == 4
    assert all(end <= begin for end, begin in zip(ends, batches[1:], strict=False))  # nobody enters while one runs
    beside = [rows for rows in rows_of_steps(continuous) if {event.data["phase"] for event in rows} >= {"decode"}]
    assert sum(any(event.data["start"] == 0 for event in rows) for rows in beside) >= 5  # five steps with newcomers


def test_3a_the_sessions_explain(exact):
    queued_ms, each_ms, outputs = {}, {}, {}
    for way in ("static", "continuous"):
        log, load = EventLog(VirtualClock()), burst()
        if way == "static":
            serve_static(exact.model, load, log, 4, 0.0, cost)
        else:
            serve(engine(log, exact.model, exact.model.config, num_pages=None, num_states=None), load)
        life, outputs[way] = request_metrics(log)["session"], [request.output_ids for _, request in load]
        queued_ms[way], each_ms[way] = 1e3 * (life.admitted - load[5][0]), 1e3 * life.tpot
    assert outputs["static"] == outputs["continuous"]
    for (_, request), output in zip(burst(), outputs["continuous"], strict=True):
        alone = run_alone(exact.model, request, EventLog(VirtualClock()))
        assert [next(alone).token_id for _ in output] == output  # the neighbours change nothing
    assert queued_ms == pytest.approx({"static": 231.1, "continuous": 13.6}, rel=0.01)
    assert each_ms["continuous"] > 1.5 * each_ms["static"]  # the price


# --- 3b: continuous batching raises throughput without holding the first user back


def test_3b_more_tokens_and_an_earlier_first_one():
    found = {}
    for name, size in {"alone": 1, "static 8": 8, "static 32": 32, "continuous": None}.items():
        log, ttft = play(chats(100, rate=2.0, cv=3, seed=0), size, batch_tokens=2048)
        assert summary(log).num_finished == 100
        found[name] = (summary(log), *np.percentile(ttft, (50, 99)))
    rates = [total.tokens_per_s for total, *_ in found.values()]
    assert rates == pytest.approx([206, 374, 432, 611], rel=0.01)
    medians, slowest = ([row[place] for row in found.values()] for place in (1, 2))
    assert medians == pytest.approx([24.2, 5.89, 3.25, 0.037], rel=0.02)
    assert slowest == pytest.approx([63.8, 15.3, 8.98, 0.13], rel=0.05)
    assert found["continuous"][0].tpot.p50 > 1.5 * found["alone"][0].tpot.p50  # the price
    assert found["continuous"][0].padded_share == 0 < 0.5 < found["static 8"][0].padded_share


# --- 3c: ragged batches waste nothing, padded ones do


def test_3c_positions_that_go_through_the_model(exact):
    def through_the_model(run):
        sizes, load, log = [], burst(), EventLog(VirtualClock())
        hook = exact.model.register_forward_hook(lambda model, args, out: sizes.append(len(args[0].tokens)))
        run(load, log)
        hook.remove()
        assert sum(sizes) == sum(step.num_tokens + step.num_padded for step in steps(log))
        return sum(sizes), sum(request.num_computed for _, request in load)

    ran, needed = through_the_model(
        lambda load, log: serve(engine(log, exact.model, exact.model.config, num_pages=None, num_states=None), load)
    )
    assert ran == needed
    ran, needed = through_the_model(lambda load, log: serve_static(exact.model, load, log, 4, 0.0, cost))
    assert 0.5 < 1 - needed / ran < 0.65
    shares = [summary(play(burst(), size)[0]).padded_share for size in (1, 2, 4, 8)]
    assert shares[0] == 0 and shares == sorted(shares) and shares[3] > 0.6


# --- 3d: a huge prompt stalls everyone unless it is chunked


def test_3d_chunks_keep_the_readers_reading():
    longest_ms, ttft_s = {}, {}
    for budget in (64, 1024, 2048, 2**17):
        load = [(0.0, asked(i, [0] * 1000, 300)) for i in range(16)] + [(1.0, asked("long", [0] * 65_536, 9))]
        log, ttft = play(load, batch_tokens=budget)
        longest_ms[budget], ttft_s[budget] = 1e3 * max(request_metrics(log)[0].itl), ttft[-1]
        chunks = [event.data for event in log.of("long") if event.kind is EventKind.SLICE][: -(65_536 // -budget)]
        assert all(chunk["phase"] == "prefill" for chunk in chunks)
    assert longest_ms == pytest.approx({64: 19.6, 1024: 22.0, 2048: 35.1, 2**17: 689.4}, rel=0.01)
    assert longest_ms[2**17] > 30 * longest_ms[1024]
    assert 2 < ttft_s[1024] / ttft_s[2**17] < 2.2  # the price of small chunks, and below that all price and no gain
    assert ttft_s[64] > 15 * ttft_s[1024] and longest_ms[64] > 0.8 * longest_ms[1024]


# --- online softmax: a row's tokens attend to their own row


def test_the_trace_of_a_packed_batch():
    pytest.importorskip("triton")
    from minserve.batching.ragged_attention_triton import ragged_attention

    q, k = torch.randn(2, 13, 2, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    address = torch.eye(13, 16, dtype=torch.float64)[:, None].expand(k.shape)  # each value says where it lies
    found, _ = ragged_attention(q, k, address, torch.tensor([0, 5, 6, 13]))
    triangles = torch.block_diag(*(torch.ones(n, n).tril() for n in (5, 1, 7)))
    assert torch.equal(found[:, 0, :13] > 0, triangles > 0) and (found[..., 13:] == 0).all()


# --- 3e: kernels must tolerate different lengths and cache sizes in one call


def one_call(seed=0):
    """Two decoding rows, the middle of a prompt, an empty row and a whole prompt; NaN wherever nobody may look."""
    torch.manual_seed(seed)
    queries, contexts, page = torch.tensor([1, 1, 9, 0, 5]), torch.tensor([37, 3, 30, 8, 5]), 4
    tables, order = torch.full((5, 10), -1), torch.randperm(40)
    pools = torch.full((2, 40, page, 2, 16), torch.nan, dtype=torch.float64)
    for row, length in enumerate(contexts.tolist()):
        pages = order[sum(-(-int(n) // page) for n in contexts[:row]) :][: -(-length // page)]
        tables[row, : len(pages)] = pages
        for t in range(length):
            pools[:, pages[t // page], t % page] = torch.randn(2, 2, 16, dtype=torch.float64)
    bounds = torch.cat([torch.tensor([0]), queries.cumsum(0)])
    return torch.randn(int(bounds[-1]), 4, 16, dtype=torch.float64), *pools, tables, bounds, contexts


@pytest.mark.parametrize("twin", ["reference", "kernel"])
def test_3e_one_call_serves_decode_rows_and_chunks_over_unequal_caches(twin):
    attend = paged_attention
    if twin == "kernel":
        pytest.importorskip("triton")
        from minserve.paging.paged_attention_triton import paged_attention as attend
    q, k_pages, v_pages, tables, bounds, contexts = one_call()
    together, lse = attend(q, k_pages, v_pages, tables, bounds, contexts)
    for row in range(len(contexts)):
        mine = slice(*bounds[row : row + 2].tolist())
        alone = tables[[row]], torch.tensor([0, mine.stop - mine.start]), contexts[[row]]
        torch.testing.assert_close(together[mine], attend(q[mine], k_pages, v_pages, *alone)[0])
    _, lse = attend(torch.zeros_like(q), k_pages, v_pages, tables, bounds, contexts)
    touched, queries = lse[:, 0].exp().round(), bounds.diff()
    assert touched.tolist() == [37, 3, *range(22, 31), 1, 2, 3, 4, 5]
    assert len(contexts) * queries.max() * contexts.max() > 5 * touched.sum()


# --- Plug in: the reader's plan


def test_a_solved_plan_serves_the_load():
    plan = load(ROOT / "solutions" / "ch03_batching.py").plan
    log, _ = play(burst(), parts=Parts(plan=plan), batch_tokens=64)
    assert summary(log).num_finished == 13 and {len(rows) for rows in rows_of_steps(log)} >= {1, 5}
    assert max(step.num_tokens for step in steps(log)) == 64


def test_who_outgrows_the_pages_is_put_back_and_gets_done():
    log, _ = play([(0.0, asked(name, [0] * 5, 40)) for name in "ABCD"], num_pages=20, page_size=4)
    put_back = [event.request_id for event in log if event.kind is EventKind.PREEMPTED]
    assert put_back == ["D", "C", "B"] and summary(log).num_finished == 4


# --- Break: the head of the queue (fault D1)


class ChecksTheModelAlone(Engine):
    def check_request(self, prompt_ids, params):
        check_prompt(prompt_ids, params, BIG.vocab_size, self.max_context)


def behind(kind, size):
    """What becomes of a small request behind one of this size, in a cache of 8 pages of 4 tokens: (refused, served)."""
    queue, refused = engine(EventLog(VirtualClock()), kind=kind, num_pages=8, page_size=4), False
    for name, num in (("first", size), ("second", 4)):
        try:
            queue.add(asked(name, [0] * num, 6))
        except PromptTooLong as error:
            refused = "num_pages" in str(error)
    for _ in range(30):
        with contextlib.suppress(EngineStuck):
            queue.step()
    return refused, not queue.has_work


def test_break_nobody_is_served_behind_a_prompt_that_never_fits():  # fault D1
    for size in range(20, 40):
        assert behind(Engine, size) == (size + 5 > 32, True)
        assert behind(ChecksTheModelAlone, size) == (False, size < 32)


def test_break_a_prompt_that_fits_is_served_whole():
    log = play([(0.0, asked("just", [0] * 26, 6))], num_pages=8, page_size=4)[0]
    assert request_metrics(log)["just"].completion_tokens == 6
