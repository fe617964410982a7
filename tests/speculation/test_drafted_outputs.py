"""What comes out with drafts is what comes out without: where it ends, its text, its pieces, its scores, its usage."""

from __future__ import annotations

import pytest
import torch
from faulty_drafts import ConstantScorer, KnowsTheAnswer, acceptance, constant_engine
from scripted_drafts import verified
from small_llm import check_same, small_llm, write_small

from minserve import choosing
from minserve.events import EventKind
from minserve.request import Request, SamplingParams
from minserve.sampling import penalized

pytestmark = pytest.mark.usefixtures("shapes_unchecked")
PROMPTS = ("def f", "xyzxyzxyz", "q")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_small(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def plain(folder):
    return small_llm(folder, "none")


@pytest.fixture(scope="module")
def drafted(folder, plain):
    """The same model with drafters of several kinds, which know or do not know the greedy answers."""
    knows = {name: KnowsTheAnswer([], (9,), spoilt) for name, spoilt in (("knows", 0), ("half", 2), ("most", 5))}
    for prompt in PROMPTS:
        (output,) = plain.generate(prompt, SamplingParams(max_tokens=40, ignore_eos=True))
        for drafter in knows.values():
            drafter.answers.append([*prompt.encode(), *output.token_ids])
    return {name: small_llm(folder, draft) for name, draft in (knows | {"mtp": "mtp", "ngram": "ngram"}).items()}


def check_all_same(plain, drafted, prompts, params) -> list:
    """Fail unless all give the same; the outputs."""
    wanted = plain.generate(prompts, params)
    for llm in drafted.values():
        for found, right in zip(llm.generate(prompts, params), wanted, strict=True):
            check_same(found, right)
    return wanted


@pytest.mark.parametrize("max_tokens", [1, 2, 5, 6, 11])
def test_the_limit_inside_an_accepted_run(plain, drafted, max_tokens):  # fault E1
    outputs = check_all_same(plain, drafted, PROMPTS, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    assert {(len(output.token_ids), output.finish_reason) for output in outputs} == {(max_tokens, "length")}


@pytest.mark.parametrize("at", [0, 1, 4, 5, 9])
@pytest.mark.parametrize("max_tokens", [6, 20])
def test_a_stop_token_inside_an_accepted_run(plain, drafted, at, max_tokens):  # fault E1
    (whole,) = plain.generate(PROMPTS[0], SamplingParams(max_tokens=30, ignore_eos=True))
    stop, some = whole.token_ids[at], {name: drafted[name] for name in ("knows", "most", "mtp")}
    params = SamplingParams(max_tokens=max_tokens, stop_token_ids=[stop], logprobs=2)
    (output,) = check_all_same(plain, some, PROMPTS[0], params)
    assert output.finish_reason == ("stop" if stop in whole.token_ids[:max_tokens] else "length")


@pytest.mark.parametrize("at", [0, 3, 4, 8])
@pytest.mark.parametrize("length", [1, 4])
def test_a_stop_string_inside_an_accepted_run(plain, drafted, at, length):  # fault E1
    (whole,) = plain.generate(PROMPTS[0], SamplingParams(max_tokens=30, ignore_eos=True))
    stop, some = whole.text[at : at + length], {name: drafted[name] for name in ("knows", "most", "mtp")}
    (output,) = check_all_same(plain, some, PROMPTS[0], SamplingParams(max_tokens=20, stop=stop, ignore_eos=True))
    assert output.text == whole.text[: whole.text.index(stop)] and output.finish_reason == "stop"


@pytest.mark.parametrize("name", ["knows", "half", "mtp"])
@pytest.mark.parametrize("stop", [(), slice(7, 10), slice(3, 4)], ids=str)
def test_pieces_are_the_output(plain, drafted, name, stop):
    (whole,) = plain.generate(PROMPTS[1], SamplingParams(max_tokens=30, ignore_eos=True))
    stop = whole.text[stop] if stop else ()
    params = SamplingParams(max_tokens=17, stop=stop, logprobs=1, ignore_eos=True)
    (wanted,) = plain.generate(PROMPTS[1], params)
    pieces = [*drafted[name].stream(PROMPTS[1], params)]
    check_same(pieces[-1].output, wanted)
    assert "".join(piece.text for piece in pieces) == wanted.text
    assert tuple(token for piece in pieces for token in piece.token_ids) == wanted.token_ids
    assert name != "knows" or max(len(piece.token_ids) for piece in pieces) > 2
    assert pieces[-1].output.usage.completion_tokens == len(wanted.token_ids)


def test_usage_counts_drafts_and_the_log_does(drafted):
    """Each step gives the drafts it keeps and a token more, unless the output ends among them."""
    for llm in drafted.values():
        number = llm._num_requests
        for output in llm.generate(PROMPTS, SamplingParams(max_tokens=21, ignore_eos=True)):
            events = llm.log.of(number)
            kinds, total, number = [event.kind for event in events], [0, 0], number + 1
            for at, event in enumerate(events):
                if event.kind is EventKind.DRAFTS:
                    assert kinds[at - 1] is EventKind.SLICE and kinds[at + 1] is EventKind.TOKENS
                    assert events[at + 1].data["count"] == event.data["accepted"] + 1
                    total = [total[0] + event.data["drafted"], total[1] + event.data["accepted"]]
            assert [output.usage.drafted_tokens, output.usage.accepted_tokens] == total
            assert total[1] + kinds.count(EventKind.TOKENS) == output.usage.completion_tokens == 21
    output = drafted["knows"].generate(PROMPTS[0], SamplingParams(max_tokens=21, ignore_eos=True))[0]
    assert output.usage.drafted_tokens == output.usage.accepted_tokens == 16 and "16 of 16 drafts" in output.explain()


def test_drafts_behind_a_stop_are_not_counted_as_accepted(plain, drafted):
    (whole,) = plain.generate(PROMPTS[0], SamplingParams(max_tokens=30, ignore_eos=True))
    at = next(i for i in range(2, 12) if whole.token_ids.index(whole.token_ids[i]) == i)
    (output,) = drafted["knows"].generate(
        PROMPTS[0], SamplingParams(max_tokens=30, stop_token_ids=[whole.token_ids[at]])
    )
    steps = verified(drafted["knows"].engine, drafted["knows"]._num_requests - 1)
    assert [drafted for drafted, _ in steps] == [4] * len(steps)
    assert (
        output.usage.accepted_tokens
        == sum(accepted for _, accepted in steps)
        <= at
        == output.usage.completion_tokens - 1
    )
    assert 1 + sum(accepted + 1 for _, accepted in steps) - output.usage.completion_tokens in (0, 1)


@pytest.mark.parametrize("params", [
    {"presence_penalty": 1.5}, {"frequency_penalty": 1.2}, {"repetition_penalty": 1.7}, {"logit_bias": {100: 30.0}},
    {"logit_bias": {100: 8.0, 110: 8.0}, "frequency_penalty": 2.0, "repetition_penalty": 1.2},
], ids=str)  # fmt: skip
def test_penalties_and_biases(folder, plain, params):
    params = SamplingParams(max_tokens=24, ignore_eos=True, logprobs=2, **params)
    answers = [[*p.encode(), *o.token_ids] for p, o in zip(PROMPTS, plain.generate(PROMPTS, params), strict=True)]
    drafters = (KnowsTheAnswer(answers, (9,)), KnowsTheAnswer(answers, (9,), spoilt=4), "mtp")
    check_all_same(plain, {number: small_llm(folder, draft) for number, draft in enumerate(drafters)}, PROMPTS, params)


FLAT = [0.24, 0.22, 0.2, 0.18, 0.16]
PENALTIES = (
    {"presence_penalty": 0.5},
    {"frequency_penalty": 0.2},
    {"repetition_penalty": 1.3},
    {"logit_bias": {3: 1.0}},
)


def flat_outputs(draft, params, temperature) -> tuple[list[list[int]], float]:
    """Outputs of a model that says the same each time, so that penalties decide; how many drafts were accepted."""
    engine = constant_engine(FLAT, draft, draft_tokens=4, most=4)
    params = SamplingParams(max_tokens=30, temperature=temperature, **params)
    requests = [Request(i, [i, 4], params, i) for i in range(4)]
    for one in requests:
        engine.add(one)
    while engine.has_work:
        engine.step()
    return [one.output_ids for one in requests], acceptance(engine) if verified(engine) else 0.0


@pytest.mark.parametrize("params", PENALTIES, ids=str)
def test_drafts_before_a_row_count_as_output(monkeypatch, params):
    """In verification and in drafting alike: so a drafter that is the model is always right."""
    wanted, _ = flat_outputs("none", params, 0.0)
    assert flat_outputs(ConstantScorer(FLAT), params, 0.0) == (wanted, 1.0)
    assert flat_outputs(ConstantScorer(FLAT), params, 1.0)[1] == 1.0
    assert flat_outputs("ngram", params, 0.0)[0] == wanted
    monkeypatch.setattr(choosing, "penalized", lambda logits, requests, guesses: penalized(logits, requests))
    is_seen = flat_outputs(ConstantScorer(FLAT), params, 0.0)[0] != wanted
    assert is_seen == ("logit_bias" not in params), "a test that could not see it would be worth nothing"


def test_scores_of_the_prompt(plain, drafted):
    params = SamplingParams(max_tokens=10, prompt_logprobs=3, logprobs=3, ignore_eos=True)
    check_all_same(plain, drafted, PROMPTS, params)


@pytest.mark.parametrize("name", ["knows", "mtp", "ngram"])
def test_several_outputs_of_a_prompt(plain, drafted, name):
    """Each is that of a request with its seed; greedy ones are the plain one."""
    greedy = drafted[name].generate(PROMPTS[1], SamplingParams(max_tokens=15, n=3, ignore_eos=True))
    (wanted,) = plain.generate(PROMPTS[1], SamplingParams(max_tokens=15, ignore_eos=True))
    assert [output.token_ids for output in greedy] == [wanted.token_ids] * 3
    assert all(output.usage.drafted_tokens for output in greedy) == (name != "ngram")
    assert [output.index for output in greedy] == [0, 1, 2]
    params = {"max_tokens": 15, "temperature": 0.8, "top_p": 0.9, "ignore_eos": True}
    together = drafted[name].generate(PROMPTS[1], SamplingParams(n=3, seed=7, **params))
    apart = [drafted[name].generate(PROMPTS[1], SamplingParams(seed=7 + i, **params))[0] for i in range(3)]
    assert [output.token_ids for output in together] == [output.token_ids for output in apart]
    assert len({output.token_ids for output in together}) > 1


def test_the_same_seed_draws_the_same_beside_others(drafted):
    params = {"max_tokens": 15, "temperature": 1.0, "ignore_eos": True}
    for llm in drafted.values():
        (alone,) = llm.generate(PROMPTS[0], SamplingParams(seed=3, **params))
        others = [SamplingParams(seed=None, **params), SamplingParams(max_tokens=9), SamplingParams(seed=4, **params)]
        beside = llm.generate([*PROMPTS, PROMPTS[0]], [*others, SamplingParams(seed=3, **params)])
        assert beside[-1].token_ids == alone.token_ids and beside[-1].usage == alone.usage


def test_float32_gives_the_same_tokens_here(folder):
    outputs = [
        small_llm(folder, draft, dtype="float32").generate(PROMPTS, SamplingParams(max_tokens=20, ignore_eos=True))
        for draft in ("none", "mtp", "ngram")
    ]
    assert len({tuple(output.token_ids for output in of_draft) for of_draft in outputs}) == 1
    assert torch.tensor([o.usage.drafted_tokens for o in outputs[1]]).min() > 0
