"""The interval map: every range where it belongs, every point with its number."""

import pytest

from minserve.errors import InvalidValue

matplotlib = pytest.importorskip("matplotlib")
plots = pytest.importorskip("minserve.plots")
style = pytest.importorskip("minserve.plot_style")

ROWS = {"prompt": [(0, 40, "tokens")], "pages": [(0, 26, "matched"), (16, 20, "copied")], "run": [(16, 40, "tokens")]}


def draw(rows=ROWS, **what):
    figure = plots.interval_map("What of the prompt is reused?", rows, "token", **what)
    figure.canvas.draw()
    return figure, figure.axes[0]


def rectangles(ax):
    """Every range that is drawn: (row, start, stop, colour)."""
    found = []
    for bars in ax.collections:
        for path, colour in zip(bars.get_paths(), bars.get_facecolor().repeat(len(bars.get_paths()), 0), strict=False):
            (start, bottom), (stop, top) = path.vertices.min(axis=0), path.vertices.max(axis=0)
            found.append((round((bottom + top) / 2), float(start), float(stop), matplotlib.colors.to_hex(colour)))
    return found


def test_every_range_is_drawn_in_its_row_and_in_the_colour_of_its_kind():
    figure, ax = draw()
    kinds = dict(zip(("tokens", "matched", "copied"), style.COLOURS, strict=False))
    wanted = [(place, start, stop, kinds[kind].lower())
              for place, row in enumerate(ROWS.values()) for start, stop, kind in row]  # fmt: skip
    assert sorted(rectangles(ax)) == sorted(wanted)
    assert [label.get_text() for label in ax.get_yticklabels()] == list(ROWS)
    assert ax.get_ylim()[0] > ax.get_ylim()[1], "the first row is at the top"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == list(kinds)


def test_points_stand_in_rows_of_their_own_with_their_numbers():
    _, ax = draw(points={"states": [8, 16, 32], "pages": [20]}, references={"hit": 16})
    marks = {round(line.get_ydata()[0]): list(line.get_xdata()) for line in ax.lines if line.get_marker() == "d"
             and len(line.get_xdata())}  # fmt: skip
    assert marks == {1: [20], 3: [8, 16, 32]}
    assert [label.get_text() for label in ax.get_yticklabels()] == [*ROWS, "states"]
    assert {"8", "16", "32", "20", "hit"} <= {text.get_text() for text in ax.texts}
    assert is_labelled(ax.figure)


def is_labelled(figure):
    """Whether title and axis say what they should."""
    return figure.get_suptitle() == "What of the prompt is reused?" and figure.axes[0].get_xlabel() == "token"


@pytest.mark.parametrize("rows", [{}, {"prompt": []}, {"prompt": [(4, 2, "tokens")]}])
def test_nothing_to_draw_is_a_named_error(rows):
    with pytest.raises(InvalidValue, match="rows"):
        draw(rows)
