"""The race: both sides write the same, and a frame is what was recorded up to its time."""

import io
from dataclasses import replace

import pytest

from minserve.__main__ import main
from minserve.clock import VirtualClock
from minserve.errors import InvalidValue, PromptTooLong
from minserve.race.recording import PROMPTS, YOURS, Race, Recording, run_race
from minserve.race.screen import MIN_COLUMNS, columns, fit_end, frame, page_letters, replay, result
from minserve.request import FinishReason, Output, Timings, Usage


def output(text, admitted, first_token, finished):
    """An output whose tokens are its bytes; everybody arrives at 10 s."""
    times = Timings(10.0, admitted, first_token, finished, first_token - 10.0)
    usage = Usage(prompt_tokens=2, completion_tokens=len(text))
    return Output(text, tuple(text.encode()), FinishReason.LENGTH, usage=usage, timings=times)


def side(name, step_s, pages=()):
    """Eight requests, each with the tokens x and y; in turn, or all at once where step_s is 0."""
    outputs, said = [], []
    for i in range(8):
        at = 10.0 + i * step_s
        outputs.append(output("xy", at, at + 0.5, at + 1.0))
        said += [(at + 0.5, i, "x", 1), (at + 1.0, i, "y", 1)]
    return Recording(name, tuple(outputs), tuple(sorted(said)), pages, 10.0)


@pytest.fixture
def race():
    """A loop of 8 s against an engine of 1 s with a pool of 4 pages."""
    pages = ((10.5, (0, 0, 4, None)), (11.0, (None,) * 4))
    prompts = tuple(f"{letter}\nline " for letter in "abcdefgh")
    return Race(prompts, side("the loop", 1.0), side("the engine", 0.0, pages), page_size=16)


def test_a_frame_is_what_was_recorded_up_to_its_time(race):
    lines = frame(race, 1.5, 61)
    left, right = zip(*(line.split(" | ") for line in lines[:9]), strict=True)
    assert left[0].split() == ["the", "loop", "1.50", "s"]
    assert right[0].split() == ["the", "engine", "done", "in", "1.00", "s"]
    assert [row.split() for row in left[1:4]] == [
        ["A", "2", "done", "line", "xy"], ["B", "1", "line", "x"], ["C", "0", "waits", "line"]]  # fmt: skip
    assert all(row.split()[1:] == ["2", "done", "line", "xy"] for row in right[1:])
    assert frame(race, 1.0, 61)[1].split(" | ")[0].split() == ["A", "2", "done", "line", "xy"], "done at its last token"
    assert [row[:2] for row in left[1:]] == ["A ", "B ", "C ", "D ", "E*", "F ", "G ", "H "]


@pytest.mark.parametrize("time_s,held,drawn", [(0.2, 0, "...."), (0.5, 3, "AAE."), (0.9, 3, "AAE."), (1.0, 0, "....")])
def test_the_map_shows_the_pages_of_the_latest_step(race, time_s, held, drawn):
    *_, title, shown = frame(race, time_s, 80)
    assert title.startswith(f"the engine's pages of 16 tokens, {held} of 4 held; a character is a page")
    assert shown.strip() == drawn


def test_a_large_pool_takes_several_pages_to_a_character(race):
    owners = (0,) * 300 + (None,) * 700
    large = replace(race, engine=replace(race.engine, pages=((10.1, owners),)))
    *_, title, one, two, three, four = frame(large, 0.5, 70)
    assert "300 of 1000 held" in title and len(one + two + three + four) == 4 * 70
    assert (one + two + three + four).count("A") == 300 / 4 and (one + two + three + four).count(".") == 700 / 4
    assert page_letters((1, 2, 2, None, None, None), 3) == "C."


@pytest.mark.parametrize("width", [MIN_COLUMNS, 81, 200])
@pytest.mark.parametrize("text", ["plain " * 40, "多" * 99, "\x1b[2J\ttab\r", "e\u0301" * 150, "", "\n\n"])
def test_every_line_fits_and_nothing_in_a_text_moves_the_cursor(race, width, text):
    wild = replace(race, prompts=(text,) * 8)
    for time_s in (0.0, 0.7, 9.0):
        lines = frame(wild, time_s, width)
        assert len(lines) == 12 and all(line.isprintable() for line in lines)
        pane = (width - 3) // 2
        assert {columns(line) for line in lines[:9]} == {2 * pane + 3} and columns(lines[-1]) == width


