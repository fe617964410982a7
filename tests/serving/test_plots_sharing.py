"""The prefix tree as a picture: every node where its tokens stand, below its parent, in the colour of its state."""

from itertools import combinations

import pytest

from minserve.errors import InvalidValue
from minserve.paging.page_table import PageAllocator
from minserve.radix.radix_tree import RadixTree

matplotlib = pytest.importorskip("matplotlib")
plots = pytest.importorskip("minserve.plots")
sharing = pytest.importorskip("minserve.plots.sharing")

TEXTS = (b"def area(width, height):", b"def area(radius):", b"def add(a, b):", b"class Point:")
SIZE = 4


@pytest.fixture
def tree():
    allocator = PageAllocator(60)
    tree = RadixTree(allocator, SIZE)
    for text in TEXTS:
        tree.insert(text, allocator.take(-(-len(text) // SIZE)))
    return tree


def draw(nodes):
    figure = plots.radix_tree("What do four prompts share?", nodes, lambda tokens: bytes(tokens).decode(), SIZE)
    figure.canvas.draw()
    return figure, figure.axes[0]


def boxes(ax):
    """Every box that is drawn: its first token, its end, its row, its colour."""
    found = [(box.get_x(), box.get_x() + box.get_width(), box.get_y() + box.get_height() / 2,
              matplotlib.colors.to_hex(box.get_facecolor())) for box in ax.patches]  # fmt: skip
    return [(round(start), round(stop), row, colour) for start, stop, row, colour in found]


def test_every_node_stands_where_its_tokens_do_and_no_two_overlap(tree):
    nodes, (figure, ax) = list(tree.nodes()), draw(tree.nodes())
    assert sorted(box[:2] for box in boxes(ax)) == sorted((node.start, node.stop) for node in nodes)
    for (start, stop, row, _), (other_start, other_stop, other_row, _) in combinations(boxes(ax), 2):
        assert abs(row - other_row) > 0.6 or other_start >= stop or start >= other_stop
    assert figure.get_suptitle() == "What do four prompts share?" and "token" in ax.get_xlabel()
    texts = [text.get_text() for text in ax.texts]
    assert {"class Point:", "idth, height):"} & {*texts} and "p 0-1" in texts


@pytest.mark.parametrize("locked", [b"def area(w", b"def a", b"class Point:", b"def add(a, b):"])
def test_what_is_locked_has_the_colour_of_what_is_in_use(tree, locked):
    tree.lock(tree.match(locked))
    colour_of = {kind: colour.lower() for kind, colour in sharing.KINDS.items()}
    wanted = [(node.start, node.stop, colour_of["in use" if node.num_locks else "evictable"]) for node in tree.nodes()]
    figure, ax = draw(tree.nodes())
    assert sorted((start, stop, colour) for start, stop, _, colour in boxes(ax)) == sorted(wanted)
    assert {text.get_text() for text in figure.legends[0].get_texts()} == {"in use", "evictable"}


def test_a_text_that_does_not_fit_keeps_its_ends(tree):
    assert sharing._shortened("a long line\nof text", 9) == "a lo\u2026text" and sharing._shortened("abcdef", 2) == ""
    assert sharing._shortened("two\nlines", 30) == "two\u21b5lines"


def test_nothing_to_draw_is_a_named_error():
    with pytest.raises(InvalidValue, match="nodes"):
        draw([])
