"""Every picture drawn from a small run, and what can be read off it: numbers, names, title, units."""

import itertools
import subprocess
import sys

import numpy as np
import pytest

from minserve.clock import VirtualClock
from minserve.errors import InvalidValue
from minserve.events import EventKind as K
from minserve.events import EventLog
from minserve.metrics import request_metrics, steps, summary
from minserve.spans import spans

matplotlib = pytest.importorskip("matplotlib")
plots = pytest.importorskip("minserve.plots")
style = pytest.importorskip("minserve.plot_style")

JOBS = ((0.0, 40, 5), (0.1, 10, 2), (0.2, 80, 9), (0.25, 5, 3), (0.9, 20, 4))  # arrival (s), prompt and output tokens


def serve(static):
    """A log of JOBS run two at a time: a step costs 50 ms and 2 ms a position; a static batch waits for its slowest."""
    clock = VirtualClock()
    log, queue, num_done = EventLog(clock), list(range(len(JOBS))), {}
    for i, (arrival, prompt, _) in enumerate(JOBS):
        log.record(K.ARRIVED, i, time_s=arrival, prompt_tokens=prompt)
    for number in itertools.count():
        if queue and not num_done:
            clock.advance_to(max(clock.now(), JOBS[queue[0]][0]))
        num_free = 0 if static and num_done else 2 - len(num_done)
        for i in [i for i in queue if JOBS[i][0] <= clock.now()][:num_free]:
            log.record(K.ADMITTED, i, cached_tokens=0)
            queue.remove(i)
            num_done[i] = 0
        if not num_done:
            return log
        phases = {i: "padded" if n == JOBS[i][2] else "decode" if n else "prefill" for i, n in num_done.items()}
        sizes = {i: {"prefill": JOBS[i][1], "decode": 1, "padded": 0}[phase] for i, phase in phases.items()}
        num_tokens, num_padded = sum(sizes.values()), list(phases.values()).count("padded")
        start_s, duration_s = clock.now(), 0.05 + 0.002 * (num_tokens + num_padded)
        clock.advance(duration_s)
        counts = {"num_rows": len(sizes), "num_tokens": num_tokens, "num_padded": num_padded}
        log.record(K.STEP, step=number, start_s=start_s, duration_s=duration_s, **counts)
        for i, phase in phases.items():
            log.record(K.SLICE, i, start=0, stop=sizes[i], phase=phase, step=number)
            if phase != "padded":
                log.record(K.TOKENS, i, count=1)
                num_done[i] += 1
        over = [i for i, n in num_done.items() if n == JOBS[i][2]]
        for i in over if not static or len(over) == len(num_done) else ():
            log.record(K.FINISHED, i, reason="length")
            del num_done[i]


@pytest.fixture(scope="module")
def logs():
    return {"static": serve(True), "continuous": serve(False)}


def texts(figure):
    """Every non-empty text in the figure that is drawn, with its box in pixels."""
    figure.draw_without_rendering()
    found = [text for legend in figure.legends for text in legend.get_texts()]
    for ax in figure.axes:
        found += [ax.xaxis.label, ax.yaxis.label, *ax.texts]
        found += ax.get_legend().get_texts() if ax.get_legend() else []
        for side, axis in enumerate((ax.xaxis, ax.yaxis)):
            low, high = sorted(axis.get_view_interval())
            found += [label for label in axis.get_majorticklabels() if low <= label.get_position()[side] <= high]
    return {text.get_text(): text.get_window_extent() for text in found if text.get_text()}


def check_house(figure, title, xlabel, ylabel):
    """The title is the question, both axes say what they show, and no name leaves the picture."""
    ax = figure.axes[0]
    assert figure.get_suptitle().replace("\n", " ") == title and title.endswith("?")
    assert (ax.get_xlabel(), ax.get_ylabel()) == (xlabel, ylabel)
    boxes = texts(figure)
    assert xlabel in boxes
    for text in [name for name in boxes if name not in ("", xlabel, ylabel)]:
        assert boxes[text].x1 <= figure.bbox.x1 + 1 and boxes[text].y1 <= figure.bbox.y1 + 1, f"{text!r} is cut off"
    assert figure._repr_png_().startswith(b"\x89PNG")
    return ax, boxes


