"""What exercises there are, read from the solutions, and how their files are loaded: as they are or with a mistake."""

import ast
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace

from checks import Mistake

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Entry:
    """One exercise: "1.3", its chapter's file name, its function or class, what it costs, and the source of its answer.

    `given` is the source up to the body, `body` from there on.
    """

    number: str
    chapter: str
    name: str
    minutes: int
    level: str
    given: str
    body: str


@dataclass(frozen=True)
class Wrong:
    """A usual mistake: the solution of exercise `number` with some words of its body replaced."""

    number: str
    name: str
    hint: str
    replace: dict[str, str]


def load(path: Path) -> ModuleType:
    """Import a file by its path, anew."""
    spec = importlib.util.spec_from_file_location(f"loaded_{path.parent.name}_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # a dataclass looks its module up here
    spec.loader.exec_module(module)
    return module


def chapters() -> list[str]:
    """The file names of the chapters that have exercises, in order."""
    return sorted(path.stem for path in (ROOT / "solutions").glob("ch*.py"))


def entries(chapter: str) -> dict[str, Entry]:
    """The exercises of a chapter by number, in order."""
    marker, found = load(ROOT / "exercises" / "sync.py").MARKER, {}
    text = (ROOT / "solutions" / f"{chapter}.py").read_text("utf-8")
    for node in ast.parse(text).body:
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            continue
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        source = "\n".join(text.splitlines()[first - 1 : node.end_lineno])
        if match := marker.search(source):
            _, number, minutes, level, _ = match.groups()
            if number in found:
                raise ValueError(f"{chapter}: {found[number].name} and {node.name} both have the number {number}")
            cut = match.start()
            found[number] = Entry(number, chapter, node.name, int(minutes), level, source[:cut], source[cut:])
    return found


def wrong_solutions(chapter: str) -> list[Wrong]:
    """The known wrong solutions of a chapter."""
    path = Path(__file__).parent / "wrong" / f"{chapter}.py"
    return [Wrong(number, *row) for number, rows in load(path).WRONG.items() for row in rows] if path.exists() else []


def also_right(chapter: str) -> list[Wrong]:
    """Other ways to be right, if the chapter lists some: these the checks must accept."""
    rows = getattr(load(Path(__file__).parent / "wrong" / f"{chapter}.py"), "ALSO_RIGHT", {})
    return [Wrong(number, "no mistake", "", replace) for number, ways in rows.items() for replace in ways]


def with_mistake(solution: ModuleType, entry: Entry, wrong: Wrong) -> SimpleNamespace:
    """The solution's module with one exercise answered wrongly."""
    body = entry.body
    for old, new in wrong.replace.items():
        if (num_found := body.count(old)) != 1:
            raise ValueError(f"wrong solution {wrong.name}: {entry.name} has {old!r} {num_found} times, not once")
        body = body.replace(old, new)
    return redefined(solution, compile(entry.given + body, f"wrong {wrong.name}", "exec"))


def redefined(module: ModuleType, code) -> SimpleNamespace:
    """A copy of a module's names in which `code` has redefined some; the module itself stays as it is."""
    names = dict(vars(module))
    exec(code, names)
    return SimpleNamespace(**names)


def mistakes_of(chapter: str) -> Callable[[str], list[Mistake]]:
    """A function from an exercise's name to its known mistakes, for `checks.Exercise`."""
    solution, known = load(ROOT / "solutions" / f"{chapter}.py"), entries(chapter)

    def mistakes(name: str) -> list[Mistake]:
        rows = [(wrong, known[wrong.number]) for wrong in wrong_solutions(chapter) if known[wrong.number].name == name]
        return [Mistake(w.name, w.hint, getattr(with_mistake(solution, entry, w), name)) for w, entry in rows]

    return mistakes


def target(chapter: str, name: str) -> ModuleType | SimpleNamespace:
    """What `--target` names: "exercises", "solutions", or "wrong:NAME", the solutions with that mistake in them."""
    if not name.startswith("wrong:"):
        return load(ROOT / name / f"{chapter}.py")
    solution, known = load(ROOT / "solutions" / f"{chapter}.py"), entries(chapter)
    for wrong in wrong_solutions(chapter):
        if wrong.name == name.removeprefix("wrong:"):
            return with_mistake(solution, known[wrong.number], wrong)
    return solution
