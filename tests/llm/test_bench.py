"""The bench: what is counted, that every contender serves the same requests, and what the commands print."""

import json
import shutil
import sys

import pytest

from minserve.__main__ import main
from minserve.bench.bookkeeping import bench_bookkeeping
from minserve.bench.contenders import contenders, run_rounds, serve_in_turn
from minserve.bench.decode import bench_decode
from minserve.bench.decode import table as decode_table
from minserve.bench.peers import record_batch
from minserve.bench.serving import bench_serving, bench_workload, requests_of, speeds_of, table
from minserve.clock import RealClock, VirtualClock
from minserve.engine import Engine
from minserve.engine_config import EngineConfig
from minserve.errors import InvalidValue, MissingRequirement, PromptTooLong
from minserve.events import EventKind, EventLog
from minserve.llm import LLM, shipped_checkpoint
from minserve.metrics import request_metrics, steps, summary
from minserve.model.static_batch import run_static
from minserve.model.tokenizer import ByteTokenizer
from minserve.request import Request, SamplingParams

FLOAT64 = EngineConfig(dtype="float64", batch_tokens=64)
SHORT = {"prompt_tokens": (4, 20), "output_tokens": (3, 9)}


def wants(number, prompt_tokens, output_tokens):
    """A request with prompt tokens 1 and so many output tokens, whatever they are."""
    return Request(number, [1] * prompt_tokens, SamplingParams(max_tokens=output_tokens, ignore_eos=True, seed=0))


def test_the_workload_is_the_same_every_time_and_keeps_its_limits():
    one, other = (bench_workload(200, (32, 512), (16, 128), ByteTokenizer()) for _ in range(2))
    assert one == other and all(arrival.time_s == 0 for arrival in one)
    prompts, outputs = ([getattr(a, name) for a in one] for name in ("prompt_tokens", "output_tokens"))
    assert 32 <= min(prompts) < 40 and 400 < max(prompts) <= 512 and min(outputs) >= 16 and max(outputs) <= 128
    for low in (32, 64, 128, 256):  # as many in each octave: log-uniform
        assert 30 <= sum(low <= length < 2 * low for length in prompts) <= 70
    requests = requests_of(one)
    assert [len(r.prompt_ids) for r in requests] == prompts and [r.params.max_tokens for r in requests] == outputs
    assert len({r.prompt_ids for r in requests}) == 200 and all(max(r.prompt_ids) < 128 for r in requests)
    assert all(r.params.is_greedy and r.params.ignore_eos for r in requests)


WRONG = [
    ({"num_requests": 0}, "num_requests"), ({"prompt_tokens": (0, 5)}, "prompt_tokens"),
    ({"output_tokens": (9, 5)}, "output_tokens"), ({"batch_size": 0}, "batch_size"), ({"rounds": 0}, "rounds"),
    ({"against": "abacus"}, "against"), ({"prompt_tokens": (255, 255)}, "prompt_ids"),
]  # fmt: skip


@pytest.mark.parametrize("wrong,named", WRONG)
def test_what_cannot_be_measured_is_named(small_folder, wrong, named):
    with pytest.raises(PromptTooLong if named == "prompt_ids" else InvalidValue, match=named):
        bench_serving(small_folder, **{"num_requests": 2, **SHORT, **wrong})


def test_speeds_of_a_static_batch_by_hand():
    """Prompts of 3 and 1, outputs of 2 and 4, steps of 1 s: one step reads 4 prompt tokens, three decode 1 + 3."""
    log, batch = EventLog(VirtualClock()), [wants(0, 3, 2), wants(1, 1, 4)]
    for request in batch:
        log.record(EventKind.ARRIVED, request.id, prompt_tokens=len(request.prompt_ids))
    run_static(None, batch, log, cost=lambda rows: 1.0)
    speeds = speeds_of(log)
    assert (speeds.tokens_per_s, speeds.prefill_tokens_per_s) == (6 / 4, 4 / 1)
    assert speeds.decode_tokens_per_s == pytest.approx(4 / 3) and speeds.ttft_p50_s == speeds.ttft_p99_s == 1
    assert summary(log).padded_share == pytest.approx((2 + 2) / (6 + 6))


