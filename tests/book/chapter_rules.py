"""What a chapter must be. Each rule is a function from a notebook and the chapter's name to its complaints.

`execute` runs a notebook as a reader does who has done no exercise, and says how long it worked.
"""

import ast
import importlib.util
import re
import sys
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parents[2]
SECTIONS = ("Pain", "Build", "Plug in", "Break", "Cost")
MAX_CODE_CELLS, MAX_CELL_LINES, MAX_WORDS, MAX_SECONDS, MIN_PICTURES = 30, 15, 1500, 60, 5


def load(path):
    """Import a file by its path."""
    spec = importlib.util.spec_from_file_location(f"loaded_{path.parent.name}_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


build = load(ROOT / "chapters" / "build.py")
sync = load(ROOT / "exercises" / "sync.py")


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def markdown(notebook):
    return "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")


def rule_executed(notebook, name):
    """Committed with the outputs of one run from top to bottom, and no error among them."""
    cells = code_cells(notebook)
    counts = [cell.execution_count for cell in cells]
    if counts != list(range(1, len(cells) + 1)):
        yield f"{name}: cells were executed in the order {counts}: run python chapters/build.py"
    if not any(cell.outputs for cell in cells):
        yield f"{name}: no outputs"
    for cell in cells:
        for output in cell.outputs:
            if output.output_type == "error" or output.get("name") == "stderr":
                yield f"{name}: cell {cell.execution_count} ends in an error or a warning"


def rule_stripped(notebook, name):
    """Metadata are the kernel's name and the language; nothing tells whose machine it was."""
    if notebook.metadata != build.METADATA:
        yield f"{name}: metadata {dict(notebook.metadata)}"
    for number, cell in enumerate(notebook.cells):
        if cell.metadata or any(output.get("metadata") for output in cell.get("outputs", ())):
            yield f"{name}: cell {number} has metadata"
        printed = nbformat.writes(nbformat.v4.new_notebook(cells=[cell])) if cell.get("outputs") else ""
        if found := re.search(r"(?<![\w.])/(home|root|tmp|Users|work)/\w+|0x[0-9a-f]{8,}", printed):
            yield f"{name}: cell {number} prints {found.group()}"


def rule_size(notebook, name):
    """Short enough to be finished."""
    cells = code_cells(notebook)
    if len(cells) > MAX_CODE_CELLS:
        yield f"{name}: {len(cells)} code cells, over {MAX_CODE_CELLS}"
    for number, cell in enumerate(cells, start=1):
        if len(cell.source.splitlines()) > MAX_CELL_LINES:
            yield f"{name}: code cell {number} has {len(cell.source.splitlines())} lines, over {MAX_CELL_LINES}"
    num_words = len(re.findall(r"\w[\w'’.,/%-]*", re.sub(r"\]\([^)]*\)", "]", markdown(notebook))))
    if num_words > MAX_WORDS:
        yield f"{name}: {num_words} words, over {MAX_WORDS}"


def rule_sections(notebook, name):
    """Pain, Build, Plug in, Break, Cost: these, once each, in this order."""
    headings = re.findall(r"^## (.+)$", markdown(notebook), re.M)
    if len(headings) != len(SECTIONS) or not all(map(str.startswith, headings, SECTIONS)):
        yield f"{name}: the sections are {headings}, not {list(SECTIONS)}"


def rule_pictures(notebook, name):
    """At least five, each drawn by one call of minserve.plots whose title is a question, and all of them shown."""
    cells = [cell for cell in code_cells(notebook) if any("image/png" in o.get("data", ()) for o in cell.outputs)]
    if len(cells) < MIN_PICTURES:
        yield f"{name}: {len(cells)} pictures, under {MIN_PICTURES}"
    drawn = sum(len(re.findall(r"\bplots\.\w+\(", cell.source)) for cell in code_cells(notebook))
    if drawn != len(cells):
        yield f"{name}: draws {drawn} pictures and shows {len(cells)}: the call is the last line of its cell"
    if "matplotlib" in "".join(cell.source for cell in code_cells(notebook)):
        yield f"{name}: draws with matplotlib itself"
    for cell in cells:
        calls = [node for node in ast.walk(ast.parse(cell.source)) if isinstance(node, ast.Call)]
        calls = [call for call in calls if ast.unparse(call.func).startswith("plots.")]
        titles = [ast.unparse(call.args[0]).strip("f'\"") for call in calls if call.args]
        if len(calls) != 1 or not all(title.endswith("?") for title in titles):
            yield f"{name}: cell {cell.execution_count} draws {len(calls)} pictures, titles {titles}"


def rule_predicts(notebook, name):
    """The reader guesses before something is measured."""
    if not any(re.search(r"^guess = \.\.\.", cell.source, re.M) for cell in code_cells(notebook)):
        yield f"{name}: no cell asks for a guess"


def rule_exercises(notebook, name, solutions=ROOT / "solutions"):
    """Each exercise stands inline, in order, with its minutes and level, and no solution is seen before it."""
    path = solutions / f"ch{name}.py"
    solution, place = path.read_text("utf-8"), -1
    texts = [cell.source for cell in notebook.cells]
    if f"exercises/{path.name}" not in markdown(notebook):
        yield f"{name}: says nowhere that the exercises are in exercises/{path.name}"
    for found in sync.MARKER.finditer(solution):
        _, number, minutes, level, _ = found.groups()
        function = re.findall(r"^(?:def|class) (\w+)", solution[: found.start()], re.M)[-1]
        wanted = f"**{number} `{function}`** ({minutes} min, {level})"
        stands = [i for i, cell in enumerate(notebook.cells) if cell.cell_type == "markdown" and wanted in cell.source]
        if len(stands) != 1 or stands[0] < place:
            yield f"{name}: {wanted} stands in cells {stands}, after cell {place}"
            continue
        place = stands[0]
        body = solution[found.end() :].partition("# end\n")[0]
        telling = [line.strip() for line in body.splitlines() if len(line.strip()) >= 30] + [f"def {function}("]
        for line in telling + ["solutions"]:
            if any(line in text for text in texts[:place]):
                yield f"{name}: {line!r} stands before exercise {number}"


RULES = [rule_executed, rule_stripped, rule_size, rule_sections, rule_pictures, rule_predicts, rule_exercises]


def execute(notebook, folder, timeout_s=600):
    """Run a notebook beside the exercises as they are handed out, and return the seconds that it worked.

    Seconds of the kernel's own main thread, so that a busy machine does not make a chapter slow.
    """
    chapters, exercises = folder / "chapters", folder / "exercises"
    chapters.mkdir()
    exercises.mkdir()
    for solution in (ROOT / "solutions").glob("ch*.py"):
        (exercises / solution.name).write_text(sync.stub(solution.read_text("utf-8")), "utf-8")
    watch = nbformat.v4.new_code_cell("import time\nprint(time.thread_time())")
    copy = nbformat.v4.new_notebook(cells=[*notebook.cells, watch])
    build.execute(copy, chapters, timeout_s)
    return float(copy.cells[-1].outputs[0].text)