@pytest.mark.parametrize("text,shown", [("abc", "abc "), ("abcd", "abcd"), ("abcde", "…cde"), ("多多多", "… 多")])
def test_what_does_not_fit_keeps_its_end(text, shown):
    assert sorted(fit_end(text, 4)) == sorted(shown) and fit_end(text, 4).strip()[-1] == shown.strip()[-1]


def test_both_sides_write_the_same_and_the_pages_are_theirs(small_folder):
    race = run_race("my own prompt", small_folder, max_tokens=12, dtype="float64")
    assert race.prompts[YOURS] == "my own prompt" and len(race.prompts) == 1 + len(PROMPTS) == 8
    assert race.differences == {} and "Both sides wrote the same" in result(race)
    for one in (race.loop, race.engine):
        for i, out in enumerate(one.outputs):
            assert "".join(text for _, request, text, _ in one.said if request == i) == out.text
            assert sum(n for _, request, _, n in one.said if request == i) == len(out.token_ids) >= 1
        assert len(one.outputs[YOURS].token_ids) == 12 or one.outputs[YOURS].finish_reason == "stop"
        assert list(one.said) == sorted(one.said, key=lambda moment: moment[0])
    turns = [out.timings for out in race.loop.outputs]
    assert all(a.finished <= b.admitted for a, b in zip(turns, turns[1:], strict=False))
    together = [out.timings for out in race.engine.outputs]
    assert max(t.admitted for t in together) < min(t.first_token for t in together)
    moments = [owners for _, owners in race.engine.pages]
    assert set(moments[0]) >= set(range(8)) and set(moments[-1]) == {None}
    needed = [-(-len(prompt.encode()) // race.page_size) for prompt in race.prompts]
    assert [moments[0].count(i) for i in range(8)] == needed


def test_a_race_repeats_with_its_seed(small_folder):
    ids = [[o.token_ids for o in run_race("x", small_folder, 6, seed, "float64").engine.outputs] for seed in (1, 1, 2)]
    assert ids[0] == ids[1] != ids[2]


def test_sides_that_differ_are_told_apart(race):
    outputs = list(race.engine.outputs)
    outputs[2] = replace(outputs[2], token_ids=(120, 7))
    outputs[5] = replace(outputs[5], token_ids=(120,))
    other = replace(race, engine=replace(race.engine, outputs=tuple(outputs)))
    assert other.differences == {2: 1, 5: 1}
    assert "The two sides differ: C from token 1 on, F from token 1 on." in result(other)
    assert race.differences == {} and "Both sides wrote the same 16 tokens." in result(race)


def test_the_result_explains_the_readers_own_request_and_ends_on_the_ratio(race):
    text = result(race)
    assert text.endswith("All eight: 8.00 s in the loop, 1.00 s in the engine: 8.0 x")
    assert "E, your request, the loop:\nphase" in text and "E, your request, the engine:\nphase" in text
    assert [line.split()[1] for line in text.splitlines() if line.startswith("queued")] == ["4000.0", "0.0"]


@pytest.mark.parametrize("speed,num_frames", [(1, 8 * 20 + 1), (4, 2 * 20 + 1)])
def test_a_replay_draws_over_itself_until_both_are_done(race, speed, num_frames):
    clock, out = VirtualClock(), io.StringIO()
    replay(race, out, 80, clock, clock.advance, speed)
    assert clock.now() == pytest.approx(8 / speed, abs=0.1)
    frames = out.getvalue().split("\x1b[12A")
    assert abs(len(frames) - num_frames) <= 1 and all(one.count("\n") == 12 for one in frames)
    assert "done in 8.00 s" in frames[-1] and "done" not in frames[0]


@pytest.mark.parametrize("speed", [0, -1, float("nan"), float("inf")])
def test_a_speed_that_is_none_is_refused(race, speed):
    with pytest.raises(InvalidValue, match="speed"):
        replay(race, io.StringIO(), 80, VirtualClock(), lambda seconds: None, speed)


def test_the_command_prints_the_result_alone_where_there_is_no_terminal(small_folder, capsys):
    command = ["race", "mine", "--model", str(small_folder), "--max-tokens", "5"]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out and out.count("finish reason") == 2 and out.strip().endswith("x")
    assert main([*command, "--max-tokens", "0"]) == 2 and main([*command, "--speed", "0"]) == 2
    with pytest.raises(PromptTooLong):
        run_race("long " * 60, small_folder)


def test_the_command_replays_on_a_terminal(small_folder, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "90")
    monkeypatch.setenv("LINES", "30")
    assert main(["race", "mine", "--model", str(small_folder), "--max-tokens", "3", "--speed", "9"]) == 0
    out = capsys.readouterr().out
    assert "\x1b[2K" in out and "E*" in out and out.strip().endswith("x")
