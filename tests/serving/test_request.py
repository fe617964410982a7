"""What may be asked, where a request stands, and what comes back."""

import copy
import dataclasses
import pickle

import numpy as np
import pytest
import torch

from minserve.errors import InvalidValue, PromptTooLong
from minserve.request import FinishReason, Output, Request, SamplingParams, Status, Timings, Usage, check_prompt

NAN, INF = float("nan"), float("inf")

BAD = [
    *[("max_tokens", bad) for bad in (-1, 0, 1.0, True, "5", None)],  # 0 alone: fault D9
    *[("temperature", bad) for bad in (-0.1, NAN, INF, -INF, True, "1", None, 10**400)],
    *[("top_k", bad) for bad in (-1, 2.0, False)],
    *[("top_p", bad) for bad in (0, 0.0, -0.5, 1.01, NAN, True)],
    *[("min_p", bad) for bad in (-0.01, 1.01, NAN, True)],
    *[("seed", bad) for bad in (-1, 2**64, 1.5, True, "1")],
    *[("n", bad) for bad in (0, -1, 1.0, True)],
    *[("logprobs", bad) for bad in (-1, True, 1.0)],
    *[("prompt_logprobs", bad) for bad in (-1, True, 1.0)],
    *[("presence_penalty", bad) for bad in (-2.1, 2.1, NAN, INF)],
    *[("frequency_penalty", bad) for bad in (-2.1, 2.1, NAN, INF)],
    *[("repetition_penalty", bad) for bad in (0, -1, NAN, INF, 1e-30, 1e30)],
    *[("ignore_eos", bad) for bad in (0, 1, None, "no")],
    *[("priority", bad) for bad in (0.5, None, True)],
    *[("cache_salt", bad) for bad in ("", 5, b"x")],
    *[("stop", bad) for bad in (None, 5, [""], "", ["a", 3], ["x"] * 33, b"x", {"a": 1})],
    *[("stop_token_ids", bad) for bad in ([-1], ["AI"], [1.0], [True], "12", 5, [0] * 1025)],
    # fault I8
    *[("logit_bias", bad) for bad in ({-1: 1.0}, {"AI": 1.0}, {True: 1}, {1.5: 1}, {1: NAN}, {1: INF}, {1: "x"})],
    *[("logit_bias", bad) for bad in ({1: 1e300}, [(1, 2)], None, dict.fromkeys(range(2000), 1.0))],
]


@pytest.mark.parametrize("field, value", BAD, ids=lambda x: repr(x)[:24])
def test_a_bad_value_is_an_error_that_names_the_field(field, value):
    with pytest.raises(ValueError) as caught:
        SamplingParams(**{field: value})
    assert isinstance(caught.value, InvalidValue)
    assert caught.value.field.startswith(field)
    assert "it must be" in str(caught.value) and field in str(caught.value)


def test_bounds_themselves_are_accepted():
    SamplingParams(max_tokens=1, temperature=0, top_k=0, top_p=1, min_p=0, seed=0, n=1, logprobs=0, prompt_logprobs=0)
    SamplingParams(temperature=1e300, top_k=10**30, top_p=5e-324, min_p=1, seed=2**64 - 1, presence_penalty=-2)
    SamplingParams(frequency_penalty=2, repetition_penalty=0.01, priority=-5, stop=["x"] * 32, stop_token_ids=[0])
    SamplingParams(logit_bias={0: -1e6, 1: 1e6}, cache_salt="a")
    assert SamplingParams(temperature=9.9e-6).is_greedy and not SamplingParams(temperature=1e-5).is_greedy


def test_no_tokens_may_be_asked_for_only_to_score_the_prompt():  # fault D9
    assert SamplingParams(max_tokens=0, prompt_logprobs=0).max_tokens == 0
    assert SamplingParams(max_tokens=1).max_tokens == 1


def test_numbers_of_other_libraries_become_plain_ones():
    params = SamplingParams(max_tokens=np.int64(5), temperature=np.float32(0.5), top_p=1, logit_bias={np.int32(3): 1})
    assert [type(x) for x in (params.max_tokens, params.temperature, params.top_p)] == [int, float, float]
    assert params.logit_bias == {3: 1.0} and type(next(iter(params.logit_bias))) is int


def test_params_cannot_be_changed_from_outside_and_travel():
    bias, stops = {3: 1.0}, ["a"]
    params = SamplingParams(logit_bias=bias, stop=stops)
    bias[-1], stops[0] = 2.0, ""
    assert params.logit_bias == {3: 1.0} and params.stop == ("a",)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_k = -1
    assert pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == params
    assert hash(params) == hash(dataclasses.replace(params))
    assert dataclasses.asdict(params)["stop"] == ("a",)


@pytest.mark.parametrize(
    "params",
    [{"logit_bias": {264: 1.0}}, {"logit_bias": {265: 1.0}}, {"stop_token_ids": [1, 264]}, {"logprobs": 265}],
)
def test_ids_beyond_the_vocabulary_are_refused_when_it_is_known(params):  # fault I8
    with pytest.raises(InvalidValue, match=next(iter(params))):
        SamplingParams(**params).check_vocab(264)
    SamplingParams(**params).check_vocab(266)


@pytest.mark.parametrize("prompt", [[], [264], [-1], [1, 2.0], [True], ["AI"], "text", None, {1: 2}, b"ab"])
def test_a_bad_prompt_is_a_named_error(prompt):
    with pytest.raises(InvalidValue, match="prompt_ids"):
        check_prompt(prompt, SamplingParams(), vocab_size=264, max_context=1000)


