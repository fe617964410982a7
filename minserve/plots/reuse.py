"""What of a prompt is reused, as an interval map: ranges of tokens, one row for each thing that is said of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import minserve.plot_style as style
from minserve.errors import InvalidValue
from minserve.plots.charts import Figure, new_figure


def interval_map(
    title: str, rows: Mapping[str, Sequence[tuple[float, float, str]]], xlabel: str, *,
    points: Mapping[str, Sequence[float]] | None = None, references: Mapping[str, float] | None = None
) -> Figure:  # fmt: skip
    """Ranges on one axis, row by row: what belongs to whom, and where it ends.

    Arguments:
        rows: per row, half-open ranges (start, stop, kind); each kind has its colour, named below.
        points: per row, single places, drawn as marks with their numbers; rows of their own where `rows` has none.
    Errors: InvalidValue for a range that stops before it starts, and where there is nothing to draw.
    """
    points = points or {}
    names = [*dict.fromkeys([*rows, *points])]
    kinds = dict.fromkeys(kind for row in rows.values() for _, _, kind in row)
    if not kinds:
        raise InvalidValue("rows", dict(rows), "at least one range to draw")
    figure, (ax,) = new_figure(title, xlabel, "", height=max(2.2, 1.3 + 0.36 * len(names)), grid="x")
    for name, ranges in rows.items():
        if any(stop < start for start, stop, _ in ranges):
            raise InvalidValue(f"rows[{name!r}]", ranges, "ranges (start, stop, kind) with start <= stop")
    for kind, _, colour in style.coloured("rows", kinds):
        label = kind
        for place, name in enumerate(names):
            widths = [(start, stop - start) for start, stop, what in rows.get(name, ()) if what == kind]
            if widths:
                ax.broken_barh(widths, (place - 0.36, 0.72), fc=colour, ec="white", lw=0.8, label=label)
                label = None  # once in the legend
    for place, name in enumerate(names):
        where = points.get(name, ())
        ax.plot(where, [place] * len(where), "d", color=style.INK, markersize=7, markeredgecolor="white", zorder=4)
        for x in where:
            style.write(ax, style.short(x), (x, place), (6, 0), style.INK, va="center", fontsize=8)
    ax.set_yticks(range(len(names)), names, color=style.INK)
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.margins(x=0.03)
    style.scale(ax, False, None)
    style.mark_x(ax, references)
    style.legend(figure, *ax.get_legend_handles_labels())
    return figure
