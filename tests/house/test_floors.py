"""The floors of the house: who may import whom, what costs a reader nothing, and that a pair has one signature.

Each rule is a function from a file's text to its complaints. It runs over the whole library, and over a small bad
example, so that it is known to complain.
"""

import ast
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "minserve").rglob("*.py"))

CELLAR = {"errors", "attention_merge"}
GROUND = {"batching", "paging", "radix", "deltanet", "speculation", "quantization", "experts"}
TOP = {"__init__", "__main__", "llm", "disaggregation", "tuning", "server", "bench", "race", "doctor"}
BASE = {"torch", "numpy", "einops", "jaxtyping", "safetensors", "tqdm"}
OWNED = {
    "triton": "*_triton.py",
    "matplotlib": "minserve/plots/*.py",
}  # these few files alone may import it, and anywhere


def floor(room):
    """0 for the cellar, 1 for the ground floor, 2 for the engine's, 3 for the top."""
    return 0 if room in CELLAR else 1 if room in GROUND else 3 if room in TOP else 2


def imports(source, path):
    """Every import as (line, full name of what is imported, whether it happens when the module is imported)."""

    def visit(node, at_import):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, at_import) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = path.removesuffix(".py").split("/")[: -node.level] if node.level else []
            module = ".".join([*package, *filter(None, [node.module])])
            yield from ((node.lineno, f"{module}.{alias.name}", at_import) for alias in node.names)
        inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        typing_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, at_import and not inside and not typing_only)

    return list(visit(ast.parse(source), True))


def rule_floors(source, path):
    """Ground-floor folders never import one another, and nobody imports upwards: not even inside a function."""
    own = path.removesuffix(".py").split("/")[1]
    rooms = {name.removesuffix(".py").split("/")[1] for name in LIBRARY} | CELLAR | GROUND | TOP
    for line, name, _ in imports(source, path):
        package, _, inner = name.partition(".")
        room = inner.split(".")[0] if inner.split(".")[0] in rooms else "__init__"
        if package != "minserve" or room == own:
            continue
        if floor(room) > floor(own):
            yield f"{path}:{line}: {own} imports {room}, which is a floor above it"
        elif floor(room) == floor(own) == 1:
            yield f"{path}:{line}: {own} imports {room}: both are on the ground floor"


def rule_optional_packages(source, path):
    """What a base installation lacks is imported inside the function that needs it, or by the file that owns it."""
    for line, name, at_import in imports(source, path):
        package = name.partition(".")[0]
        if package in OWNED and not fnmatch(path, OWNED[package]):
            yield f"{path}:{line}: imports {package}; only {OWNED[package]} does"
        elif at_import and package not in {*sys.stdlib_module_names, *BASE, *OWNED, "minserve"}:
            yield f"{path}:{line}: imports {package} outside the function that needs it"