def test_the_run_behind_the_pictures_is_one(logs):
    static, continuous = (summary(log) for log in logs.values())
    assert static.completion_tokens == continuous.completion_tokens == sum(job[2] for job in JOBS)
    assert static.padded_share > 0 == continuous.padded_share and static.busy_s > continuous.busy_s


def test_lines_carry_the_data_and_names_that_do_not_overlap(logs):
    runs = {name: steps(log) for name, log in logs.items()}
    series = {name: ([s.step for s in run], np.cumsum([s.num_tokens for s in run])) for name, run in runs.items()}
    series |= {"measured": ([0, 5, 10], [1, 160, 172]), "counted": ([0, 10], [0, 172.5]), "gap": ([0, 10], [5, np.nan])}
    title = "How many positions have been computed after each step?"
    figure = plots.lines(title, series, "step", "positions", points=("measured",), references={"all": 173.0})
    ax, boxes = check_house(figure, title, "step", "positions")
    drawn = {line.get_label(): line for line in ax.get_lines()}
    for name, (x, y) in series.items():
        np.testing.assert_array_equal(drawn[name].get_xdata(), x)
        np.testing.assert_array_equal(drawn[name].get_ydata(), y)
    assert [drawn[name].get_linestyle() for name in ("measured", "static")] == ["None", "-"]
    assert len({drawn[name].get_color() for name in series}) == len(series)
    for a, b in itertools.combinations([*series, "all"], 2):
        assert not boxes[a].overlaps(boxes[b]), f"{a!r} covers {b!r}"


def test_lines_on_logarithmic_axes_show_the_values_that_were_measured():
    title = "What does a token cost?"
    figure = plots.lines(title, {"cost": ([1, 4, 64], [8e6, 2e6, 1.25e5])}, "rows", "bytes", log_x=True, log_y=True)
    ax, boxes = check_house(figure, title, "rows", "bytes")
    assert ax.get_xscale() == ax.get_yscale() == "log"
    assert {"1", "4", "64", "1M"} <= boxes.keys()


def test_bars_are_as_long_as_the_numbers_written_at_their_ends(logs):
    spread = {name: summary(log).ttft for name, log in logs.items()}
    values = {name: {"p50": found.p50, "p99": found.p99} for name, found in spread.items()} | {"none": {"p50": 0.5}}
    title = "Who waits longest for the first token?"
    figure = plots.bars(title, values, "time to first token (s)", references={"objective": 0.7})
    ax, boxes = check_house(figure, title, "time to first token (s)", "")
    lengths = [bar.get_width() for bar in ax.patches]
    assert lengths == [group[part] for part in ("p50", "p99") for group in values.values() if part in group]
    assert {*values, "p50", "p99", "objective", *(style.short(length) for length in lengths)} <= boxes.keys()
    single = plots.bars(title, {"a": 12_345.0, "b": 2}, "requests", log=True)
    ax, boxes = check_house(single, title, "requests", "")
    assert ax.get_xscale() == "log" and "12.3k" in boxes and not single.legends


@pytest.mark.parametrize("share", [False, True])
def test_stacked_bars_add_up(share):
    stacks = {
        "1": {"dense": 20.0, "experts": 5, "state": 0.01},
        "64": {"dense": 20, "experts": 40, "state": 0.02, "KV": 0.01},
    }
    title = "What does a step haul?"
    ax, boxes = check_house(plots.stacked_bars(title, stacks, "rows", "MB", share=share), title, "rows", "MB")
    heights = np.array([[bar.get_height() for bar in part] for part in ax.containers]).T
    totals = np.array([25.01, 60.03])
    expected = np.array([[20, 5, 0.01, 0], [20, 40, 0.02, 0.01]])
    np.testing.assert_allclose(heights, 100 * expected / totals[:, None] if share else expected)
    for i in range(2):
        tops = [part[i].get_y() + part[i].get_height() for part in ax.containers]
        np.testing.assert_allclose(tops, heights[i].cumsum())
    assert {"1", "64", "25", "60"} <= boxes.keys()
    assert not any(
        boxes[a].overlaps(boxes[b]) for a, b in itertools.combinations(("dense", "experts", "state", "KV"), 2)
    )