def test_speeds_of_the_engine_count_mixed_steps_as_prefill(small_folder):
    """Budget 4, steps of 1 s: [6 of prompt 0..4], [4..6 and 2 of prompt 1], then the decodes."""
    log = EventLog(VirtualClock())
    config = EngineConfig(batch_tokens=4, num_pages=8, num_states=2)
    engine = Engine(None, LLM(small_folder).model.config, config, log, ByteTokenizer().incremental,
                    cost=lambda rows: 1.0)  # fmt: skip
    for request in (wants(0, 6, 3), wants(1, 3, 2)):
        engine.add(request)
    while engine.has_work:
        engine.step()
    rows = [(s.num_rows, s.num_tokens) for s in steps(log)]
    assert rows == [(1, 4), (2, 4), (2, 2), (2, 2)]  # the third reads the last prompt token beside a decode
    speeds = speeds_of(log)
    assert (speeds.tokens_per_s, speeds.prefill_tokens_per_s, speeds.decode_tokens_per_s) == (5 / 4, 9 / 3, 2 / 1)
    assert (speeds.ttft_p50_s, summary(log).padded_share) == (2.5, 0)


def test_a_step_lasts_until_the_next_one_begins():
    """Prefill from 0 s to 1.5 s with its choosing, decode from 1.5 s to the end at 3.5 s."""
    log = EventLog(VirtualClock())
    log.record(EventKind.ARRIVED, 0, prompt_tokens=3)
    for number, (start_s, phase) in enumerate([(0.0, "prefill"), (1.5, "decode")]):
        after = {"time_s": start_s + 1.0}
        log.record(EventKind.SLICE, 0, **after, start=3 * number, stop=3 + number, phase=phase, step=number)
        log.record(EventKind.STEP, **after, step=number, start_s=start_s, duration_s=1.0, num_rows=1,
                   num_tokens=3 - 2 * number, num_padded=0)  # fmt: skip
        log.record(EventKind.TOKENS, 0, **after, count=1)
    log.record(EventKind.FINISHED, 0, 3.5, reason="length")
    assert (speeds_of(log).prefill_tokens_per_s, speeds_of(log).decode_tokens_per_s) == (3 / 1.5, 1 / 2)


def test_without_a_decode_step_there_is_no_decode_speed():
    log, batch = EventLog(VirtualClock()), [wants(0, 3, 1)]
    log.record(EventKind.ARRIVED, 0, prompt_tokens=3)
    run_static(None, batch, log, cost=lambda rows: 0.5)
    assert speeds_of(log).decode_tokens_per_s is None


def test_a_batch_that_ran_elsewhere_is_written_down_as_ours():
    """The same steps and counts as run_static: only useful tokens are output, the rest is padding."""

    def fresh():
        return [wants(0, 3, 2), wants(1, 1, 4)]

    logs = []
    for batch in (ours := fresh(), theirs := fresh()):
        logs.append(EventLog(VirtualClock()))
        for request in batch:
            logs[-1].record(EventKind.ARRIVED, request.id, prompt_tokens=len(request.prompt_ids))
    run_static(None, ours, logs[0], cost=lambda rows: 1.0)
    record_batch(logs[1], theirs, [[0, 0, 5, 5], [0, 0, 0, 0]], times_s=[0.0, 1.0, 2.0, 3.0, 4.0])
    assert list(logs[0]) == list(logs[1])
    assert [r.tokens for r in ours] == [r.tokens for r in theirs]
    assert [r.num_computed for r in ours] == [r.num_computed for r in theirs]


