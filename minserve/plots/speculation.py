"""What became of drafts, step by step: which were kept, which token came besides, and what was thrown away."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

from matplotlib.colors import to_rgb

import minserve.plot_style as style
from minserve.errors import InvalidValue
from minserve.plots.charts import Figure, new_figure

KINDS = MappingProxyType(
    {
        "kept": style.COLOURS[0],
        "one token more": style.COLOURS[2],
        "turned down": style.COLOURS[1],
        "thrown away with it": "#D4D4D4",
    }
)
VISIBLE = MappingProxyType({ord(" "): "\u2423", ord("\n"): "\u21b5"})


def draft_steps(
    title: str, steps: Sequence[tuple[Sequence[str], int, str]], xlabel: str = "token of the output"
) -> Figure:  # fmt: skip
    """Steps of one request, a row each: every token where it stands in the output, lost drafts below what came instead.

    Arguments:
        steps: of each (its drafts as texts, how many were kept, the text of the token that followed these), in order;
            the first begins at token 0, and each where the one before it ended.
    Errors: InvalidValue for a step that keeps more drafts than it has, and where there is nothing to draw.
    """
    steps = [(list(drafts), num_kept, follows) for drafts, num_kept, follows in steps]
    if not steps:
        raise InvalidValue("steps", steps, "at least one step")
    for number, (drafts, num_kept, _) in enumerate(steps):
        if not 0 <= num_kept <= len(drafts):
            raise InvalidValue(f"steps[{number}]", num_kept, f"0 to {len(drafts)} drafts kept")
    figure, (ax,) = new_figure(title, xlabel, "", height=min(7.0, 1.5 + 0.42 * len(steps)), grid=None)
    drawn, start = {}, 0
    for row, (drafts, num_kept, follows) in enumerate(steps):
        for place, kind, text, low, high in _boxes(drafts, num_kept, follows):
            shape = {"color": KINDS[kind], "edgecolor": "white", "linewidth": 1.2, "align": "edge"}
            box = ax.barh(row + low, 1, high - low, start + place, **shape)
            drawn.setdefault(kind, box)
            centre = (start + place + 0.5, row + (low + high) / 2)
            style.write_on(ax, text.translate(VISIBLE), centre, to_rgb(KINDS[kind]))
        start += num_kept + 1
    ax.set_yticks(range(len(steps)), [f"step {row + 1}" for row in range(len(steps))], color=style.INK)
    ax.set_ylim(len(steps) - 0.4, -0.6)
    style.scale(ax, False, None)
    order = [kind for kind in KINDS if kind in drawn]
    style.legend(figure, [drawn[kind] for kind in order], order)
    return figure


def _boxes(drafts: list[str], num_kept: int, follows: str) -> list[tuple[int, str, str, float, float]]:
    """A step's boxes: place, kind, text, top and bottom. Lost drafts have the lower half of the row."""
    is_lost = num_kept < len(drafts)
    boxes = [(place, "kept", text, -0.42, 0.42) for place, text in enumerate(drafts[:num_kept])]
    boxes.append((num_kept, "one token more", follows, -0.42, 0.0 if is_lost else 0.42))
    for place, text in enumerate(drafts[num_kept:], start=num_kept):
        boxes.append((place, "turned down" if place == num_kept else "thrown away with it", text, 0.0, 0.42))
    return boxes
