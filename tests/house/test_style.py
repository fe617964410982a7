"""The style of the house: sizes, names, docstrings, state, and tests that can fail.

Each rule is a function from a file's text to its complaints. It runs over every file that it is about, and over a small
bad example, so that it is known to complain.
"""

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PATTERNS = ("minserve/**/*.py", "solutions/*.py", "tests/**/*.py", "exercises/[!c]*.py")  # ch*.py are the reader's
FILES = sorted({path.relative_to(ROOT).as_posix() for pattern in PATTERNS for path in ROOT.glob(pattern)})

MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_KERNEL_LINES = 300, 40, 60
VAGUE_NAME = re.compile(r"(^|_)(utils?|helpers?|misc|v\d+)$|^(base|common|stuff|tools)$")
MUTABLE_CALLS = {
    "list",
    "dict",
    "set",
    "bytearray",
    "defaultdict",
    "deque",
    "Counter",
    "OrderedDict",
    "SimpleNamespace",
}
MUTABLE_CALLS |= {"zeros", "ones", "empty", "full", "tensor", "arange", "Lock", "Generator"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def nodes(source, *kinds):
    """Every node of these kinds, in the order of their lines."""
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]
    return sorted(found, key=lambda node: node.lineno)


def last_name(node):
    """The last part of a dotted name: c of a.b.c, and of a.b.c(...)."""
    node = node.func if isinstance(node, ast.Call) else node
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def rule_file_length(source, path):
    """One noun per file: about 150 lines, never over 300."""
    num_lines = len(source.splitlines())
    if num_lines > MAX_FILE_LINES:
        yield f"{path}:{num_lines}: over {MAX_FILE_LINES} lines"


def rule_function_length(source, path):
    """A function's signature and body have at most 40 lines, a kernel's 60; its docstring is not counted."""
    for node in nodes(source, *FUNCTIONS):
        first = node.body[0]
        num_lines = node.end_lineno - node.lineno + 1
        if ast.get_docstring(node) is not None:
            num_lines -= first.end_lineno - first.lineno + 1
        kernel = path.endswith("_triton.py") and any("jit" in ast.unparse(d) for d in node.decorator_list)
        if num_lines > (MAX_KERNEL_LINES if kernel else MAX_FUNCTION_LINES):
            yield f"{path}:{node.lineno}: {node.name} has {num_lines} lines"


def rule_file_name(source, path):
    """A file or folder is named after what is in it."""
    for part in path.removesuffix(".py").split("/"):
        if VAGUE_NAME.search(part):
            yield f"{path}:1: {part} says nothing about what is in it"


def rule_nothing_left_to_do(source, path):
    """What is missing is an issue, not a comment."""
    for number, line in enumerate(source.splitlines(), start=1):
        if re.search(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X|HA" + r"CK)\b", line):
            yield f"{path}:{number}: {line.strip()}"


def is_mutable(value):
    """Whether an expression makes something that can be changed afterwards, or holds such a thing."""
    if isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp):
        return True
    if isinstance(value, ast.Tuple):
        return any(map(is_mutable, value.elts))
    if isinstance(value, ast.BinOp | ast.IfExp):
        return any(is_mutable(child) for child in ast.iter_child_nodes(value))
    if isinstance(value, ast.Call) and last_name(value) == "MappingProxyType":
        return any(isinstance(a, ast.Dict) and any(map(is_mutable, a.values)) for a in value.args)
    return isinstance(value, ast.Call) and last_name(value) in MUTABLE_CALLS


def rule_no_unowned_state(source, path):
    """No mutable variable of a module or class, no `global`, no cache hidden behind one of their functions."""

    def statements(node):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt | ast.ExceptHandler):
                yield child
                yield from () if isinstance(child, FUNCTIONS) else statements(child)

    for node in statements(ast.parse(source)):
        if isinstance(node, FUNCTIONS) and {last_name(d) for d in node.decorator_list} & {"cache", "lru_cache"}:
            yield f"{path}:{node.lineno}: {node.name} keeps results where nobody owns them"
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None and is_mutable(node.value):
            names = ast.unparse(node).partition(" = ")[0].partition(":")[0]
            if names != "__all__":
                yield f"{path}:{node.lineno}: {names} can be changed; a tuple, frozenset or MappingProxyType cannot"
    for node in nodes(source, ast.Global):
        yield f"{path}:{node.lineno}: global {', '.join(node.names)}"