def test_the_loop_serves_in_turn_and_says_what_the_engine_says(small_folder):
    llm = LLM(small_folder, config=FLOAT64)
    params = [SamplingParams(max_tokens=n, temperature=0.8, seed=n, stop="q") for n in (5, 9)]
    params.append(SamplingParams(max_tokens=3, logit_bias={256: 1e5}, seed=0))  # an end token of the model
    wanted = llm.generate(["first", "second", "é"], params)
    requests = [Request(i, llm.tokenizer.encode(text), params[i]) for i, text in enumerate(("first", "second", "é"))]
    log = EventLog(RealClock())
    progress = list(serve_in_turn(llm.model, requests, log, llm.tokenizer.incremental, batch_tokens=3))
    for i, output in enumerate(wanted):
        mine = [one for one in progress if one.request.id == i]
        assert tuple(t for one in mine for t in one.token_ids) == output.token_ids
        assert "".join(one.text for one in mine) == output.text
        assert [one.finish_reason for one in mine] == [None] * (len(mine) - 1) + [output.finish_reason]
    assert [request.finish_reason for request in requests] == [output.finish_reason for output in wanted]
    assert wanted[2].finish_reason == "stop"
    lives = list(request_metrics(log).values())
    assert lives[0].finished <= lives[1].admitted and lives[1].finished <= lives[2].admitted
    assert lives[2].arrived <= lives[0].first_token and all(life.finished is not None for life in lives)


def test_every_contender_has_its_turn_in_every_round():
    turns = []
    serves = {name: lambda requests, name=name: turns.append((name, requests)) for name in "ab"}
    counted = [name for name, *_ in run_rounds(serves, lambda: ["fresh"], 2)]
    assert turns == [("a", ["fresh"]), ("b", ["fresh"])] * 3 and counted == ["a", "b"] * 2


@pytest.fixture(scope="module")
def served(small_folder):
    """Four requests served by our three contenders, in float64, in static batches of two."""
    return bench_serving(small_folder, 4, batch_size=2, rounds=2, config=FLOAT64, **SHORT)


def test_the_contenders_choose_the_same_tokens_and_count_what_they_did(served):
    workload = bench_workload(4, *SHORT.values(), ByteTokenizer())
    prompts, outputs = ([getattr(a, name) for a in workload] for name in ("prompt_tokens", "output_tokens"))
    assert (served.prompt_tokens, served.output_tokens) == (sum(prompts), sum(outputs))
    naive, static, continuous = served.results
    assert [r.name for r in served.results] == ["naive", "static", "continuous"]
    assert [r.num_same for r in served.results] == [4, 4, 4]
    assert all(summary(log).completion_tokens == sum(outputs) for log in served.logs.values())
    assert (naive.num_steps, naive.padded_share, continuous.padded_share) == (sum(outputs), 0, 0)
    longest = [max(outputs[:2]), max(outputs[2:])]
    assert static.num_steps == sum(longest)
    positions = 2 * (max(prompts[:2]) + max(prompts[2:]) + sum(longest) - 2)
    useful = sum(prompts) + sum(outputs) - 4
    assert static.padded_share == pytest.approx(1 - useful / positions)
    admitted = [event for event in served.logs["continuous"] if event.kind is EventKind.ADMITTED]
    assert [event.data["cached_tokens"] for event in admitted] == [0] * 4, "found what an earlier round computed"
    assert continuous.num_steps == max(outputs), "all prompts fit into the first step"


def test_ratios_are_medians_within_a_round_and_the_table_shows_them(served):
    for result in served.results:
        assert result.ratios.keys() == {"naive"} and result.ratios["naive"] > 0
        assert result.speeds.tokens_per_s > 0 and result.speeds.ttft_p99_s >= result.speeds.ttft_p50_s > 0
    assert served.results[0].ratios["naive"] == 1
    text = table(served)
    assert "static batches of 2; steps of the engine up to" in text
    assert "medians of 2 rounds" in text and "float64" in text
    assert f"{served.results[2].ratios['naive']:.2f} x" in text and "other tokens" not in text


def test_transformers_serves_the_same_requests_left_padded(capsys):
    """The shipped model in float32: the peer's tokens, cut to what was asked for, are ours."""
    serves = contenders(shipped_checkpoint(), EngineConfig(), batch_size=2, against="transformers")
    workload = bench_workload(3, (5, 30), (4, 10), ByteTokenizer())
    ours, theirs = requests_of(workload), requests_of(workload)
    ours_log, theirs_log = serves["static"](ours), serves["transformers"](theirs)
    assert [r.output_ids for r in theirs] == [r.output_ids for r in ours]
    assert [len(r.output_ids) for r in theirs] == [a.output_tokens for a in workload]
    assert [(s.num_rows, s.num_tokens, s.num_padded) for s in steps(theirs_log)] == [
        (s.num_rows, s.num_tokens, s.num_padded) for s in steps(ours_log)
    ]
    lives = request_metrics(theirs_log)
    assert lives[0].ttft == lives[1].ttft < lives[2].ttft and lives[0].finished == lives[1].finished
    assert speeds_of(theirs_log).decode_tokens_per_s > 0


