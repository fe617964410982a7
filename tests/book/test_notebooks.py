"""Every chapter runs as it is handed out and keeps the rules; every rule complains about a bad one."""

import copy

import jupytext
import nbformat
import pytest
from chapter_rules import MAX_SECONDS, ROOT, RULES, build, execute
from nbclient.exceptions import CellExecutionError
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

CHAPTERS = sorted((ROOT / "chapters").glob("[0-9]*.ipynb"))


def read(path):
    return nbformat.read(path, as_version=4)


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_a_chapter_runs_in_time(path, tmp_path):
    worked_s = execute(read(path), tmp_path)
    assert worked_s < MAX_SECONDS, f"{path.name} worked for {worked_s:.0f} s"


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_a_chapter_keeps_the_rules(path):
    notebook = read(path)
    complaints = [said for rule in RULES for said in rule(notebook, path.stem)]
    assert not complaints, "\n".join(complaints)


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_a_chapter_can_be_edited_as_text(path):
    notebook = read(path)
    again = jupytext.reads(build.as_text(copy.deepcopy(notebook)), fmt="py:percent")
    assert [(c.cell_type, c.source) for c in again.cells] == [(c.cell_type, c.source) for c in notebook.cells]


def small_chapter():
    """A notebook that keeps every rule, for the exercises of chapter 1."""
    names = ("1.1 `latency_report`** (15 min, easy)", "1.2 `arrivals`** (10 min, easy)",
             "1.3 `step_cost`** (30 min, medium)", "1.4 `step_time`** (5 min, easy)", "1.5 `ridge`** (5 min, easy)",
             "1.6 `static_batches`** (40 min, hard)", "1.7 `next_batch`** (30 min, open)")  # fmt: skip
    picture = new_output("display_data", {"image/png": "iVBORw0KGgo="})
    sections = "## Pain: one\n## Build\n## Plug in\n## Break\n## Cost"
    cells = [new_markdown_cell(f"# 01\n{sections}\nSee exercises/ch01_serving.py")]
    cells += [new_markdown_cell(f"**{name}: do it.") for name in names]
    cells += [new_code_cell("guess = ...\nprint(1)", outputs=[new_output("stream", name="stdout", text="1\n")])]
    cells += [new_code_cell("plots.bars('How many?', {'a': 1}, 'x')", outputs=[picture]) for _ in range(5)]
    for number, cell in enumerate((cell for cell in cells if cell.cell_type == "code"), start=1):
        cell.execution_count = number
    return build.strip(new_notebook(cells=cells))


def complaints_about(notebook):
    return {rule.__name__ for rule in RULES if list(rule(notebook, "01_serving"))}


def test_the_rules_are_silent_about_a_good_chapter():
    assert complaints_about(small_chapter()) == set()


def code(notebook, source, *outputs):
    """Put a cell in front of all others."""
    notebook.cells.insert(1, new_code_cell(source, outputs=list(outputs), metadata={}))
    for number, cell in enumerate((cell for cell in notebook.cells if cell.cell_type == "code"), start=1):
        cell.execution_count = number


def text(notebook, old, new):
    """Replace some words wherever they stand."""
    assert any(old in cell.source for cell in notebook.cells)
    for cell in notebook.cells:
        cell.source = cell.source.replace(old, new)


STDERR = new_output("stream", name="stderr", text="UserWarning")
BAD = {
    "rule_executed": [
        lambda n: n.cells[-1].update(execution_count=None),
        lambda n: n.cells[-1].update(execution_count=9),
        lambda n: code(n, "1 / 0", new_output("error", ename="E", evalue="", traceback=[])),
        lambda n: code(n, "warn()", STDERR),
    ],
    "rule_stripped": [
        lambda n: n.metadata.update(authors=["me"]),
        lambda n: n.cells[-1].metadata.update(tags=["x"]),
        lambda n: n.cells[-1].outputs[0].metadata.update(width=9),
        lambda n: code(n, "print(f)", new_output("stream", name="stdout", text="at /home/ann/f.py")),
        lambda n: code(n, "object()", new_output("execute_result", {"text/plain": "<object at 0x7f0012345678>"})),
    ],
    "rule_size": [
        lambda n: [code(n, "1") for _ in range(25)],
        lambda n: code(n, "x = 1\n" * 16),
        lambda n: n.cells.append(new_markdown_cell("word " * 1480)),
    ],
    "rule_sections": [
        lambda n: text(n, "## Break\n", ""),
        lambda n: text(n, "## Build\n## Plug in", "## Plug in\n## Build"),
        lambda n: text(n, "## Cost", "## Cost\n## Appendix"),
    ],
    "rule_pictures": [
        lambda n: n.cells[-1].update(outputs=[]),
        lambda n: text(n, "How many?", "How many"),
        lambda n: text(n, "plots.bars('How many?', {'a': 1}, 'x')", "draw('How many?')"),
        lambda n: code(n, "import matplotlib.pyplot as plt"),
        lambda n: code(n, "plots.bars('Is it seen?', {'a': 1}, 'x')\nprint('done')"),
    ],
    "rule_predicts": [lambda n: text(n, "guess = ...", "guess = 3")],
    "rule_exercises": [
        lambda n: text(n, "**1.3 `step_cost`** (30 min", "**1.3 `step_cost`** (20 min"),
        lambda n: text(n, "**1.7 ", "**1.8 "),
        lambda n: n.cells.insert(1, n.cells.pop(2)),
        lambda n: text(n, "exercises/ch01_serving.py", "somewhere"),
        lambda n: code(n, "def step_time(machine): ..."),
        lambda n: code(n, "flops_per_param = flops_per_byte * bytes_per_param"),
        lambda n: code(n, "from solutions.ch01_serving import arrivals"),
    ],
}


@pytest.mark.parametrize("rule, spoil", [(rule, spoil) for rule, spoils in BAD.items() for spoil in spoils])
def test_the_rule_complains(rule, spoil):
    notebook = small_chapter()
    spoil(notebook)
    assert complaints_about(notebook) == {rule}


def test_a_chapter_that_raises_is_an_error(tmp_path):
    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        execute(new_notebook(cells=[new_code_cell("1 / 0")]), tmp_path)


def test_a_chapter_runs_beside_the_exercises_as_handed_out(tmp_path):
    """A reader's wrong answer must not break the book, and the checkout is what is imported."""
    source = (
        "import sys, time, minserve\nsys.path.append('../exercises')\nimport ch01_serving\n"
        f"assert minserve.__file__.startswith({str(ROOT)!r})\n"
        "try:\n    ch01_serving.ridge(None, '', 0)\nexcept NotImplementedError:\n    end = time.thread_time() + 0.5\n"
        "while time.thread_time() < end: pass"
    )
    assert execute(new_notebook(cells=[new_code_cell(source)]), tmp_path) > 0.5


def test_building_twice_gives_the_same_file(tmp_path):
    source = "import sys\nprint(1)\nprint(2, flush=True)\nprint(3)"
    built = []
    for _ in range(2):
        notebook = new_notebook(cells=[new_markdown_cell("# A"), new_code_cell(source)])
        built.append(nbformat.writes(build.strip(build.execute(notebook, tmp_path))))
    assert built[0] == built[1] and len(read_text_outputs(built[0])) == 1


def read_text_outputs(written):
    return [output for cell in nbformat.reads(written, as_version=4).cells for output in cell.get("outputs", [])]