def rule_no_relative_imports(source, path):
    """One way to name a module: from minserve.paging.page_table import PageTable."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.level:
            yield f"{path}:{node.lineno}: a relative import"


def public_functions(source):
    """The public functions of a module that are no kernels, by name."""
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name[0] != "_"]
    return {f.name: f for f in functions if not any("jit" in ast.unparse(d) for d in f.decorator_list)}


def rule_pair(reference, kernel, path):
    """x_triton.py has the functions of x.py, or some of them, with the same arguments in the same order.

    It may have keyword-only arguments of its own: out and scratch.
    """
    references, kernels = public_functions(reference), public_functions(kernel)
    if not kernels:
        yield f"{path}: has no public function"
    for name, function in kernels.items():
        twin = references.get(name.removesuffix("_triton"))
        if twin is None:
            yield f"{path}: {name} has no reference of that name"
            continue
        names = [[arg.arg for arg in f.args.posonlyargs + f.args.args] for f in (twin, function)]
        defaults = [[ast.unparse(value) for value in f.args.defaults] for f in (twin, function)]
        only = [{arg.arg for arg in f.args.kwonlyargs} for f in (twin, function)]
        if names[0] != names[1] or defaults[0] != defaults[1] or not only[0] <= only[1]:
            yield f"{path}: {name}({ast.unparse(function.args)}) against its reference's ({ast.unparse(twin.args)})"


RULES = [rule_floors, rule_optional_packages, rule_no_relative_imports]


@pytest.mark.parametrize("rule", RULES)
def test_the_library_keeps_the_rule(rule):
    assert LIBRARY
    complaints = [said for path in LIBRARY for said in rule((ROOT / path).read_text(encoding="utf-8"), path)]
    assert not complaints, "\n".join(complaints)


@pytest.mark.parametrize("path", [path for path in LIBRARY if path.endswith("_triton.py")])
def test_a_pair_has_one_signature(path):
    reference = ROOT / path.replace("_triton.py", ".py")
    assert reference.exists(), f"{path} has no reference beside it"
    complaints = list(rule_pair(reference.read_text(encoding="utf-8"), (ROOT / path).read_text(encoding="utf-8"), path))
    assert not complaints, "\n".join(complaints)


BAD = [
    (rule_floors, "minserve/paging/page_table.py", "from minserve.radix.radix_tree import RadixTree", "ground floor"),
    (rule_floors, "minserve/paging/page_table.py", "def f():\n    import minserve.engine", "above"),
    (rule_floors, "minserve/paging/page_table.py", "from minserve import sampling", "above"),
    (rule_floors, "minserve/errors.py", "from minserve.paging.page_table import PageTable", "above"),
    (rule_floors, "minserve/engine.py", "from minserve import LLM", "above"),
    (rule_floors, "minserve/model/naive.py", "from minserve.tuning import cost_model", "above"),
    (rule_floors, "minserve/experts/offload.py", "from ..paging.page_table import PageTable", "ground floor"),
    (rule_optional_packages, "minserve/paging/paged_attention.py", "import triton.language as tl", "triton"),
    (rule_optional_packages, "minserve/bench.py", "def f():\n    from matplotlib import pyplot", "matplotlib"),
    (
        rule_optional_packages,
        "minserve/model/tokenizer.py",
        "try:\n    import tokenizers\nexcept ImportError: ...",
        "outside",
    ),
    (rule_optional_packages, "minserve/server/door.py", "from fastapi import FastAPI", "outside"),
    (rule_no_relative_imports, "minserve/engine.py", "from .errors import InvalidValue", "relative"),
]
GOOD = [
    (rule_floors, "minserve/paging/page_table.py", "from minserve.errors import InvalidValue\nimport torch"),
    (rule_floors, "minserve/paging/page_table.py", "from minserve.paging.free_list import FreeList"),
    (
        rule_floors,
        "minserve/hybrid/ticket.py",
        "from minserve.paging.page_table import PageTable\nimport minserve.request",
    ),
    (rule_floors, "minserve/llm.py", "from minserve import engine\nfrom minserve.tuning import planner"),
    (rule_optional_packages, "minserve/paging/paged_attention_triton.py", "import triton"),
    (rule_optional_packages, "minserve/plots/charts.py", "import matplotlib.figure"),
    (rule_optional_packages, "minserve/model/tokenizer.py", "import json, torch\ndef f():\n    import tokenizers"),
    (rule_optional_packages, "minserve/llm.py", "if TYPE_CHECKING:\n    from fastapi import FastAPI"),
]


@pytest.mark.parametrize("rule, path, source, part", BAD)
def test_the_rule_complains(rule, path, source, part):
    (complaint,) = rule(source, path)
    assert part in complaint and complaint.startswith(f"{path}:")


@pytest.mark.parametrize("rule, path, source", GOOD)
def test_the_rule_is_silent(rule, path, source):
    assert list(rule(source, path)) == []


REFERENCE = "def write(k, slots, scale=1.0, *, start):\n    ..."


@pytest.mark.parametrize(
    "kernel, num_complaints",
    [
        ("@triton.jit\ndef kernel(p): ...\ndef write(k, slots, scale=1.0, *, start, out=None): ...", 0),
        ("def write_triton(k, slots, scale=1.0, *, start): ...\ndef _launch(x): ...", 0),
        ("def write(slots, k, scale=1.0, *, start): ...", 1),
        ("def write(k, slots, scale=2.0, *, start): ...", 1),
        ("def write(k, slots, scale=1.0): ...", 1),
        ("def write(k, slots, scale=1.0, out=None, *, start): ...", 1),
        ("def put(k, slots, scale=1.0, *, start): ...", 1),
        ("@triton.jit\ndef kernel(p): ...", 1),
    ],
)
def test_the_pair_rule_compares_signatures(kernel, num_complaints):
    assert len(list(rule_pair(REFERENCE, kernel, "minserve/paging/page_write_triton.py"))) == num_complaints


def test_import_minserve_costs_torch_alone():
    code = (
        "import sys, torch; before = set(sys.modules)\n"
        "import minserve\n"
        "print(*{name.partition('.')[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names))"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert set(ran.stdout.split()) == {"minserve"}