def test_prompt_and_output_must_fit_the_context():  # fault D9
    for length, params, fits in [
        (9, SamplingParams(max_tokens=1), True),
        (10, SamplingParams(max_tokens=1), False),
        (9, SamplingParams(max_tokens=2), False),
        (10, SamplingParams(max_tokens=0, prompt_logprobs=1), True),
        (11, SamplingParams(max_tokens=0, prompt_logprobs=1), False),
    ]:
        if fits:
            check_prompt([1] * length, params, vocab_size=264, max_context=10)
        else:
            with pytest.raises(PromptTooLong, match="at most 10 tokens"):
                check_prompt([1] * length, params, vocab_size=264, max_context=10)


def test_prompts_may_be_arrays():
    for prompt in (np.arange(3), torch.arange(3), (0, 1, 2)):
        check_prompt(prompt, SamplingParams(), vocab_size=3, max_context=1000)
        assert Request("a", prompt, SamplingParams(seed=0)).tokens == [0, 1, 2]


def test_a_decoding_request_has_one_token_left_to_run():
    request = Request(1, [5, 6, 7], SamplingParams(seed=3))
    request.commit(2)
    assert (request.num_computed, request.num_committed) == (2, 3)
    request.commit(3, [8])
    for new in ([9], [10, 11, 12], [13, 14]):  # one token, and accepted drafts with a bonus
        request.commit(request.num_committed + len(new) - 1, new)
        assert request.num_computed == request.num_committed - 1
    assert request.output_ids == list(range(8, 15)) and request.prompt_ids == (5, 6, 7)
    request.restart()
    assert request.num_computed == 0 and request.status is Status.WAITING and request.num_committed == 10
    request.commit(10, [15])  # the same tokens again, in one slice
    assert request.tokens == list(range(5, 16))


@pytest.mark.parametrize("num_cached", [-1, *range(6)])
def test_cached_tokens_count_as_computed_and_one_is_left_to_run(num_cached):  # fault A3
    request = Request(1, [5, 6, 7, 8], SamplingParams(seed=3))
    if 0 <= num_cached < 4:
        request.reuse(num_cached)
        assert (request.num_computed, request.tokens) == (num_cached, [5, 6, 7, 8])
        request.commit(4, [9])
    else:
        with pytest.raises(InvalidValue, match=f"num_tokens is {num_cached}; it must be from 0 to 3 for request 1"):
            request.reuse(num_cached)
        assert request.num_computed == 0


def test_what_is_computed_already_is_not_taken_from_a_cache_as_well():
    request = Request(1, [5, 6, 7, 8], SamplingParams(seed=3))
    request.commit(2)
    for num_cached in (0, 2, 3):
        with pytest.raises(InvalidValue, match="num_tokens"):
            request.reuse(num_cached)
    request.commit(4, [9])
    request.restart()
    with pytest.raises(InvalidValue, match="from 0 to 4"):
        request.reuse(5)
    request.reuse(4)  # its own output, found again after a preemption
    request.commit(5, [10])
    assert request.output_ids == [9, 10]


@pytest.mark.parametrize("num_computed, new_ids", [(1, []), (5, []), (2, [9]), (3, [9]), (5, [9]), (6, [9, 9])])
def test_counts_that_cannot_be_are_refused(num_computed, new_ids):
    request = Request("a", [5, 6, 7], SamplingParams(seed=3))
    request.commit(3, [8])
    request.num_computed = 2
    before = list(request.tokens)
    with pytest.raises(InvalidValue, match="num_computed"):
        request.commit(num_computed, new_ids)
    assert request.tokens == before and request.num_computed == 2


def test_each_output_of_one_prompt_draws_as_its_own_seed():
    requests = [Request("a", [1], SamplingParams(seed=2**64 - 1, n=3), index=i) for i in range(3)]
    assert [request.seed for request in requests] == [2**64 - 1, 0, 1]
    assert Request("a", [1], SamplingParams(), seed=9).seed == 9
    with pytest.raises(InvalidValue, match="seed"):
        Request("a", [1], SamplingParams())


def test_the_first_reason_to_finish_stands():
    request = Request("a", [1], SamplingParams(seed=0))
    request.finish(FinishReason.STOP)
    request.finish(FinishReason.ABORT)
    assert request.finish_reason is FinishReason.STOP and request.finish_reason == "stop"
    assert request.status is Status.FINISHED


def test_explain_shows_where_the_time_went():
    times = Timings(arrived=1.0, admitted=1.25, first_token=1.5, finished=2.0, ttft=0.5, tpot=0.125)
    table = Output("abc", (1, 2, 3, 4, 5), FinishReason.STOP, usage=Usage(10, 4, 5, 6, 3), timings=times).explain()
    lines = [line.split() for line in table.splitlines()]
    assert lines[1][:4] == ["queued", "250.0", "ms", "25%"]
    assert lines[2][:5] == ["prefill", "250.0", "ms", "25%", "6"]
    assert lines[3][:5] == ["decode", "500.0", "ms", "50%", "4"]
    assert lines[4][:4] == ["total", "1000.0", "ms", "100%"]
    assert "125.00 ms each; 3 of 6 drafts accepted" in table and "4 of 10 prompt tokens cached" in table


def test_explain_of_a_request_that_never_ran():
    aborted = Output("", (), FinishReason.ABORT, timings=Timings(arrived=1.0, finished=1.0)).explain()
    lines = [line.split() for line in aborted.splitlines()]
    assert [line[1:3] for line in lines[1:4]] == [["-", "-"]] * 3  # no phase happened
    assert lines[4][1:4] == ["0.0", "ms", "-"] and lines[4][-1] == "abort"  # a share of nothing is nothing
