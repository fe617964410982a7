"""What became of drafts as a picture: every token where it stands, lost drafts below what came instead."""

import pytest

from minserve.errors import InvalidValue

matplotlib = pytest.importorskip("matplotlib")
plots = pytest.importorskip("minserve.plots")
speculation = pytest.importorskip("minserve.plots.speculation")

STEPS = [("ret", 3, "u"), ("ran", 1, "n"), ("", 0, " "), ("a\n", 0, "b")]


def draw(steps=STEPS):
    figure = plots.draft_steps("What does each step bring?", steps)
    figure.canvas.draw()
    return figure, figure.axes[0]


def boxes(ax):
    """Every box: its place, its row, which part of the row it has, and its kind."""
    kinds = {colour.lower(): kind for kind, colour in speculation.KINDS.items()}
    found = []
    for box in ax.patches:
        top, bottom = sorted((box.get_y(), box.get_y() + box.get_height()))
        row = round((top + bottom) / 2 + 1e-9) if bottom - top > 0.5 else round(top if bottom % 1 else bottom)
        part = "all" if bottom - top > 0.5 else "upper" if bottom == pytest.approx(row) else "lower"
        assert box.get_width() == 1
        found.append((round(box.get_x()), row, part, kinds[matplotlib.colors.to_hex(box.get_facecolor())]))
    return found


def test_every_token_stands_in_its_row_and_place_in_the_colour_of_what_became_of_it():
    figure, ax = draw()
    assert sorted(boxes(ax)) == sorted([
        (0, 0, "all", "kept"), (1, 0, "all", "kept"), (2, 0, "all", "kept"), (3, 0, "all", "one token more"),
        (4, 1, "all", "kept"), (5, 1, "upper", "one token more"),
        (5, 1, "lower", "turned down"), (6, 1, "lower", "thrown away with it"),
        (6, 2, "all", "one token more"),
        (7, 3, "upper", "one token more"), (7, 3, "lower", "turned down"), (8, 3, "lower", "thrown away with it"),
    ])  # fmt: skip
    texts = [text.get_text() for text in ax.texts]
    assert sorted(texts) == sorted(["r", "e", "t", "u", "r", "n", "a", "n", "\u2423", "b", "a", "\u21b5"])
    assert [label.get_text() for label in ax.get_yticklabels()] == ["step 1", "step 2", "step 3", "step 4"]
    assert ax.get_ylim()[0] > ax.get_ylim()[1], "the first step is at the top"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == list(speculation.KINDS)
    assert figure.get_suptitle() == "What does each step bring?" and ax.get_xlabel() == "token of the output"


def test_only_what_happened_is_in_the_legend():
    figure, _ = draw([("re", 2, "t")])
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["kept", "one token more"]


@pytest.mark.parametrize("steps", [[], [("re", 3, "t")], [("re", -1, "t")]])
def test_nothing_to_draw_is_a_named_error(steps):
    with pytest.raises(InvalidValue, match="steps"):
        draw(steps)
