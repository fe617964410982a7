"""Shapes are strings: `Float[Tensor, slots * state]` is a product of two names, and checks nothing."""

import ast
from pathlib import Path

import pytest

LIBRARY = sorted((Path(__file__).resolve().parents[2] / "minserve").rglob("*.py"))
KINDS = {"Float", "Int", "Bool"}


def shapes_that_are_no_strings(source):
    """The annotations whose shape is an expression, as text."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id in KINDS:
            shape = node.slice.elts[-1] if isinstance(node.slice, ast.Tuple) else node.slice
            if not (isinstance(shape, ast.Constant) and isinstance(shape.value, str)):
                yield ast.unparse(node)


@pytest.mark.parametrize("path", LIBRARY, ids=lambda path: path.stem)
def test_every_shape_is_a_string(path):
    assert not list(shapes_that_are_no_strings(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize("bad", ["def f(x: Float[Tensor, slots * state]): ...", "x: Int[Tensor, rows]"])
def test_a_shape_that_is_an_expression_is_found(bad):
    assert len(list(shapes_that_are_no_strings(bad))) == 1
