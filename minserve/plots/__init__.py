"""Every picture of the book, each one call: measured data in, a `Figure` out, its title the question that it answers.

The house style (`plot_style.py`): colours that every kind of eye tells apart, in one order; a thing's name beside the
thing where there is room; grey for what is only context; a unit on every axis. A figure is a value: nothing is shown or
stored behind the caller's back, and a notebook shows the one that a cell ends on.

The same in every function: `title` is the question, ending in "?"; labels say what an axis shows, with its unit; data
are sequences, arrays or tensors; `log`, `log_x`, `log_y` make an axis logarithmic; `references` are values by name,
each marked with a dashed line. Errors: InvalidValue where the title is no question or there is nothing to draw.
"""

from minserve.plots.charts import (
    Figure,
    bars,
    distribution,
    heatmap,
    histogram,
    lines,
    page_map,
    stacked_bars,
    timeline,
)
from minserve.plots.reuse import interval_map
from minserve.plots.sharing import radix_tree
from minserve.plots.speculation import draft_steps

__all__ = [
    "Figure", "bars", "distribution", "draft_steps", "heatmap", "histogram", "interval_map", "lines", "page_map",
    "radix_tree", "stacked_bars", "timeline",
]  # fmt: skip