def test_distribution_reaches_every_value_at_its_share(logs):
    waits = {name: [m.ttft for m in request_metrics(log).values()] for name, log in logs.items()}
    title = "How long does a user wait?"
    ax, boxes = check_house(plots.distribution(title, waits, "wait (s)"), title, "wait (s)", "share at or below (%)")
    curve, marks = ax.get_lines()[:2]
    np.testing.assert_allclose(curve.get_xdata()[1:], sorted(waits["static"]))
    np.testing.assert_allclose(curve.get_ydata(), [0, 20, 40, 60, 80, 100])
    spread = summary(logs["static"]).ttft
    np.testing.assert_allclose(marks.get_xdata(), [spread.p50, spread.p99])
    assert f"static\np50 {style.short(spread.p50)}   p99 {style.short(spread.p99)}" in boxes


def test_histogram_counts_every_value_once():
    title, values = "How long are prompts?", [1, 1, 2, 8, 8, 8, 8, 64]
    ax, _ = check_house(
        plots.histogram(title, values, "tokens", "prompts", bins=6, log_x=True), title, "tokens", "prompts"
    )
    outline = ax.patches[0].get_xy()
    assert (
        outline[:, 1].max() == 4
        and outline[:, 0].min() == pytest.approx(1)
        and outline[:, 0].max() == pytest.approx(64)
    )
    both = plots.histogram(
        title, {"a": values, "b": [3, 3]}, "tokens", "share (%)", bins=1, share=True, references={"x": 9}
    )
    ax, boxes = check_house(both, title, "tokens", "share (%)")
    assert [patch.get_xy()[:, 1].max() for patch in ax.patches] == [100, 100]
    assert {"a", "b", "x"} <= boxes.keys()
    assert plots.histogram(title, [5, 5, 5], "tokens", "prompts").axes[0].patches[0].get_xy()[:, 1].max() == 3


