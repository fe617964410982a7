"""A draft model says what a fresh run of the context says, whatever it was asked before, and runs no token twice."""

from __future__ import annotations

import random
from itertools import pairwise

import jaxtyping
import pytest
import torch
from asked_drafter import CONFIGS, Asked, bytes_alive, fresh, random_model, text

from minserve import draft_memory, draft_model
from minserve.draft_model import DraftModel
from minserve.errors import InvalidValue
from minserve.llm import shipped_checkpoint
from minserve.model.config import FULL, LINEAR
from minserve.model.hybrid_lm import HybridLM
from minserve.model.naive import NaiveMemory
from minserve.model.step import Step


@pytest.fixture(autouse=True)
def shapes_unchecked(monkeypatch):
    """These are hundreds of short steps. The layers' own tests check shapes, which costs more than a step."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.fixture(params=CONFIGS)
def model(request):
    return random_model(request.param)


@pytest.fixture
def asked(model, monkeypatch):
    return Asked(model, monkeypatch)


# --- what is run


def test_a_context_that_goes_on_costs_its_new_tokens(asked):
    context = text(random.Random(0), 9)
    assert asked(context) == [9]
    assert asked([*context, 1]) == [1]
    assert asked([*context, 1, 2, 3, 4]) == [3]
    assert asked([7]) == [1]
    assert asked([7, 7]) == [1]
    assert asked(tuple([*context, 1, 2, 3, 4, 5])) == [1]


def test_rejected_drafts_leave_nothing_behind(asked):
    context = text(random.Random(1), 12)
    assert asked(context) == [12]
    for rejected_from in (0, 1, 2, 3):
        drafts = [10, 11, 12]
        for draft in range(3):
            assert asked(context + drafts[: draft + 1]) == [1]
        context += [*drafts[:rejected_from], 20 + rejected_from]
        assert asked(context) == [1]


@pytest.mark.parametrize("depth", [1, 4])
def test_50_rounds_of_several_rows(model, monkeypatch, depth):
    """Rows of unequal length; between none and all drafts are accepted; then one token that nobody drafted."""
    asked, draw = Asked(model, monkeypatch, max_drafts=depth), random.Random(depth)
    rows = [text(draw, num) for num in (1, 5, 30)]
    assert asked(*rows) == [36]
    for _ in range(50):
        drafts, kept = [text(draw, depth) for _ in rows], [draw.randrange(depth + 1) for _ in rows]
        for count in range(1, depth):
            contexts = [row + made[:count] for row, made in zip(rows, drafts, strict=True)]
            assert asked(*contexts, compared=draw.randrange(3)) == [3]
        rows = [row + made[:num] + text(draw, 1) for row, made, num in zip(rows, drafts, kept, strict=True)]
        # The last draft is never run as such: where all are accepted, it is new to the drafter.
        assert asked(*rows, compared=draw.randrange(3)) == [sum(2 if num == depth else 1 for num in kept)]
        if draw.random() < 0.2:  # a request ends, and another comes
            place = draw.randrange(3)
            rows[place] = text(draw, draw.randrange(1, 20))
            asked(*rows, compared=place)


@pytest.mark.parametrize("name", ["tiny", "tiny_attention"])
def test_drafting_for_itself_everything_is_accepted(name, monkeypatch):  # fault E12
    model, depth = HybridLM.from_checkpoint(shipped_checkpoint(name), torch.float64), 3
    asked, tokens = Asked(model, monkeypatch), list(b"def area(width, height):\n    return")
    memory, num_verified = NaiveMemory(model.config, len(tokens) + 50 * (depth + 1), torch.float64), 0
    for number in range(50):
        context, asked.forwards = list(tokens), []
        for _ in range(depth):
            context.append(int(asked.drafter.logits([context]).argmax()))
        # The last draft was not run as such, and the token after it was nobody's draft.
        assert asked.forwards == [2 if number else len(tokens), 1, 1]
        with torch.inference_mode():
            step = Step.one_row(context[num_verified:], num_verified, every_logit=True)
            said = model(step, memory).logits.argmax(-1).tolist()
        num_verified = len(context)
        assert said[-depth - 1 : -1] == context[-depth:], "a draft was rejected"
        tokens = [*context, said[-1]]


def test_all_of_the_most_drafts_may_be_rejected(model, monkeypatch):
    asked, context = Asked(model, monkeypatch, max_drafts=4), text(random.Random(5), 10)
    asked(context)
    for token in range(5):
        for num_drafts in (1, 2, 3):
            assert asked(context + [30] * num_drafts) == [1]
        context = [*context, token]
        assert asked(context) == [1]


def test_more_drafts_than_were_reckoned_with_are_right_all_the_same(model, monkeypatch):
    asked, draw = Asked(model, monkeypatch, max_drafts=1), random.Random(6)
    context = text(draw, 10)
    for _ in range(5):
        for num_drafts in range(6):
            assert asked(context + [30] * num_drafts)[0] >= 1
        context += text(draw, 1)


# --- rows that share something


def test_equal_contexts_are_run_once(asked):
    context = text(random.Random(2), 8)
    assert asked(context, context, [1], context) == [9]
    assert asked([*context, 1], [1, 2], [*context, 1]) == [2]


def test_rows_with_one_beginning_go_apart(asked):
    prompt = text(random.Random(3), 30)
    assert asked(prompt) == [30]
    assert asked([*prompt, 1], [*prompt, 2], [*prompt, 3]) == [3]
    assert asked([*prompt, 1, 4], [*prompt, 2, 4], [*prompt, 3, 4]) == [3]
    assert asked([*prompt, 2, 4, 5]) == [1]
    assert asked([*prompt, 3, 9], [*prompt, 1, 9]) == [2]  # both cut, each for itself


@pytest.mark.parametrize("swapped", [False, True])
def test_one_row_keeps_a_draft_and_its_twin_rejects_it(asked, swapped):
    prompt = text(random.Random(4), 6)
    asked(prompt)
    asked([*prompt, 1])
    rows = [[*prompt, 2], [*prompt, 1, 3]]
    assert asked(*(reversed(rows) if swapped else rows)) == [2]
    assert asked([*prompt, 2, 5], [*prompt, 1, 3, 5]) == [2]


def test_a_row_that_is_another_one_s_beginning(asked):
    prompt = text(random.Random(8), 6)
    asked(prompt)
    assert asked([*prompt, 1], [*prompt, 1, 2]) == [3]
    assert asked([*prompt, 1, 3], [*prompt, 1, 2, 3]) == [2]


def test_a_long_text_is_not_cut_for_another_with_its_beginning(model, monkeypatch):
    asked, long = Asked(model, monkeypatch, max_drafts=4), text(random.Random(9), 40)
    asked(long)
    (num_run,) = asked([*long[:20], 1])
    assert num_run == (1 if LINEAR not in model.config.layer_types else 21)  # there is no state after 20 tokens
    assert asked([*long, 2]) == [1]
    assert asked([*long[:20], 1, 2]) == [1]


def test_equal_lengths_and_equal_ends_are_told_apart(asked):
    end = text(random.Random(10), draft_memory.TAIL_TOKENS + 3)
    rows = [[first, *end] for first in (1, 2, 3)]
    asked(*rows)
    for token in range(3):
        rows = [[*row, token] for row in reversed(rows)]
        assert asked(*rows) == [3]


def test_what_was_asked_is_asked_again(asked):
    context = text(random.Random(11), 5)
    for token in range(4):
        context = [*context, token]
        for again in (context, context, context[:-2]):
            assert 1 <= sum(asked(again)) <= len(again)


# --- what is remembered


def test_what_was_used_longest_ago_is_forgotten(model, monkeypatch):
    asked, draw = Asked(model, monkeypatch, max_sequences=2), random.Random(12)
    a, b, c = ([first, *text(draw, 9)] for first in (1, 2, 3))
    asked(a), asked(b)
    assert asked([*a, 1]) == [1]
    assert asked(c) == [10]
    assert asked([*a, 1, 2]) == [1] and asked([*c, 1]) == [1]
    assert asked([*b, 1]) == [11]
    assert asked([*c, 1, 2]) == [1]
    assert asked([*a, 1, 2, 3]) == [13]


def test_more_rows_than_are_remembered(model, monkeypatch):
    asked, draw = Asked(model, monkeypatch, max_sequences=2), random.Random(13)
    rows = [[first, *text(draw, 4)] for first in range(5)]
    assert asked(*rows) == [25]
    rows = [[*row, 7] for row in rows]
    assert asked(*rows) == [2 * 1 + 3 * 6]


def test_what_goes_on_is_found_without_looking_at_every_sequence(model, monkeypatch):
    asked, draw, looked_at = Asked(model, monkeypatch, max_drafts=3), random.Random(15), []
    rows = [[first, *text(draw, 5)] for first in range(8)]
    asked(*rows)
    compare = draft_memory._num_common
    monkeypatch.setattr(draft_memory, "_num_common", lambda a, b: looked_at.append(a) or compare(a, b))
    for kept in (0, 1, 2, 3, 0, 3):
        for num_drafts in (1, 2):
            asked(*(row + [40, 41, 42][:num_drafts] for row in rows))
        rows = [[*row, *[40, 41, 42][:kept], kept] for row in rows]
        asked(*rows)
    assert looked_at == []
    asked([30, 31])
    assert len(looked_at) >= 8


def test_keys_are_seldom_moved(model):
    sequence, places = draft_memory.DraftSequence(model.config, torch.float64, torch.device("cpu")), []
    for num_tokens in range(1, 1025):
        sequence.make_room(num_tokens)
        sequence.tokens += (0,)
        assert all(num_tokens <= slab.shape[1] <= 2 * num_tokens for slab in sequence.keys.values())
        places.append([slab.data_ptr() for slab in (*sequence.keys.values(), *sequence.values.values())])
    assert sum(before != after for before, after in pairwise(places)) <= 10


def test_memory_has_a_bound(model):
    """The layers' sizes, for six sequences of up to 40 tokens with room for twice as many, and three states of each."""
    kinds, before = model.config.layer_types, bytes_alive()
    most = 6 * 8 * (2 * 40 * kinds.count(FULL) * 2 * 2 * 8 + 3 * kinds.count(LINEAR) * (3 * 22 + 2 * 6 * 5))
    drafter, draw, sizes = DraftModel(model, max_sequences=6, max_drafts=3), random.Random(14), []
    rows = [text(draw, 12) for _ in range(4)]
    for step in range(60):
        drafter.logits(rows)
        drafts = [text(draw, 2) for _ in rows]
        drafter.logits([row + made for row, made in zip(rows, drafts, strict=True)])
        rows = [row + made[: draw.randrange(3)] + text(draw, 1) for row, made in zip(rows, drafts, strict=True)]
        rows = [row if len(row) < 38 else [*rows[0][:4], *text(draw, 8)] for row in rows]
        if step % 20 == 19:
            sizes.append(bytes_alive() - before)
    assert most / 4 < max(sizes) <= most
    assert len(drafter._remembered._by_end) <= 6 * 3


