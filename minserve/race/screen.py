"""The race on a screen: one frame is a function of what was recorded and a time, and a replay is frames in a row."""

from __future__ import annotations

import math
import unicodedata
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from typing import TextIO

from minserve.clock import Clock
from minserve.errors import InvalidValue
from minserve.race.recording import YOURS, Pages, Race, Recording

LETTERS = "ABCDEFGH"
FRAMES_PER_S = 20
MAP_LINES = 4
MIN_COLUMNS, MIN_LINES = 60, 20  # of a terminal that a frame fits into, the cursor below it


def frame(race: Race, time_s: float, width: int) -> list[str]:
    """Both sides as they stood so many seconds after the start, in lines of `width` columns, at least MIN_COLUMNS.

    On either side each request has a line: its letter, how many tokens it has, whether it waits or is done, and the
    newest line of its text. Below, the engine's pages, each as the letter of the request that holds it.
    """
    pane = (width - 3) // 2
    sides = [[_heading(side, time_s, pane), *_rows(side, race.prompts, time_s, pane)]
             for side in (race.loop, race.engine)]  # fmt: skip
    lines = [f"{left} | {right}" for left, right in zip(*sides, strict=True)]
    return [*lines, "", *_page_map(race, time_s, width)]


def _heading(side: Recording, time_s: float, width: int) -> str:
    """A side's name, and its time so far or in all."""
    done = time_s >= side.duration_s
    clock = f"{'done in ' if done else ''}{min(time_s, side.duration_s):.2f} s"
    return fit_end(side.name, width - len(clock) - 1) + " " + clock


def _rows(side: Recording, prompts: tuple[str, ...], time_s: float, width: int) -> list[str]:
    """A line per request of one side."""
    now_s, texts, counts = side.start_s + time_s, list(prompts), [0] * len(prompts)
    for when_s, request, text, num_tokens in side.said:
        if when_s <= now_s:
            texts[request] += text
            counts[request] += num_tokens
    rows = []
    for i, output in enumerate(side.outputs):
        times = output.timings
        state = "waits" if times.admitted > now_s else "done" if times.finished <= now_s else ""
        yours = "*" if i == YOURS else " "
        mark = f"{LETTERS[i]}{yours}{counts[i]:4} {state:5} "
        rows.append(mark + fit_end(newest_line(texts[i]), width - len(mark)))
    return rows


def _page_map(race: Race, time_s: float, width: int) -> list[str]:
    """The engine's pool, as many pages to a character as it takes."""
    moments = race.engine.pages
    place = bisect_right([when_s for when_s, _ in moments], race.engine.start_s + time_s)
    owners = moments[place - 1][1] if place else (None,) * len(moments[0][1])
    per_char = math.ceil(len(owners) / (MAP_LINES * width))
    held = sum(owner is not None for owner in owners)
    what = "a character is a page" if per_char == 1 else f"a character is {per_char} pages"
    drawn = page_letters(owners, per_char)
    num_lines = math.ceil(len(drawn) / width)
    lines = [drawn[i * width : (i + 1) * width].ljust(width) for i in range(num_lines)]
    title = f"the engine's pages of {race.page_size} tokens, {held} of {len(owners)} held; {what}, a dot is free"
    return [fit_start(title, width), *lines]


def page_letters(owners: Pages, per_char: int = 1) -> str:
    """Pages as letters of their owners, a dot for a free one; of several in a character, the one that holds most.

    >>> page_letters((0, 0, 1, None, None, None), 2)
    'AB.'
    """
    letters = []
    for start in range(0, len(owners), per_char):
        held = Counter(owner for owner in owners[start : start + per_char] if owner is not None)
        letters.append(LETTERS[held.most_common(1)[0][0]] if held else ".")
    return "".join(letters)


def newest_line(text: str) -> str:
    """The last line with something on it, without its indent; what cannot be printed is a middle dot.

    >>> newest_line("def f():\\n    return\\a 1\\n  \\n")
    'return· 1'
    """
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    return "".join(char if char.isprintable() else "·" for char in lines[-1]) if lines else ""


def columns(text: str) -> int:
    """How many columns of a terminal a text takes: wide characters take two, combining ones none.

    >>> columns("abc"), columns("多い")
    (3, 4)
    """
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def fit_end(text: str, width: int) -> str:
    """A text in exactly so many columns, its end kept, an ellipsis where it was cut.

    >>> fit_end("abcdef", 4), fit_end("ab", 4)
    ('…def', 'ab  ')
    """
    if columns(text) > width:
        text = text[-width:]
        while columns(text) > width - 1:
            text = text[1:]
        text = "…" + text
    return text + " " * (width - columns(text))


def fit_start(text: str, width: int) -> str:
    """A text of plain characters in exactly so many columns, its start kept."""
    return text[:width].ljust(width)


def replay(
    race: Race, out: TextIO, width: int, clock: Clock, sleep: Callable[[float], None], speed: float = 1.0
) -> None:  # fmt: skip
    """Draw the race as time goes by, each frame over the one before.

    Arguments:
        race: what was recorded.
        out: a terminal that knows ANSI's cursor movements.
        width: its columns.
        clock: what time goes by, and `sleep`, which lets seconds of it pass.
        speed: recorded seconds per second, above 0.
    Changes: out, and the clock if it is a virtual one.
    """
    check_speed(speed)
    end_s, start_s, num_lines = max(race.loop.duration_s, race.engine.duration_s), clock.now(), 0
    while True:
        time_s = (clock.now() - start_s) * speed
        lines = frame(race, time_s if time_s < end_s else math.inf, width)  # the last words come after the last end
        back = f"\x1b[{num_lines}A" if num_lines else ""
        out.write(back + "".join(f"\x1b[2K{line}\n" for line in lines))
        out.flush()
        num_lines = len(lines)
        if time_s >= end_s:
            return
        sleep(1 / FRAMES_PER_S)


def check_speed(speed: float) -> None:
    """Refuse a speed at which nothing or everything would happen at once. Errors: InvalidValue."""
    if not 0 < speed < math.inf:
        raise InvalidValue("speed", speed, "a finite number above 0")


def result(race: Race) -> str:
    """How the race ended: the reader's own request explained on both sides, and who took how long."""
    letter, parts = LETTERS[YOURS], []
    for side in (race.loop, race.engine):
        parts.append(f"{letter}, your request, {side.name}:\n{side.outputs[YOURS].explain()}")
    num_tokens = sum(output.usage.completion_tokens for output in race.engine.outputs)
    differences = race.differences
    if differences:
        where = ", ".join(f"{LETTERS[i]} from token {place} on" for i, place in differences.items())
        same = (
            f"The two sides differ: {where}. In float32 a batch rounds differently; float64 promises the same tokens."
        )
    else:
        same = f"Both sides wrote the same {num_tokens} tokens."
    loop_s, engine_s = race.loop.duration_s, race.engine.duration_s
    ratio = f"All eight: {loop_s:.2f} s in the loop, {engine_s:.2f} s in the engine: {loop_s / engine_s:.1f} x"
    return "\n\n".join([*parts, f"{same}\n{ratio}"])
