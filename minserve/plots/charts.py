"""Charts of any quantities, the timeline of a run, and the page map. See the package for what they have in common."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any

import numpy as np

import minserve.plot_style as style
from minserve.errors import InvalidValue, MissingRequirement
from minserve.events import EventLog
from minserve.metrics import percentile, request_metrics
from minserve.spans import spans

try:
    import matplotlib.figure
    from matplotlib.axes import Axes
    from matplotlib.colors import ListedColormap, to_rgb
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator
except ImportError as error:
    raise MissingRequirement("matplotlib", "minserve.plots", "pip install 'minserve[notebooks]'") from error


class Figure(matplotlib.figure.Figure):
    """A matplotlib figure that a notebook draws when a cell ends on it; `savefig(path)` writes it to a file."""

    def _repr_png_(self) -> bytes:
        """The picture as a PNG, which is what notebooks ask a value for."""
        png = io.BytesIO()
        self.savefig(png, format="png")
        return png.getvalue()


def lines(
    title: str, series: Mapping[str, tuple[Any, Any]], xlabel: str, ylabel: str, *, log_x: bool = False,
    log_y: bool = False, points: Collection[str] = (), references: Mapping[str, float] | None = None
) -> Figure:  # fmt: skip
    """Quantities against another one, each named at its line's end.

    Arguments:
        series: per name, its x and its y, of one length. NaN leaves a gap.
        points: names drawn as points alone: measurements, beside the line of a formula.
    """
    figure, (ax,) = new_figure(title, xlabel, ylabel)
    names = []
    for name, (x, y), colour in style.coloured("series", series):
        x, y = style.vector(name, x), style.vector(name, y)
        if len(x) != len(y):
            raise InvalidValue(f"series {name!r}", (len(x), len(y)), "x and y of one length")
        line = "none" if name in points else "-"
        marker = "o" if name in points or len(x) <= 16 else None
        ax.plot(x, y, color=colour, linestyle=line, marker=marker, markersize=4.5, linewidth=1.8, label=name)
        last = np.flatnonzero(np.isfinite(y))[-1]
        names.append((name, x[last], y[last], colour))
    ax.margins(x=0.03)
    style.scale(ax, log_x, log_y)
    stops = np.unique(np.concatenate([style.vector(name, x) for name, (x, _) in series.items()]))
    if log_x and len(stops) <= 10:
        ax.set_xticks(stops)
    for name, value in (references or {}).items():
        ax.axhline(value, color=style.QUIET, linewidth=1, linestyle="--", zorder=1)
        names.append((name, ax.get_xlim()[1], value, style.QUIET))
    style.name_beside(ax, names)
    return figure


def bars(
    title: str, values: Mapping[str, Any], xlabel: str, *, log: bool = False,
    references: Mapping[str, float] | None = None
) -> Figure:  # fmt: skip
    """A few numbers to compare, each written at its bar's end.

    Arguments:
        values: per name a number; or per name a mapping of parts to numbers, a group of bars. Parts may be missing.
    """
    groups = {name: v if isinstance(v, Mapping) else {"": v} for name, v in values.items()}
    parts = dict.fromkeys(part for group in groups.values() for part in group)
    figure, (ax,) = new_figure(title, xlabel, "", height=max(2.2, 1.2 + 0.3 * len(groups) * len(parts)), grid="x")
    for place, (part, _, colour) in enumerate(style.coloured("values", parts)):
        shift = 0.8 * ((place + 0.5) / len(parts) - 0.5)
        rows = [row + shift for row, group in enumerate(groups.values()) if part in group]
        lengths = [float(group[part]) for group in groups.values() if part in group]
        drawn = ax.barh(rows, lengths, 0.7 / len(parts), color=colour, label=part)
        values = [style.short(length) for length in lengths]
        ax.bar_label(drawn, values, padding=3, fontsize=8.5, bbox={"fc": "white", "ec": "none", "pad": 1})
    ax.set_yticks(range(len(groups)), list(groups), color=style.INK)
    ax.invert_yaxis()
    ax.margins(x=0.1)
    style.scale(ax, log, None)
    style.mark_x(ax, references)
    style.legend(figure, *ax.get_legend_handles_labels())
    return figure


def stacked_bars(
    title: str, stacks: Mapping[str, Mapping[str, float]], xlabel: str, ylabel: str, *, share: bool = False
) -> Figure:
    """What a total is made of, and how that changes: one bar per name, its parts stacked, the total written on top.

    Arguments:
        stacks: per bar, its parts and their sizes, >= 0; a part that a bar lacks counts as 0.
        share: make every bar 100 per cent, for totals that differ by orders of magnitude.
    """
    figure, (ax,) = new_figure(title, xlabel, ylabel)
    parts = dict.fromkeys(part for stack in stacks.values() for part in stack)
    sizes = np.array([[float(stack.get(part, 0)) for part in parts] for stack in stacks.values()])
    totals = sizes.sum(axis=-1, keepdims=True)
    sizes = 100 * sizes / np.where(totals > 0, totals, 1) if share else sizes
    bottoms = np.cumsum(sizes, axis=-1) - sizes
    names = []
    for j, (part, _, colour) in enumerate(style.coloured("stacks", parts)):
        ax.bar(range(len(stacks)), sizes[:, j], 0.72, bottoms[:, j], color=colour, ec="white", lw=0.6, label=part)
        names.append((part, len(stacks) - 0.62, bottoms[-1, j] + sizes[-1, j] / 2, colour))
    for i, total in enumerate(totals[:, 0]):
        style.write(ax, style.short(total), (i, sizes[i].sum()), (0, 3), style.INK, ha="center", va="bottom")
    ax.set_xticks(range(len(stacks)), [str(name) for name in stacks])
    ax.margins(x=0.02, y=0.1)
    style.scale(ax, None, False)
    style.name_beside(ax, names)
    return figure


def distribution(title: str, samples: Mapping[str, Any], xlabel: str, *, log_x: bool = False) -> Figure:
    """How a quantity is spread: for every value the share at or below it, with the median and the 99th percentile.

    Arguments: samples, per name the measured values, at least one and none NaN, in any order.
    """
    figure, (ax,) = new_figure(title, xlabel, "share at or below (%)")
    for name, values, colour in style.coloured("samples", samples):
        values = np.sort(style.vector(name, values))
        marks = [percentile(values, q) for q in (50, 99)]
        text = f"{name}\np50 {style.short(marks[0])}   p99 {style.short(marks[1])}"
        shares = np.linspace(0, 100, len(values) + 1)
        ax.step(np.append(values[0], values), shares, where="post", color=colour, linewidth=1.8, label=text)
        ax.plot(marks, (50, 99), "o", color=colour, markersize=6, markeredgecolor="white", zorder=3)
    style.scale(ax, log_x, False)
    ax.set_yticks((0, 25, 50, 75, 99))
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=9, labelspacing=1)
    return figure


def histogram(
    title: str, samples: Any, xlabel: str, ylabel: str, *, bins: int = 30, share: bool = False, log_x: bool = False,
    references: Mapping[str, float] | None = None
) -> Figure:  # fmt: skip
    """Where values lie: how many fall into each of equal bins, of equal ratio on a logarithmic axis.

    Arguments:
        samples: values, or values per name, drawn over one another in the same bins.
        share: per cent of a name's values, for names with different numbers of values.
    """
    samples = samples if isinstance(samples, Mapping) else {"": samples}
    figure, (ax,) = new_figure(title, xlabel, ylabel)
    named = {name: style.vector(name or "samples", values) for name, values in samples.items()}
    everything = style.vector("samples", np.concatenate([[], *named.values()]))
    if not np.isfinite(everything).all() or (log_x and everything.min() <= 0):
        raise InvalidValue("samples", everything.tolist(), "finite, and > 0 on a logarithmic axis")
    edges = np.histogram_bin_edges(np.log10(everything) if log_x else everything, bins)
    edges = 10**edges if log_x else edges
    for name, values, colour in style.coloured("samples", named):
        weights = np.full(len(values), 100 / len(values) if share else 1)
        ax.hist(values, edges, weights=weights, histtype="stepfilled", fc=(colour, 0.3), ec=colour, lw=1.5, label=name)
    style.scale(ax, log_x, False)
    style.mark_x(ax, references)
    style.legend(figure, *ax.get_legend_handles_labels())
    return figure


def timeline(title: str, logs: EventLog | Mapping[str, EventLog]) -> Figure:
    """What every request was doing when: one row per request in order of arrival, one bar per slice, from its events.

    Arguments: logs, one log, or logs by name side by side on one scale. A thin line: admitted, but not running.
    """
    logs = logs if isinstance(logs, Mapping) else {"": logs}
    lives = {name: request_metrics(log) for name, log in logs.items()}
    num_rows = max((len(life) for life in lives.values()), default=0)
    if not num_rows:
        raise InvalidValue("logs", logs, "at least one log, with at least one request in it")
    height = min(6.0, max(2.4, 1.4 + 0.17 * num_rows))
    figure, axes = new_figure(title, "time (s)", "request", height=height, num_columns=len(logs), grid="x")
    used = {}
    for ax, (name, log) in zip(axes, logs.items(), strict=True):
        life = dict(sorted(lives[name].items(), key=lambda item: item[1].arrived))
        row = {request_id: place for place, request_id in enumerate(life)}
        for request_id, m in life.items():
            if m.admitted is not None:
                end_s = log.end_s if m.finished is None else m.finished
                ax.hlines(row[request_id], m.admitted, end_s, style.QUIET, lw=0.8, zorder=0)
        bars_of: dict[tuple[Hashable, str], list[tuple[float, float]]] = {}
        for span in spans(log):
            bars_of.setdefault((span.request_id, span.phase), []).append((span.start_s, span.stop_s - span.start_s))
        for (request_id, phase), pieces in bars_of.items():
            if phase not in style.PHASES:
                raise InvalidValue("phase", phase, "one of " + ", ".join(style.PHASES))
            used[phase] = Patch(color=style.PHASES[phase])
            edge = "white" if phase == "prefill" else style.PHASES[phase]
            ax.broken_barh(pieces, (row[request_id] - 0.37, 0.74), fc=style.PHASES[phase], ec=edge, lw=0.5)
        ax.set_title(name, loc="left", fontsize=9.5, color=style.INK)
        ax.set_yticks(range(len(row)), [str(i) for i in row] if len(row) <= 24 else [])
        ax.set_ylim(num_rows - 0.5, -0.5)
    style.legend(figure, list(used.values()), list(used))
    return figure


def heatmap(
    title: str, values: Any, xlabel: str, ylabel: str, label: str, *, xticks: Sequence[Any] | None = None,
    yticks: Sequence[Any] | None = None, centre: float | None = None
) -> Figure:  # fmt: skip
    """A table as colours, with its numbers written in where they fit.

    Arguments:
        values: [rows, columns]; row 0 is at the top.
        label: what the colour shows, with its unit.
        xticks, yticks: names of columns and rows, instead of their numbers.
        centre: the neutral value, if there is one: blue below, red above.
    """
    grid = np.asarray(values, dtype=np.float64)
    if grid.ndim != 2 or not np.isfinite(grid).any():
        raise InvalidValue("values", values, "[rows, columns], with at least one finite number")
    figure, (ax,) = new_figure(title, xlabel, ylabel, height=min(6.0, 1.7 + 0.3 * len(grid)), grid=None)
    reach = None if centre is None else np.nanmax(np.abs(grid - centre))
    low, high = (None, None) if centre is None else (centre - reach, centre + reach)
    image = ax.imshow(grid, cmap="Blues" if centre is None else "RdBu_r", vmin=low, vmax=high, aspect="auto")
    bar = figure.colorbar(image, ax=ax, pad=0.02, format=style.short)
    style.dress(bar.ax, "", label, None)
    bar.outline.set_visible(False)
    if np.nanmin(grid) < np.nanmax(grid):
        bar.ax.set_ylim(np.nanmin(grid), np.nanmax(grid))
    for i, j in np.argwhere(np.isfinite(grid)) if grid.shape[1] <= 16 and grid.size <= 200 else ():
        text = f"{grid[i, j]:.2g}" if abs(grid[i, j]) < 10 else style.short(grid[i, j])
        style.write_on(ax, text, (j, i), image.to_rgba(grid[i, j]))
    for axis, ticks in ((ax.xaxis, xticks), (ax.yaxis, yticks)):
        if ticks is None:
            axis.set_major_locator(MaxNLocator(integer=True))
        else:
            axis.set_ticks(range(len(ticks)), [str(tick) for tick in ticks])
    return figure


def page_map(
    title: str, moments: Sequence[Sequence[Hashable | None]], xlabel: str = "step", ylabel: str = "page",
    *, quiet: Collection[Hashable] = ()
) -> Figure:  # fmt: skip
    """Who owns which page, over time: one column per moment, one row per page, white where it is free.

    Arguments:
        moments: for each moment, for each page, its owner's name, or None if it is free.
        quiet: owners drawn in grey, such as "cached".
    """
    owners = dict.fromkeys(owner for moment in moments for owner in moment if owner is not None)
    if len({len(moment) for moment in moments}) != 1:
        raise InvalidValue("moments", moments, "at least one, with the same pages in each")
    shades = {None: "white"} | {owner: shade for owner, _, shade in style.coloured("moments", owners)}
    shades |= {owner: "#C4C4C4" for owner in owners if owner in quiet}
    number = {owner: i for i, owner in enumerate(shades)}
    grid = np.array([[number[owner] for owner in moment] for moment in moments]).T
    figure, (ax,) = new_figure(title, xlabel, ylabel, height=min(6.0, max(2.4, 1.3 + 0.14 * len(grid))), grid=None)
    ax.pcolormesh(grid, cmap=ListedColormap(list(shades.values())), vmax=len(shades), vmin=0, ec=style.FAINT, lw=0.4)
    for owner in owners:
        row = (grid == number[owner]).sum(axis=1).argmax()
        held = np.flatnonzero(grid[row] == number[owner])
        style.write_on(ax, str(owner), (held[len(held) // 2] + 0.5, row + 0.5), to_rgb(shades[owner]))
    ax.invert_yaxis()
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    return figure


def new_figure(
    title: str, xlabel: str, ylabel: str, *, height: float = 3.5, num_columns: int = 1, grid: str | None = "y"
) -> tuple[Figure, Sequence[Axes]]:
    """An empty figure in the house style, with axes side by side that share both scales."""
    if not title.endswith("?"):
        raise InvalidValue("title", title, "the question that the picture answers, ending in '?'")
    figure = Figure(figsize=(7, height), dpi=110, layout="constrained")
    figure.suptitle(textwrap.fill(title, 74), x=0.012, ha="left", fontsize=11, fontweight="bold", color=style.INK)
    axes = figure.subplots(1, num_columns, sharex=True, sharey=True, squeeze=False)[0]
    for ax in axes:
        style.dress(ax, xlabel, ylabel if ax is axes[0] else "", grid)
    return figure, axes
