"""LLM: what comes back, in which order, and what happens to bad input."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from minserve import LLM, EngineConfig, SamplingParams
from minserve.engine import EngineStuck
from minserve.errors import CheckpointError, InvalidValue, MissingRequirement, PromptTooLong
from minserve.events import EventKind
from minserve.metrics import request_metrics
from minserve.model.naive import NaiveMemory
from minserve.model.step import Step
from minserve.request import Request

SAMPLED = SamplingParams(max_tokens=12, temperature=0.8, seed=5, ignore_eos=True)


def test_outputs_come_in_order_for_texts_and_token_ids(llm):
    together = llm.generate(["abc", list(b"xyz"), "é"], SAMPLED)
    alone = [llm.generate(prompt, SAMPLED)[0] for prompt in ("abc", "xyz", "é")]
    assert [o.token_ids for o in together] == [o.token_ids for o in alone]
    assert [o.usage.prompt_tokens for o in together] == [3, 3, 2]
    assert all(o.usage.completion_tokens == 12 and o.finish_reason == "length" for o in together)


def test_params_one_per_prompt(llm):
    outputs = llm.generate(["a", "b"], [replace(SAMPLED, max_tokens=3), replace(SAMPLED, max_tokens=7)])
    assert [len(o.token_ids) for o in outputs] == [3, 7]
    with pytest.raises(InvalidValue, match="params is '1 entries'"):
        llm.generate(["a", "b"], [SAMPLED])


def test_streamed_pieces_are_the_unstreamed_text_and_usage(llm):  # TEXT
    whole = llm.generate("some text", replace(SAMPLED, stop=("q",)))[0]
    pieces = list(llm.stream("some text", replace(SAMPLED, stop=("q",))))
    last = pieces[-1].output
    assert "".join(p.text for p in pieces) == whole.text == last.text
    assert tuple(t for p in pieces for t in p.token_ids) == whole.token_ids
    assert last.usage == whole.usage and [p.output for p in pieces[:-1]] == [None] * (len(pieces) - 1)


def test_n_outputs_are_those_of_the_next_seeds(llm):
    three = llm.generate("text", replace(SAMPLED, n=3))
    apart = [llm.generate("text", replace(SAMPLED, seed=5 + i))[0] for i in range(3)]
    assert [o.token_ids for o in three] == [o.token_ids for o in apart]
    assert [o.index for o in three] == [0, 1, 2]


def test_unseeded_requests_repeat_with_the_engine_seed_and_differ_among_each_other(small_folder):
    params = SamplingParams(max_tokens=20, temperature=1.0, ignore_eos=True)
    runs = [LLM(small_folder, config=EngineConfig(seed=s)).generate(["a", "a"], params) for s in (1, 1, 2)]
    ids = [[o.token_ids for o in run] for run in runs]
    assert ids[0] == ids[1] and ids[0] != ids[2] and ids[0][0] != ids[0][1]


@pytest.mark.parametrize("batch_tokens", [1, 2, 3, 7, 64])
def test_the_slicing_of_the_prompt_changes_nothing(small_folder, batch_tokens):
    llm = LLM(small_folder, config=EngineConfig(dtype="float64", batch_tokens=batch_tokens))
    params = replace(SAMPLED, prompt_logprobs=2, logprobs=1)
    whole = LLM(small_folder, config=EngineConfig(dtype="float64")).generate("a longer prompt.", params)[0]
    sliced = llm.generate("a longer prompt.", params)[0]
    assert sliced.token_ids == whole.token_ids
    assert len(sliced.prompt_logprobs) == 16 and sliced.prompt_logprobs[0] is None
    for a, b in zip(
        sliced.prompt_logprobs[1:] + sliced.logprobs, whole.prompt_logprobs[1:] + whole.logprobs, strict=True
    ):
        assert a.keys() == b.keys() and all(math.isclose(a[k], b[k], abs_tol=1e-9) for k in a)


def test_prompt_logprobs_are_the_models_own(llm):
    ids = list(b"hello")
    scored = llm.generate([ids], SamplingParams(max_tokens=1, prompt_logprobs=0))[0].prompt_logprobs
    memory = NaiveMemory(llm.model.config, 5, torch.float64)
    with torch.inference_mode():
        logits = llm.model(Step.one_row(ids, 0, every_logit=True), memory).logits.log_softmax(-1)
    for i in range(1, 5):
        assert scored[i][ids[i]] == pytest.approx(float(logits[i - 1, ids[i]]), abs=1e-9)


def test_zero_tokens_score_the_prompt_only_and_one_gives_one(llm):  # fault D9
    scored = llm.generate("abc", SamplingParams(max_tokens=0, prompt_logprobs=1))[0]
    assert scored.token_ids == () and scored.text == "" and scored.finish_reason == "length"
    assert len(scored.prompt_logprobs) == 3 and scored.usage.completion_tokens == 0
    assert len(llm.generate("abc", SamplingParams(max_tokens=1, ignore_eos=True))[0].token_ids) == 1
    for length in (255, 256):
        with pytest.raises(PromptTooLong) if length == 256 else pytest.raises(StopIteration):
            llm.generate([[1] * length], SamplingParams(max_tokens=1))
            raise StopIteration


def test_end_tokens_end_and_ignore_eos_goes_on(llm):
    bias = {256: 1e5}
    ended = llm.generate("abc", SamplingParams(max_tokens=9, logit_bias=bias))[0]
    assert (ended.token_ids, ended.text, ended.finish_reason) == ((256,), "", "stop")
    assert (
        llm.generate("abc", SamplingParams(max_tokens=9, logit_bias=bias, ignore_eos=True))[0].finish_reason == "length"
    )


def test_a_prompt_asked_again_is_cached_and_says_so(llm):
    params = replace(SAMPLED, max_tokens=3)
    first, again, more = (llm.generate("x" * 40 + tail, params)[0] for tail in ("", "", "y" * 20))
    assert [o.usage.cached_tokens for o in (first, again, more)] == [0, 32, 32]  # where the last page begins
    assert again.token_ids == first.token_ids and "32 of 40 prompt tokens cached" in again.explain()
    salted = [llm.generate("x" * 40, replace(params, cache_salt=salt))[0].usage.cached_tokens for salt in "aba"]
    assert salted == [0, 0, 32]  # fault C7


def test_times_come_from_the_log(llm):
    output = llm.generate("abcdefgh", SAMPLED)[0]
    metrics = request_metrics(llm.log)[0]
    assert output.timings.ttft == metrics.ttft > 0 and output.timings.tpot == metrics.tpot > 0
    slices = [(e.data["start"], e.data["stop"], e.data["phase"]) for e in llm.log if e.kind is EventKind.SLICE]
    assert slices[:3] == [(0, 5, "prefill"), (5, 8, "prefill"), (8, 9, "decode")]
    assert "prefill" in output.explain() and "12 tokens out" in output.explain()


def test_a_stream_that_is_left_is_an_abort(llm):
    stream = llm.stream("abc", SAMPLED)
    next(stream)
    stream.close()
    assert [e.data["reason"] for e in llm.log if e.kind is EventKind.FINISHED] == ["abort"]
    assert llm.generate("abc", SAMPLED)[0].finish_reason == "length"


@pytest.mark.parametrize("pieces", [0, 1, 15])
def test_whatever_is_left_of_a_stream_is_aborted(llm, pieces):
    stream = llm.stream("abc", replace(SAMPLED, n=3))
    for _ in range(pieces):
        next(stream)
    stream.close()
    metrics = request_metrics(llm.log)
    assert len(metrics) == (3 if pieces else 0)
    assert all(m.finish_reason in ("length", "abort") for m in metrics.values())
    assert sum(m.finish_reason == "abort" for m in metrics.values()) == {0: 0, 1: 3, 15: 3}[pieces]


def test_steps_by_hand_and_requests_by_hand_harm_no_reader(llm):
    llm.engine.add(Request(0, list(b"abc"), SamplingParams(max_tokens=3, seed=1, ignore_eos=True)))
    with pytest.raises(InvalidValue, match="request.id is 0"):
        llm.generate("abc", SAMPLED)
    assert llm.engine.has_work  # the one added by hand is still served
    while llm.engine.has_work:
        llm.engine.step()
    stream = llm.stream("abc", SAMPLED)
    next(stream)
    while llm.engine.has_work:
        llm.engine.step()
    with pytest.raises(EngineStuck, match="by hand"):
        list(stream)


def test_a_fork_is_told_how_much_it_did_not_compute(llm):
    outputs = llm.generate("abcdef", replace(SAMPLED, n=3))
    assert [output.usage.cached_tokens for output in outputs] == [0, 6, 6]


def test_prompts_may_be_arrays_and_nothing_else_that_is_odd(llm):
    wanted = llm.generate("abc", SAMPLED)[0].token_ids
    ids = np.frombuffer(b"abc", np.uint8)
    for prompts in (ids, torch.tensor(ids.tolist()), list(ids), [ids], [torch.tensor(ids.tolist())], ("abc",)):
        assert llm.generate(prompts, SAMPLED)[0].token_ids == wanted
    assert llm.generate([], SAMPLED) == []
    for prompts in (None, 5, {"a": 1}, {1, 2}, b"abc", [None], [3.5]):
        with pytest.raises(InvalidValue, match="prompt"):
            llm.generate(prompts, SAMPLED)
    for params in ({"max_tokens": 3}, [None]):
        with pytest.raises(InvalidValue, match="params"):
            llm.generate(["abc"], params)
    with pytest.raises(InvalidValue, match="prompt_ids"):
        llm.stream(5)


def test_logits_that_are_no_numbers_end_one_request(llm):
    good = llm.generate("abc", SAMPLED)[0]
    llm.model.model.embed_tokens.weight[ord("!")] = torch.nan
    bad, after = llm.generate(["abc!", "abc"], SAMPLED)
    assert bad.finish_reason == "error" and "logits" in bad.error and bad.token_ids == ()
    scored = llm.generate("abc!", SamplingParams(max_tokens=0, prompt_logprobs=0))[0]
    assert scored.finish_reason == "error" and "prompt" in scored.error
    assert after.finish_reason == "length" and after.token_ids[:3] == good.token_ids[:3]


BAD_PROMPTS = [
    ([""], InvalidValue, "prompt_ids is"),
    ([[]], InvalidValue, "prompt_ids is"),
    ([[1, 264]], InvalidValue, r"prompt_ids\[1\] is 264; it must be an int from 0 to 263"),
    ([[-1]], InvalidValue, r"prompt_ids\[0\] is -1"),
    ([[1, "x"]], InvalidValue, r"prompt_ids\[1\] is 'x'"),
    ([[1] * 250], PromptTooLong, "250 prompt tokens .* max_tokens 12.*at most 256"),
]


@pytest.mark.parametrize("prompts,error,match", BAD_PROMPTS)
def test_a_bad_prompt_is_named_and_nothing_has_run(llm, prompts, error, match):
    with pytest.raises(error, match=match):
        llm.generate(["good", *prompts], SAMPLED)
    assert len(llm.log) == 0
    assert llm.generate("good", SAMPLED)[0].finish_reason == "length"


@pytest.mark.parametrize(
    "field,value", [("temperature", math.nan), ("top_p", 0), ("max_tokens", -1), ("n", 0), ("stop", "")]
)
def test_bad_params_name_field_and_value(field, value):
    with pytest.raises(InvalidValue, match=field):
        SamplingParams(**{field: value})


def test_bad_folders_and_configs_are_named(tmp_path, small_folder):
    with pytest.raises(CheckpointError, match="no-such"):
        LLM(tmp_path / "no-such")
    with pytest.raises(CheckpointError, match="config.json"):
        LLM(tmp_path)
    with pytest.raises(InvalidValue, match="device is 'abacus'"):
        LLM(small_folder, config=EngineConfig(device="abacus"))
    if not torch.cuda.is_available():
        for device in ("cuda", "cuda:9"):
            with pytest.raises(MissingRequirement, match="CUDA"):
                LLM(small_folder, config=EngineConfig(device=device))
    for field, value in (("dtype", "float8"), ("batch_tokens", 0), ("max_context", -1), ("seed", -1)):
        with pytest.raises(InvalidValue, match=field):
            EngineConfig(**{field: value})


def test_a_smaller_context_can_be_asked_for(small_folder):
    llm = LLM(small_folder, config=EngineConfig(max_context=20))
    with pytest.raises(PromptTooLong, match="at most 20"):
        llm.generate("123456789", SAMPLED)
    with pytest.raises(InvalidValue, match="max_context is 257; it must be at most 256"):
        LLM(small_folder, config=EngineConfig(max_context=257))


@pytest.mark.parametrize("place", range(3))
def test_of_several_prompts_the_one_at_fault_is_named(llm, place):
    prompts = ["def area("] * 3
    prompts[place] = "x" * 9000
    with pytest.raises(PromptTooLong, match=rf"^prompts\[{place}\]: prompt_ids is '9000 prompt tokens"):
        llm.generate(prompts, SamplingParams(max_tokens=4))
    assert not llm.engine.has_work
    with pytest.raises(PromptTooLong, match="^prompt_ids is"):
        llm.generate("x" * 9000, SamplingParams(max_tokens=4))


def test_what_was_cached_is_counted_at_the_first_admission_and_not_after_a_preemption(small_folder):
    llm = LLM(small_folder, config=EngineConfig(dtype="float64", page_size=4, num_pages=14, snapshot_every=4))
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    outputs = llm.generate([[1, *range(10, 20)], [2, *range(30, 40)]], params)
    admitted = [event.data["cached_tokens"] for event in llm.log if event.kind is EventKind.ADMITTED]
    assert len(admitted) > 2 and max(admitted) > 0, "one was put back, and found its own tokens"
    assert [output.usage.cached_tokens for output in outputs] == [0, 0]