def test_timeline_draws_every_span_in_its_requests_row(logs):
    title = "When does each request run, static and continuous?"
    figure = plots.timeline(title, logs)
    check_house(figure, title, "time (s)", "request")
    assert [ax.get_title(loc="left") for ax in figure.axes] == ["static", "continuous"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["waiting", "prefill", "decode", "padded"]
    for ax, log in zip(figure.axes, logs.values(), strict=True):
        drawn = set()
        for bars in ax.findobj(matplotlib.collections.PolyCollection):
            shade = matplotlib.colors.to_hex(bars.get_facecolor()[0]).upper()
            for path in bars.get_paths():
                box = path.get_extents()
                drawn.add((round((box.y0 + box.y1) / 2), shade, round(box.x0, 9), round(box.x1, 9)))
        assert drawn == {
            (span.request_id, style.PHASES[span.phase], round(span.start_s, 9), round(span.stop_s, 9))
            for span in spans(log)
        }
    assert len(plots.timeline(title, logs["static"]).axes) == 1


def test_heatmap_shows_the_table_and_its_numbers():
    title, load = "Which experts work?", np.array([[0.5, 1.5, 1.0], [3.25, 0.25, np.nan]])
    figure = plots.heatmap(title, load, "expert", "layer", "load (1 = even)", centre=1, yticks=("first", "last"))
    ax, boxes = check_house(figure, title, "expert", "layer")
    np.testing.assert_array_equal(np.ma.filled(ax.images[0].get_array(), np.nan), load)
    assert ax.images[0].get_clim() == (1 - 2.25, 1 + 2.25)
    assert figure.axes[1].get_ylabel() == "load (1 = even)" and figure.axes[1].get_ylim() == (0.25, 3.25)
    assert {"0.5", "1.5", "3.2", "0.25", "first", "last"} <= boxes.keys() and "nan" not in boxes
    large = plots.heatmap(title, np.arange(400).reshape(20, 20), "expert", "layer", "tokens")
    assert not any("." in text or text == "399" for text in texts(large)), "no numbers where they do not fit"


def test_page_map_colours_each_owners_pages():
    title = "Who owns which page?"
    moments = [[None, None, None], ["a", None, None], ["a", "b", None], ["cached", "b", "a"]]
    ax, boxes = check_house(plots.page_map(title, moments, quiet=("cached",)), title, "step", "page")
    mesh = ax.collections[0]
    shades = mesh.to_rgba(mesh.get_array()).reshape(3, 4, 4)
    by_owner = {moments[t][page]: tuple(shades[page, t]) for t in range(4) for page in range(3)}
    assert by_owner[None] == (1, 1, 1, 1) and len(set(by_owner.values())) == 4
    for t, page in itertools.product(range(4), range(3)):
        assert tuple(shades[page, t]) == by_owner[moments[t][page]]
    assert {"a", "b", "cached"} <= boxes.keys() and ax.get_ylim()[0] > ax.get_ylim()[1], "page 0 is at the top"


def test_colours_are_told_apart_beyond_the_eighth():
    shades = [shade for _, _, shade in style.coloured("owners", dict.fromkeys(range(16)))]
    assert len(set(shades)) == 16 and shades[0].upper() == style.COLOURS[0]


@pytest.mark.parametrize(
    "draw, field",
    [
        (lambda: plots.lines("A statement.", {"a": ([1], [1])}, "x", "y"), "title"),
        (lambda: plots.lines("Is it empty?", {}, "x", "y"), "series"),
        (lambda: plots.lines("Is it empty?", {"a": ([], [])}, "x", "y"), "a is"),
        (lambda: plots.lines("Is it empty?", {"a": ([1], [np.nan])}, "x", "y"), "a is"),
        (lambda: plots.lines("Is it even?", {"a": ([1, 2], [1])}, "x", "y"), "series 'a'"),
        (lambda: plots.bars("Is it empty?", {}, "x"), "values"),
        (lambda: plots.stacked_bars("Is it empty?", {}, "x", "y"), "stacks"),
        (lambda: plots.distribution("Is it empty?", {}, "x"), "samples"),
        (lambda: plots.distribution("Is it known?", {"a": [1, np.nan]}, "x"), "values"),
        (lambda: plots.histogram("Is it empty?", {}, "x", "y"), "samples"),
        (lambda: plots.histogram("Is it known?", [1, np.inf], "x", "y"), "samples"),
        (lambda: plots.histogram("Has it a logarithm?", [0, 1], "x", "y", log_x=True), "samples"),
        (lambda: plots.timeline("Is it empty?", {}), "logs"),
        (lambda: plots.timeline("Is it empty?", EventLog(VirtualClock())), "logs"),
        (lambda: plots.heatmap("Is it a table?", [1, 2], "x", "y", "z"), "values"),
        (lambda: plots.page_map("Is it empty?", []), "moments"),
        (lambda: plots.page_map("Is it ragged?", [[None], [None, "a"]]), "moments"),
    ],
)
def test_nothing_to_draw_is_a_named_error(draw, field):
    with pytest.raises(InvalidValue, match=field):
        draw()


def test_a_phase_without_a_colour_is_named(logs):
    log = EventLog(VirtualClock())
    log.record(K.ARRIVED, 1, prompt_tokens=1)
    log.record(K.STEP, step=0, start_s=0, duration_s=1, num_rows=1, num_tokens=1, num_padded=0)
    log.record(K.SLICE, 1, start=0, stop=1, phase="dreaming", step=0)
    with pytest.raises(InvalidValue, match="dreaming"):
        plots.timeline("What is it doing?", log)


def run_python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_without_matplotlib_the_error_says_what_to_install():
    blocked = "import sys\nsys.modules['matplotlib'] = None\n"
    said = run_python(blocked + "try: import minserve.plots\nexcept Exception as error: print(repr(error))")
    assert said.startswith("MissingRequirement") and "matplotlib" in said and "minserve[notebooks]" in said


def test_pictures_leave_no_global_state_behind():
    code = (
        "import sys, matplotlib\nfrom minserve import plots\n"
        "settings = lambda: {k: matplotlib.rcParams[k] for k in matplotlib.rcParams if k != 'backend'}\n"
        "before = settings()\nplots.bars('Is it clean?', {'a': 1, 'b': 2}, 'x')._repr_png_()\n"
        "print(before == settings(), 'matplotlib.pyplot' in sys.modules)"
    )
    assert run_python(code) == "True False"
