"""A prefix tree as a picture: every node where its tokens stand in the path, with its text, its pages and its state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Protocol

import minserve.plot_style as style
from minserve.errors import InvalidValue
from minserve.plots.charts import Figure, new_figure

KINDS = MappingProxyType({"in use": style.COLOURS[0], "evictable": style.COLOURS[5]})
CHARACTER_INCHES, PAPER_INCHES, MOST_GRID_LINES, MOST_TICKS = 0.078, 6.2, 40, 12


class TreeNode(Protocol):
    """What is read of a node: its tokens [start, stop) of the path, their pages, its parent, and how many lock it."""

    start: int
    stop: int
    tokens: Sequence[int]
    pages: Sequence[int]
    parent: TreeNode | None
    num_locks: int


def radix_tree(
    title: str, nodes: Sequence[TreeNode], text_of: Callable[[Sequence[int]], str], page_size: int,
    xlabel: str = "token of the prompt (p: its pages)",
) -> Figure:  # fmt: skip
    """What sequences have in common: one box per node from its first token to its last, those that follow to its right.

    Arguments:
        nodes: all of a tree below its roots, parents first, as `tree.nodes()` gives them. Nodes that somebody locks
            have one colour, and those that may be evicted another; below a node stand its pages, where there is room.
        text_of: what some tokens say; written into the box as far as it fits.
        page_size: tokens per page; a faint line where each page of a path begins.
    Errors: InvalidValue where there is nothing to draw.
    """
    nodes = list(nodes)
    rows = _rows(nodes)
    if not nodes:
        raise InvalidValue("nodes", nodes, "at least one node")
    num_rows, num_tokens = 1 + max(rows.values()), max(node.stop for node in nodes)
    figure, (ax,) = new_figure(title, xlabel, "", height=min(7.0, 1.3 + 0.42 * num_rows), grid=None)
    drawn = {}
    for node in nodes:
        kind = "in use" if node.num_locks else "evictable"
        row, width = rows[id(node)], node.stop - node.start
        box = ax.barh(row, width, 0.52, node.start, color=KINDS[kind], edgecolor="white", linewidth=1.2)
        drawn.setdefault(kind, box)
        room = int(width / num_tokens * PAPER_INCHES / CHARACTER_INCHES)
        text = _shortened(text_of(node.tokens), room)
        ink = "white" if kind == "in use" else style.INK
        how = {"ha": "center", "va": "center", "fontsize": 8, "family": "monospace", "clip_on": False}
        style.write(ax, text, (node.start + width / 2, row), (0, 0), ink, **how)
        pages = _page_names(node.pages)
        if len(pages) <= room + 1:
            style.write(ax, pages, (node.start, row), (1, -17), style.QUIET, fontsize=7)
        if id(node.parent) in rows:
            ax.plot([node.start] * 2, [rows[id(node.parent)], row], color=style.QUIET, linewidth=1, zorder=0)
    begins = range(0, num_tokens + 1, page_size)
    if len(begins) <= MOST_GRID_LINES:
        ax.vlines(begins, -0.6, num_rows - 0.4, style.FAINT, linewidth=0.8, zorder=-1)
        ax.set_xticks(begins[:: -(-len(begins) // MOST_TICKS)])
    ax.set_ylim(num_rows - 0.3, -0.7)
    ax.set_yticks([])
    ax.spines["left"].set_visible(False)
    ax.set_xlim(-0.01 * num_tokens, 1.01 * num_tokens)
    style.scale(ax, False, None)
    style.legend(figure, [*drawn.values()], [*drawn])
    return figure


def _rows(nodes: Sequence[TreeNode]) -> dict[int, float]:
    """The row of each node by its id: leaves one below the other, a parent in the middle of its children."""
    children: dict[int, list[TreeNode]] = {}
    for node in nodes:
        children.setdefault(id(node.parent), []).append(node)
    known, rows, num_leaves = {id(node) for node in nodes}, {}, 0
    waiting = [node for node in reversed(nodes) if id(node.parent) not in known]
    while waiting:
        node = waiting[-1]
        below = children.get(id(node), [])
        missing = [child for child in below if id(child) not in rows]
        if missing:
            waiting += reversed(missing)
            continue
        waiting.pop()
        rows[id(node)] = (rows[id(below[0])] + rows[id(below[-1])]) / 2 if below else num_leaves
        num_leaves += not below
    return rows


def _shortened(text: str, room: int) -> str:
    """A text as it fits into so many characters: its beginning and its end."""
    text = text.replace("\n", "\u21b5")
    if len(text) <= room:
        return text
    return text[: (room - 1) // 2] + "\u2026" + text[len(text) - (room - 1) // 2 :] if room >= 3 else ""


def _page_names(pages: Sequence[int]) -> str:
    """Page numbers, a run of neighbours as its ends.

    >>> _page_names([4, 5, 6, 2])
    'p 4-6, 2'
    """
    runs: list[list[int]] = []
    for page in pages:
        if runs and page == runs[-1][-1] + 1:
            runs[-1].append(page)
        else:
            runs.append([page])
    named = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return "p " + ", ".join(named)
