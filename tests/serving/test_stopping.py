"""Where an output ends: ids, text and reason, however tokens fall into steps."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minserve.model.tokenizer import ByteTokenizer
from minserve.request import FinishReason, SamplingParams
from minserve.stopping import StopChecker

STOP, LENGTH, ABORT = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT
END = 258


class Pieces:
    """A tokenizer whose tokens are given strings, of any length."""

    def __init__(self, pieces):
        self.pieces = pieces

    def push(self, token_id):
        return self.pieces[token_id]

    def finish(self):
        return ""


def bytes_checker(eos=(END,), **params):
    return StopChecker(SamplingParams(**params), ByteTokenizer().incremental(), eos)


def run(checker, ids, sizes=()):
    """Push `ids` in steps of these sizes, then one by one; the kept ids and the text sent."""
    kept, texts, at, sizes = [], [], 0, list(sizes)
    while at < len(ids) and checker.finish_reason is None:
        step = ids[at : at + (sizes.pop(0) if sizes else 1)]
        num_kept, text, _ = checker.push(step)
        kept, at = kept + step[:num_kept], at + len(step)
        texts.append(text)
    return kept, "".join(texts), checker.finish_reason


@pytest.mark.parametrize(
    "ids, cap, num_kept, reason",
    [
        ([10, 11, END, 20, 21, 22], 5, 3, STOP),  # inside the cap: trimmed at the stop
        ([10, 11, 12, 13, END, 20], 5, 5, STOP),  # on the last allowed token
        ([10, 11, 12, 13, 14, END], 5, 5, LENGTH),  # just beyond: exactly the cap
        ([10, 11, 12, 13, 14, 15, END], 5, 5, LENGTH),
        ([10, 11, 12, 13, 14], 5, 5, LENGTH),
        ([10, 11, 12, 13], 5, 4, None),
        ([END, 10], 1, 1, STOP),
        ([10, END], 1, 1, LENGTH),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 6])
def test_stop_and_cap_inside_one_accepted_run(ids, cap, num_kept, reason, size):  # fault E1
    kept, text, ended = run(bytes_checker(max_tokens=cap), ids, [size] * 6)
    assert (kept, ended) == (ids[:num_kept], reason)
    assert text == bytes(i for i in kept if i != END).decode()  # a stop token says nothing


@pytest.mark.parametrize("ids, cap, num_kept, reason", [(b"abENDxy", 5, 5, STOP), (b"abENDxy", 4, 4, LENGTH)])
def test_stop_string_and_cap_inside_one_accepted_run(ids, cap, num_kept, reason):  # fault E1
    kept = bytes_checker(max_tokens=cap, stop="END").push(list(ids))
    assert kept == (num_kept, "ab" if reason is STOP else "abEN", reason)


def test_a_stop_string_spans_tokens_and_is_held_back():
    checker = bytes_checker(stop=["\n\nQ", "###"])
    assert [checker.push([byte])[1] for byte in b"a\n"] == ["a", ""]
    assert checker.push([ord("\n")]) == (1, "", None)
    assert checker.push([ord("\n")]) == (1, "\n", None)  # three in a row: only the last two may still begin a stop
    assert checker.push([ord("P")]) == (1, "\n\nP", None)
    assert checker.push(list(b"#b###c")) == (5, "#b", STOP)
    assert checker.text == "a\n\n\nP#b" and checker.num_tokens == 10


def test_a_stop_inside_one_long_token():
    checker = StopChecker(SamplingParams(stop=["STOP"]), Pieces(["one", " two STOP three", "four"]))
    assert checker.push([0, 1, 2]) == (2, "one two ", STOP)


def test_the_stop_string_complete_first_decides_however_text_falls_into_tokens():
    for pieces in (["abcd"], ["ab", "cd"], ["abc", "d"], list("abcd")):
        checker = StopChecker(SamplingParams(stop=["abcd", "bc"]), Pieces(pieces))
        checker.push(range(len(pieces)))
        assert (checker.text, checker.finish_reason) == ("a", STOP)


def test_what_was_held_is_sent_when_the_output_ends_otherwise():
    assert bytes_checker(stop="END", max_tokens=3).push(list(b"aEN")) == (3, "aEN", LENGTH)
    assert bytes_checker(stop="END").push([*b"aEN", END]) == (4, "aEN", STOP)
    checker = bytes_checker(stop="END")
    checker.push(list(b"aEN"))
    assert checker.finish() == "EN" and checker.text == "aEN" and checker.finish_reason is ABORT
    assert checker.finish(FinishReason.ERROR) == "" and checker.finish_reason is ABORT


def test_nothing_is_kept_after_the_end():
    checker = bytes_checker(max_tokens=2)
    assert checker.push(list(b"abc")) == (2, "ab", LENGTH)
    assert checker.push(list(b"d")) == (0, "", LENGTH) and checker.text == "ab" and checker.num_tokens == 2
    assert bytes_checker().push([]) == (0, "", None)


def test_no_tokens_asked_for():  # fault D9
    checker = bytes_checker(max_tokens=0, prompt_logprobs=1)
    assert checker.finish_reason is LENGTH and checker.push([1]) == (0, "", LENGTH)
    assert bytes_checker(max_tokens=1).push([65, 66]) == (1, "A", LENGTH)


def test_end_tokens_may_be_ignored_and_added():
    assert bytes_checker(ignore_eos=True, max_tokens=3).push([65, END, 66, 67]) == (3, "AB", LENGTH)
    both = {"ignore_eos": True, "stop_token_ids": [66]}
    assert bytes_checker(**both).push([65, END, 66, 67]) == (3, "A", STOP)
    assert bytes_checker(stop_token_ids=[66]).push([65, END, 66]) == (2, "A", STOP)
    assert bytes_checker(eos=(256, END)).push([65, 256]) == (2, "A", STOP)


@pytest.mark.parametrize("text", ["\N{GRINNING FACE}", "日本語", "👩‍👩‍👧", "aé"])
def test_no_half_character_is_ever_sent(text):  # fault I1
    ids = list(text.encode())
    checker = bytes_checker()
    pieces = [checker.push([i])[1] for i in ids]
    assert "".join(pieces) == text and "\N{REPLACEMENT CHARACTER}" not in pieces
    for cap in range(1, len(ids) + 1):
        kept, sent, reason = run(bytes_checker(max_tokens=cap), ids)
        assert (kept, reason) == (ids[:cap], LENGTH)
        assert sent == bytes(ids[:cap]).decode(errors="replace")  # what is left of a character comes once, at the end


def test_an_invalid_byte_does_not_stall_a_stop_string():  # fault I1
    assert bytes_checker(stop="END").push([0xFF, *b"aENDb"]) == (5, "\N{REPLACEMENT CHARACTER}a", STOP)


def plain_cut(pieces, stops, cap):
    """Text, number of ids kept and reason of a whole output, by looking at every prefix of the text."""
    text = ""
    for token, piece in enumerate(pieces[:cap]):
        for letter in piece:
            text += letter
            ended = [stop for stop in stops if text.endswith(stop)]
            if ended:
                return text[: -max(map(len, ended))], token + 1, STOP
    return text, min(cap, len(pieces)), LENGTH if len(pieces) >= cap else None


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.lists(st.text("ab", max_size=4), max_size=10),
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
    st.integers(1, 11),
    st.lists(st.integers(1, 4), max_size=5),
)
def test_pieces_joined_are_the_text_of_the_whole(pieces, stops, cap, sizes):  # TEXT
    checker = StopChecker(SamplingParams(stop=stops, max_tokens=cap), Pieces(pieces))
    kept, sent, reason = run(checker, list(range(len(pieces))), sizes)
    text, num_kept, expected_reason = plain_cut(pieces, stops, cap)
    assert (len(kept), reason) == (num_kept, expected_reason)
    assert sent == checker.text and text.startswith(sent)
    assert sent + checker.finish() == text
    if reason is None:  # what is held back could still become a stop, and nothing more is held
        held = text[len(sent) :]
        assert any(stop.startswith(held) for stop in stops) if held else True
        assert not any(s.startswith(text[i:]) for s in stops for i in range(len(sent)) if len(text) - i < len(s))