@pytest.mark.parametrize("lengths", [(50, 3, 40), (1, 16, 17), (100,)])
def test_a_long_context_is_run_in_slices(asked, monkeypatch, lengths):
    monkeypatch.setattr(draft_model, "SLICE_TOKENS", 16)
    rows = [text(random.Random(length), length) for length in lengths]
    forwards = asked(*rows)
    assert sum(forwards) == sum(lengths) and forwards[:-1] == [16] * (len(forwards) - 1)
    assert asked(*([*row, 1] for row in rows)) == [len(rows)]


def test_a_prompt_of_thousands_of_tokens(asked):
    rows = [text(random.Random(16), 2100), [1, 2, 3]]
    assert asked(*rows) == [2048, 55]
    assert asked(*(row + [4] * 200 for row in rows)) == [400]


# --- what is refused


@pytest.mark.parametrize(
    "contexts, said",
    [([[1], []], r"contexts\[1\]"), ([[1, 2, 50], [1]], r"contexts\[0\] is 50"), ([[], [1]], r"contexts\[0\]"),
     ([[3, 4, 5], [3, 4, 5, 6], [3, -1, 5]], r"contexts\[2\] is -1"), ([[1], [1], [2, 99]], r"contexts\[2\]")],
)  # fmt: skip
def test_contexts_that_are_none(asked, contexts, said):
    asked([3, 4, 5])
    with pytest.raises(InvalidValue, match=said):
        asked(*contexts)
    assert asked.forwards == []
    assert asked([3, 4, 5, 6]) == [1]


def test_no_contexts_are_no_rows(asked):
    assert asked() == []


@pytest.mark.parametrize("argument", ["max_sequences", "max_drafts"])
def test_arguments_out_of_range(model, argument):
    with pytest.raises(InvalidValue, match=argument):
        DraftModel(model, **{argument: 0})


def test_a_checkpoint_is_read():
    drafter = DraftModel.from_checkpoint(shipped_checkpoint("tiny_attention"), torch.float64)
    assert drafter.vocab_size == 264
    context = list(b"import")
    torch.testing.assert_close(drafter.logits([context])[0], fresh(drafter.model, context), rtol=0, atol=1e-9)