def test_end_tokens_end_nothing_for_the_peer_either(small_folder, tmp_path):
    usual = bench_decode(small_folder, num_tokens=5, rounds=1)[0].token_ids
    shutil.copytree(small_folder, folder := tmp_path / "ends_at_once")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [usual[1]]}))
    results = bench_decode(folder, num_tokens=5, rounds=1, against="transformers")
    assert [r.token_ids for r in results] == [usual] * 3


def test_a_peer_that_is_not_installed_is_named(small_folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingRequirement, match="transformers"):
        bench_serving(small_folder, 2, against="transformers", **SHORT)


def test_serve_prints_json_and_writes_trace_and_timeline(small_folder, tmp_path, capsys):
    trace, picture = tmp_path / "trace.json", tmp_path / "timeline.png"
    command = ["bench", "--model", str(small_folder), "--requests", "3", "--rounds", "1", "--json"]
    command += ["--prompt-tokens", "4", "20", "--output-tokens", "2", "5"]
    assert main([*command, "--trace", str(trace), "--timeline", str(picture)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["num_requests"], told["batch_size"], told["rounds"], told["dtype"]) == (3, 3, 1, "float32")
    assert [set(r) for r in told["results"]] == [
        {"name", "speeds", "ratios", "num_steps", "padded_share", "num_same"}] * 3  # fmt: skip
    assert {e["name"] for e in json.loads(trace.read_text())["traceEvents"]} >= {"prefill", "decode"}
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main([*command, "--trace", str(tmp_path / "no" / "trace.json")]) == 2
    assert main(["bench", "--max-tokens", "5"]) == 2 and main(["bench", "--threads", "0"]) == 2
    assert "--max-tokens is 5; it must be left out of bench serve" in capsys.readouterr().err


def test_decode_reports_a_ratio_against_its_peer(small_folder, capsys):
    command = ["bench", "decode", "--model", str(small_folder), "--max-tokens", "6", "--rounds", "1", "--json"]
    assert main([*command, "--against", "transformers"]) == 0
    naive, engine, peer = json.loads(capsys.readouterr().out)
    assert (naive["name"], engine["name"], peer["name"], peer["ratio"]) == ("naive", "continuous", "transformers", 1)
    assert naive["ratio"] == pytest.approx(naive["tokens_per_s"] / peer["tokens_per_s"])
    assert naive["token_ids"] == engine["token_ids"] == peer["token_ids"] and len(naive["token_ids"]) == 6
    alone = bench_decode(small_folder, num_tokens=3, rounds=1)
    assert [r.ratio for r in alone if r.name == "naive"] == [1] and "against naive" in decode_table(alone)
    assert main(["bench", "decode", "--max-tokens", "1"]) == 2


def test_the_engine_without_a_model_keeps_its_books(small_folder, capsys):
    results = bench_bookkeeping(small_folder, 3, pools=((12, 4), (500, 4), (500, 100)), num_steps=30, rounds=1)
    assert [(r.num_pages, r.pages_held, r.context_tokens, r.prefix_cache) for r in results] == [
        (*counts, is_on) for counts in ((12, 3 * 3, 34), (500, 3 * 3, 34), (500, 3 * 9, 130)) for is_on in (True, False)
    ]
    assert all(r.num_running == 3 and 0 < r.before_ms < r.step_ms and r.after_ms > 0 for r in results)
    with pytest.raises(InvalidValue, match="num_pages is 8; it must be at least 9, for 3 requests"):
        bench_bookkeeping(small_folder, 3, pools=((8, 4),), num_steps=30)
    assert main(["bench", "engine", "--requests", "2", "--rounds", "1"]) == 0
    out = capsys.readouterr().out
    assert "a decode step of 2 requests" in out and out.count("100,000") == 4 and out.count("kept") == 4
    assert main(["bench", "engine", "--against", "transformers"]) == 2
