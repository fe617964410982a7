"""Automatic mutants of the solutions: a body with one small thing wrong, which the checks should notice.

    python tests/exercises/mutants.py [CHAPTER]      lists the survivors

Operators are swapped (+ - * / // % **, comparisons, and/or), ints and floats grow by one, min and max trade places, the
first two arguments of a call too, conditions and signs are turned round, statements are dropped, results not returned.
Scored exercises (level "open") are left out: a worse heuristic is no wrong answer.
"""

import ast
import copy
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parent))

from catalogue import ROOT, Entry, chapters, entries, load, redefined  # noqa: E402
from checks import Exercise, NeverEnds, WrongAnswer  # noqa: E402

_OPERATORS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mod,
    ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "argmin": "argmax", "argmax": "argmin"}
_MAX_LOOPS = 20_000


@dataclass(frozen=True)
class Mutant:
    """One mutant: where it is, what was changed, and the code that defines it."""

    number: str
    name: str
    line: int
    change: str
    code: object


def mutants(entry: Entry) -> Iterator[Mutant]:
    """Every mutant of an exercise's body."""
    tree = ast.parse(entry.given + entry.body)
    first_line = entry.given.count("\n") + 1
    _count_loops(tree)
    places = [place for place in _places(tree) if getattr(place[0], "lineno", 0) >= first_line]
    for node, put in places:
        for changed in _changes(node):
            put(changed)
            code = compile(ast.fix_missing_locations(tree), f"mutant of {entry.name}", "exec")
            put(node)
            yield Mutant(entry.number, entry.name, node.lineno - first_line, _describe(node, changed), code)


def _describe(node: ast.AST, changed: ast.AST) -> str:
    """What was changed, in a line."""
    before, after = (" ".join(ast.unparse(x).split()) for x in (node, changed))
    return f"{before[:60]}  ->  {after[:60]}"


def _places(tree: ast.AST) -> Iterator[tuple[ast.AST, object]]:
    """Every node below the tree with a function that puts another one in its place."""
    for parent in ast.walk(tree):
        for field, value in ast.iter_fields(parent):
            if isinstance(value, ast.AST):
                yield value, lambda new, parent=parent, field=field: setattr(parent, field, new)
            for i, item in enumerate(value if isinstance(value, list) else []):
                if isinstance(item, ast.AST):
                    yield item, lambda new, items=value, i=i: items.__setitem__(i, new)


def _changes(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that may stand in for this one."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
        yield ast.BinOp(node.right, node.op, node.left)
    elif isinstance(node, (ast.BinOp, ast.AugAssign, ast.BoolOp)) and type(node.op) in _OPERATORS:
        yield _with(node, op=_OPERATORS[type(node.op)]())
    elif isinstance(node, ast.Compare) and type(node.ops[0]) in _OPERATORS:
        yield _with(node, ops=[_OPERATORS[type(node.ops[0])](), *node.ops[1:]])
    elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        yield ast.Constant(not node.value if isinstance(node.value, bool) else node.value + 1)
    elif isinstance(node, ast.Call):
        symmetric = isinstance(node.func, ast.Name) and node.func.id in _NAMES
        if len(node.args) >= 2 and not symmetric and not any(isinstance(arg, ast.Starred) for arg in node.args):
            yield _with(node, args=[node.args[1], node.args[0], *node.args[2:]])
    elif isinstance(node, ast.Name) and node.id in _NAMES:
        yield _with(node, id=_NAMES[node.id])
    elif isinstance(node, ast.Attribute) and node.attr in _NAMES:
        yield _with(node, attr=_NAMES[node.attr])
    elif isinstance(node, ast.UnaryOp):
        yield node.operand
    elif isinstance(node, (ast.If, ast.IfExp)):
        yield _with(node, test=ast.UnaryOp(ast.Not(), node.test))
    elif isinstance(node, ast.Return) and node.value:
        yield ast.Return(None)
    if isinstance(node, (ast.Assign, ast.AugAssign, ast.Expr, ast.Continue, ast.Break)):
        yield ast.Pass()


def _with(node: ast.AST, **fields) -> ast.AST:
    """A shallow copy of a node with some fields changed."""
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def _count_loops(tree: ast.AST) -> None:
    """Make every loop call `_tick`: a mutant that loops for ever ends after a set number of turns, not of seconds."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.For, ast.While)):
            node.body.insert(0, ast.parse("_tick()").body[0])


def _ticker():
    """A function that may be called 20,000 times."""
    turns = iter(range(_MAX_LOOPS))

    def tick():
        if next(turns, None) is None:
            raise NeverEnds("the mutant loops for ever")

    return tick


def is_killed(mutant: Mutant, solution, check) -> bool:
    """Whether the check of its exercise notices a mutant."""
    module = redefined(SimpleNamespace(**vars(solution), _tick=_ticker()), mutant.code)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            check(Exercise(lambda: module))
    except (WrongAnswer, NeverEnds):
        return True
    return False


def checks_of(chapter: str) -> dict[str, object]:
    """The check functions of a chapter by exercise number."""
    module = load(ROOT / "tests" / "exercises" / f"test_{chapter}.py")
    tests = [name.split("_", 3) for name in vars(module) if name.startswith("test_")]
    return {f"{major}.{minor}": getattr(module, f"test_{major}_{minor}_{name}") for _, major, minor, name in tests}


def trial(chapter: str) -> tuple[int, list[Mutant]]:
    """Try every mutant of a chapter: how many there were, and the survivors."""
    solution, checks = load(ROOT / "solutions" / f"{chapter}.py"), checks_of(chapter)
    tried = [mutant for entry in entries(chapter).values() if entry.level != "open" for mutant in mutants(entry)]
    return len(tried), [mutant for mutant in tried if not is_killed(mutant, solution, checks[mutant.number])]


if __name__ == "__main__":
    for chapter in sys.argv[1:] or chapters():
        num_tried, survivors = trial(chapter)
        print(f"{chapter}: {num_tried - len(survivors)} of {num_tried} killed; survivors:")
        for mutant in survivors:
            print(f"  {mutant.number} {mutant.name}, line {mutant.line} of the body: {mutant.change}")
