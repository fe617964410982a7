"""The prefix bench: both ways serve the same, and what it says was saved is what was not computed."""

import json

import pytest

from minserve.__main__ import main
from minserve.bench import prefix
from minserve.errors import InvalidValue


@pytest.fixture(scope="module")
def results(small_folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix, "NUM_SHOTS", 6)
        patch.setattr(prefix, "SHOT_TOKENS", 70)
        patch.setattr(prefix, "NUM_SESSIONS", 2)
        patch.setattr(prefix, "NUM_TURNS", 2)
        patch.setattr(prefix, "USER_CHARS", 5)
        patch.setattr(prefix, "NUM_UNLIKE", 3)
        patch.setattr(prefix, "UNLIKE_TOKENS", (8, 100))
        return prefix.bench_prefix(small_folder, rounds=1, max_tokens=3)


def test_both_ways_serve_the_same_and_one_of_them_less(results):
    assert [(r.load, r.way) for r in results] == [(load, way) for load in prefix.LOADS for way in prefix.WAYS]
    for without, cached in zip(results[::2], results[1::2], strict=True):
        assert without.outputs == cached.outputs and without.prompt_tokens == cached.prompt_tokens
        assert without.cached_tokens == 0 and without.prefill_tokens == without.prompt_tokens
        assert cached.prefill_tokens == cached.prompt_tokens - cached.cached_tokens
        assert cached.cached_tokens <= cached.best_tokens == without.best_tokens
        assert (cached.cached_tokens > 0) == (cached.load != "unlike")


def test_few_shot_computes_the_beginning_about_once(results):
    shots = results[1]
    assert shots.best_tokens >= 5 * 70 and shots.cached_tokens >= 5 * 64  # the last page boundary before the questions


def test_the_table_says_it_and_complains_of_unlike_outputs(results):
    text = prefix.table(results)
    assert text.count("few-shot") == 2 and "not all outputs" not in text
    other = [*results[:3], prefix.replace(results[3], outputs=((1,),))]
    assert "chat: not all outputs are the same" in prefix.table(other)
    assert json.loads(prefix.to_json(results))[1]["cached_tokens"] == results[1].cached_tokens


def test_what_cannot_be_measured_is_named(small_folder, capsys):
    with pytest.raises(InvalidValue, match="rounds"):
        prefix.bench_prefix(small_folder, rounds=0)
    assert main(["bench", "prefix", "--requests", "3"]) == 2 and "--requests" in capsys.readouterr().err
    assert main(["bench", "tree", "--model", "x"]) == 2 and "--model" in capsys.readouterr().err
