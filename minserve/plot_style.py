"""The house style of the pictures: colours, axes, numbers and names, for `plots.py` to draw with.

Colours are Okabe and Ito's, told apart by every kind of eye, always in the same order. Everything here works on axes
that it is given, so that matplotlib is imported in `plots.py` alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from minserve.errors import InvalidValue

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#6A51A3", "#8C6D31")
INK, QUIET, FAINT = "#222222", "#6E6E6E", "#E6E6E6"
PHASES = MappingProxyType({"waiting": "#D4D4D4", "prefill": COLOURS[4], "decode": COLOURS[0], "padded": COLOURS[1]})
UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def coloured(field: str, named: Mapping[Any, Any]) -> Iterator[tuple[Any, Any, str]]:
    """Each name of a mapping with its value and its colour; after the eighth, the same colours paler.

    Errors: InvalidValue naming `field` if there is nothing in it.
    """
    if not named:
        raise InvalidValue(field, named, "at least one thing to draw")
    for number, (name, value) in enumerate(named.items()):
        pale, base = 0.45 * (number // len(COLOURS) % 2), COLOURS[number % len(COLOURS)]
        parts = (int(base[i : i + 2], 16) for i in (1, 3, 5))
        yield name, value, "#" + "".join(f"{round(part + pale * (255 - part)):02x}" for part in parts)


def vector(name: str, values: Any) -> np.ndarray:
    """Values as one float array; InvalidValue naming them if there is not one finite number among them."""
    array = np.asarray(values, dtype=np.float64).reshape(-1)
    if not np.isfinite(array).any():
        raise InvalidValue(name, values, "at least one finite number")
    return array


def short(value: float, position: int | None = None) -> str:
    """A number as a tick or a bar's end shows it.

    Arguments: value, any; position, which matplotlib passes with a tick and nobody needs.

    >>> [short(x) for x in (0, 0.0125, 7.0, 8127, 12_345, 2_400_000_000_000)]
    ['0', '0.0125', '7', '8,127', '12.3k', '2.4T']
    """
    size, letter = next(((size, letter) for size, letter in UNITS if abs(value) >= max(size, 1e4)), (1, ""))
    value /= size
    return f"{value:,.0f}{letter}" if 999.5 <= abs(value) < 1e5 else f"{value:.3g}{letter}"


def dress(ax: Any, xlabel: str, ylabel: str, grid: str | None) -> None:
    """Take the chart junk off bare axes: no box, no tick marks, a faint grid behind, along the axis named or none."""
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color("#BDBDBD")
    ax.tick_params(which="both", length=0, pad=5, labelsize=9, labelcolor=QUIET)
    ax.set_xlabel(xlabel, fontsize=9.5, color=INK)
    ax.set_ylabel(ylabel, fontsize=9.5, color=INK)
    ax.set_axisbelow(True)
    if grid:
        ax.grid(axis=grid, color=FAINT, linewidth=0.8)


def scale(ax: Any, log_x: bool | None, log_y: bool | None) -> None:
    """Linear or logarithmic axes with short numbers; None leaves an axis as it is (it shows names)."""
    for axis, log, (low, high) in ((ax.xaxis, log_x, ax.get_xlim()), (ax.yaxis, log_y, ax.get_ylim())):
        if log:
            set_scale = ax.set_xscale if axis is ax.xaxis else ax.set_yscale
            set_scale("log")
            low, high = ax.get_xlim() if axis is ax.xaxis else ax.get_ylim()
            if high / low < 300:
                axis.get_major_locator().set_params(subs=(1, 2, 5))
            axis.set_minor_formatter(lambda value, position: "")
        if log is not None:
            axis.set_major_formatter(short)


def write(ax: Any, text: str, at: tuple[float, float], shift: tuple[float, float], colour: str, **how: Any) -> None:
    """Write small text at a point of the data, shifted by points of 1/72 inch; it may leave the axes."""
    ax.annotate(text, at, xytext=shift, textcoords="offset points", color=colour, **{"fontsize": 9} | how)


def write_on(ax: Any, text: str, at: tuple[float, float], rgb: Sequence[float]) -> None:
    """Write small text onto a patch of this colour, white or dark, whichever reads better."""
    ink = "white" if np.dot(rgb[:3], (0.3, 0.6, 0.1)) < 0.6 else INK
    write(ax, text, at, (0, 0), ink, ha="center", va="center", fontsize=8)


def name_beside(ax: Any, names: Sequence[tuple[str, float, float, str]]) -> None:
    """Write names beside their points, or in the right margin where they would reach it, none over another.

    Arguments: names, each (text, x, y, colour) with x and y in data.
    """
    ax.set_xlim(ax.get_xlim())
    ax.set_ylim(ax.get_ylim())
    places = ax.transAxes.inverted().transform(ax.transData.transform([(x, y) for _, x, y, _ in names]))
    widths = np.array([0.016 * len(text) for text, *_ in names])  # of the axes; a letter is about a tenth of an inch
    sides = np.where(places[:, 0] + widths > 0.95, 1, places[:, 0])
    gap = 13 / (72 * 0.72 * ax.figure.get_figheight())
    for side in np.unique(sides):
        column = np.flatnonzero(sides == side)
        heights = spread_out(places[column, 1], gap)
        for i, height in zip(column, heights, strict=True):
            paper = {"fc": "white", "ec": "none", "alpha": 0.6 * (side < 1), "pad": 0.5}
            how = {"xycoords": "axes fraction", "va": "center", "bbox": paper}
            write(ax, names[i][0], (side, height), (7, 0), names[i][3], **how)


def spread_out(heights: Sequence[float], gap: float) -> np.ndarray:
    """Heights moved apart to at least a gap, in the same order, none moved above 1 or the highest.

    >>> spread_out([0.5, 0.0, 0.52, 1.0, 1.0], 0.125).tolist()
    [0.5, 0.0, 0.625, 0.875, 1.0]
    """
    moved, order = np.array(heights, dtype=np.float64), np.argsort(heights, kind="stable")
    for low, high in itertools.pairwise(order):
        moved[high] = max(moved[high], moved[low] + gap)
    moved[order[-1]] = min(moved[order[-1]], max(1.0, max(heights)))
    for high, low in itertools.pairwise(order[::-1]):
        moved[low] = min(moved[low], moved[high] - gap)
    return moved


def mark_x(ax: Any, references: Mapping[str, float] | None) -> None:
    """Mark values of x with dashed lines, their names above the axes."""
    for name, value in (references or {}).items():
        ax.axvline(value, color=QUIET, linewidth=1, linestyle="--")
        write(ax, name, (value, 1), (0, 3), QUIET, xycoords=("data", "axes fraction"), ha="center")


def legend(figure: Any, handles: Sequence[Any], names: Sequence[str]) -> None:
    """A row of names below the axes, if there is more than one name to tell apart."""
    if len(names) > 1:
        where = {"loc": "outside lower left", "ncols": len(names), "handlelength": 1.1, "columnspacing": 1.4}
        figure.legend(handles, names, frameon=False, fontsize=9, labelcolor=INK, **where)