def rule_no_environment(source, path):
    """No variable of the environment is read. To set some, or to hand all to a child process, is not to read."""
    tree = list(ast.walk(ast.parse(source)))
    subscripts = [node for node in tree if isinstance(node, ast.Subscript)]
    set_here = [node.value for node in subscripts if isinstance(node.ctx, ast.Store | ast.Del)]
    set_here += [node.value for node in tree if isinstance(node, ast.Attribute) and node.attr == "update"]
    dicts = [node for node in tree if isinstance(node, ast.Dict)]
    handed_on = [value for node in dicts for key, value in zip(node.keys, node.values, strict=True) if key is None]
    for node in tree:
        names = (
            [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else [getattr(node, "attr", "")]
        )
        if {"environ", "environb", "getenv"} & set(names) and node not in set_here + handed_on:
            yield f"{path}:{node.lineno}: reads the environment"


def rule_no_assert(source, path):
    """What load or input can cause is a named error; an assert vanishes with -O."""
    for node in nodes(source, ast.Assert):
        yield f"{path}:{node.lineno}: an assert in the library"


def rule_no_float_call(source, path):
    """x.float() makes float64 mode lose 29 bits: x.to(torch.promote_types(x.dtype, torch.float32)) does not."""
    for node in nodes(source, ast.Call):
        if isinstance(node.func, ast.Attribute) and node.func.attr == "float" and not node.args:
            yield f"{path}:{node.lineno}: {ast.unparse(node)}"


def rule_docstrings(source, path):
    """Every module, and every public class, function and method in it, says what it is for."""
    waiting = [(ast.parse(source), "the module")]
    while waiting:
        node, name = waiting.pop()
        if not (ast.get_docstring(node) or "").strip():
            yield f"{path}:{getattr(node, 'lineno', 1)}: {name} has no docstring"
        if isinstance(node, ast.Module | ast.ClassDef):
            named = [child for child in node.body if isinstance(child, (ast.ClassDef, *FUNCTIONS))]
            waiting += [(child, child.name) for child in named if not child.name.startswith("_")]


def rule_tests_can_fail(source, path):
    """A test asserts, expects an error, or calls a function named check... or assert... that does."""
    for node in nodes(source, *FUNCTIONS):
        inside = list(ast.walk(node))
        calls = {last_name(call) for call in inside if isinstance(call, ast.Call)}
        checked = any(re.match(r"_?(check|assert|raises$|warns$|fail$)", name) for name in calls)
        if node.name.startswith("test") and not checked and not any(isinstance(n, ast.Assert) for n in inside):
            yield f"{path}:{node.lineno}: {node.name} asserts nothing"


RULES = {
    "": [rule_file_length, rule_function_length, rule_file_name, rule_nothing_left_to_do],
    "minserve/": [rule_no_unowned_state, rule_no_environment, rule_no_assert, rule_no_float_call, rule_docstrings],
    "tests/": [rule_tests_can_fail],
}


@pytest.mark.parametrize("folder, rule", [(folder, rule) for folder, rules in RULES.items() for rule in rules])
def test_every_file_keeps_the_rule(folder, rule):
    files = [path for path in FILES if path.startswith(folder)]
    assert files
    complaints = [said for path in files for said in rule((ROOT / path).read_text(encoding="utf-8"), path)]
    assert not complaints, "\n".join(complaints)


def test_ruff_finds_nothing():
    if importlib.util.find_spec("ruff") is None:
        pytest.skip("ruff is not installed: pip install 'minserve[dev]'")
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--output-format=concise", *FILES]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


LONG_BODY = "\n".join("    x = 1" for _ in range(60))
BAD = [
    (rule_file_length, "x = 1\n" * 301),
    (rule_function_length, f"def f():\n{LONG_BODY}"),
    (rule_function_length, f"class C:\n  async def f(self):\n    'It.'\n{LONG_BODY}"),
    (rule_nothing_left_to_do, "x = 1  # TO" + "DO: two"),
    (rule_no_unowned_state, "CACHE = {}"),
    (rule_no_unowned_state, "NAMES: list[str] = []"),
    (rule_no_unowned_state, "A, B = [1], 2"),
    (rule_no_unowned_state, "PAIRS = ((1, [2]), (3, [4]))"),
    (rule_no_unowned_state, "SEEN = set()"),
    (rule_no_unowned_state, "WAITING = collections.deque()"),
    (rule_no_unowned_state, "TABLE = torch.zeros(3)"),
    (rule_no_unowned_state, "TABLE = MappingProxyType({'a': []})"),
    (rule_no_unowned_state, "class C:\n    'It.'\n    seen = {x for x in ()}"),
    (rule_no_unowned_state, "try:\n    import a\nexcept ImportError:\n    found = []"),
    (rule_no_unowned_state, "if True:\n    pass\nelse:\n    found = []"),
    (rule_no_unowned_state, "def f():\n    global x\n    x = 1"),
    (rule_no_unowned_state, "class C:\n    @functools.lru_cache(maxsize=None)\n    def f(self): ..."),
    (rule_no_environment, "import os\nx = os.environ['HOME']"),
    (rule_no_environment, "import os\nx = os.environ.get('HOME')"),
    (rule_no_environment, "from os import getenv"),
    (rule_no_environment, "import os\ndef f(x=os.getenv('HOME')): ..."),
    (rule_no_assert, "def f(x):\n    assert x"),
    (rule_no_float_call, "def f(x):\n    return (x + 1).float()"),
    (rule_docstrings, "'It.'\ndef f(): ..."),
    (rule_docstrings, "'It.'\nclass C: ..."),
    (rule_docstrings, "'It.'\nclass C:\n    'It.'\n    def f(self): ..."),
    (rule_docstrings, "x = 1"),
    (rule_tests_can_fail, "def test_it():\n    run()"),
    (rule_tests_can_fail, "class TestIt:\n    def test_it(self):\n        recheck = run()"),
]
GOOD = [
    (rule_file_length, "x = 1\n" * 300),
    (rule_function_length, "def f():\n    '''It.\n" + "\n" * 60 + "    '''\n    return 1"),
    (rule_nothing_left_to_do, "x = 'to do'  # todo"),
    (rule_no_unowned_state, "__all__ = ['f']\nA = (1, (2, 3))\nB = frozenset({1})\nC = MappingProxyType({'a': (1,)})"),
    (rule_no_unowned_state, "class C:\n    x: list = field(default_factory=list)\n    def f(self):\n        y = []"),
    (rule_no_unowned_state, "class C:\n    x: list[int]\n    @functools.cached_property\n    def f(self): ..."),
    (rule_no_unowned_state, "def f():\n    @functools.cache\n    def g(): ...\n    return [g() for _ in range(2)]"),
    (rule_no_environment, "import os\nos.environ['X'] = '1'\nenv = {**os.environ, 'Y': '2'}\nos.environ.update(env)"),
    (rule_no_float_call, "float(x); x.to(torch.promote_types(x.dtype, torch.float32)); st.float(3)"),
    (rule_docstrings, "'It.'\ndef _f(): ...\nclass C:\n    'It.'\n    def __len__(self): ..."),
    (rule_tests_can_fail, "def test_it():\n    with pytest.raises(ValueError):\n        run()"),
    (rule_tests_can_fail, "def test_it():\n    np.testing.assert_allclose(1, 1)\ndef measure(): ..."),
    (rule_tests_can_fail, "def test_it(pool):\n    pool.check()"),
]


@pytest.mark.parametrize("rule, source", BAD)
def test_the_rule_complains(rule, source):
    (complaint,) = rule(source, "minserve/engine.py")
    assert complaint.startswith("minserve/engine.py:")


@pytest.mark.parametrize("rule, source", GOOD)
def test_the_rule_is_silent(rule, source):
    assert list(rule(source, "minserve/engine.py")) == []


@pytest.mark.parametrize(
    "path", ["minserve/utils.py", "minserve/common/page.py", "tests/page_helpers.py", "a/cache_v2.py"]
)
def test_vague_names_are_found(path):
    assert len(list(rule_file_name("", path))) == 1


@pytest.mark.parametrize("path", ["minserve/paging/page_table.py", "minserve/database.py", "minserve/common_prefix.py"])
def test_names_that_say_something_pass(path):
    assert list(rule_file_name("", path)) == []


def test_a_kernel_may_have_sixty_lines():
    source = f"@triton.jit\ndef kernel():\n{LONG_BODY[:-10]}"
    assert len(list(rule_function_length(source, "minserve/paging/page_write.py"))) == 1
    assert list(rule_function_length(source, "minserve/paging/page_write_triton.py")) == []
