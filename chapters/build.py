"""Write chapters: a notebook as text and back, executed, with its outputs, and with nothing of the machine in it.

    python chapters/build.py --edit 01     write chapters/01_serving.py from the notebook: edit this
    python chapters/build.py 01            build the notebook from that .py, or execute it again if there is none
    python chapters/build.py               execute all chapters again, say after the weights have changed

The .py is jupytext's percent format: cells begin with `# %%` or `# %% [markdown]`. It is not committed, the notebook is.
A built notebook depends on its source and on what its cells print, and on nothing else: cells are numbered, metadata
are the kernel's name and the language.
"""

import argparse
import os
import sys
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

CHAPTERS = Path(__file__).resolve().parent
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def find(name: str) -> Path:
    """The notebook whose name begins with `name`, such as 01; it need not exist if its .py does."""
    found = {path.with_suffix(".ipynb") for path in CHAPTERS.glob(f"{name}*") if path.suffix in (".py", ".ipynb")}
    found.discard(Path(__file__).with_suffix(".ipynb"))
    if len(found) != 1:
        sys.exit(f"{name} begins the names of {len(found)} chapters, not of one")
    return found.pop()


def execute(notebook: nbformat.NotebookNode, folder: Path = CHAPTERS, timeout_s: int = 600, **environment: str):
    """Run all cells in a fresh kernel, in place, in one thread: a second one spins while it waits for a busy neighbour.

    Arguments:
        folder: where the cells run.
        timeout_s: seconds that one cell may take.
        environment: variables for the kernel, in addition to this process's.
    Errors: nbclient's CellExecutionError for the first cell that raises, CellTimeoutError for one that does not end.
    """
    client = NotebookClient(
        notebook, timeout=timeout_s, kernel_name="python3", resources={"metadata": {"path": str(folder)}},
        record_timing=False,
    )  # fmt: skip
    fixed = {"PYTHONPATH": str(CHAPTERS.parent), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    client.execute(env={**os.environ, **fixed, **environment})
    return notebook


def strip(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Take out, in place, whatever differs between two runs or two machines: all metadata, random ids, split output."""
    notebook.metadata = nbformat.from_dict(METADATA)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    for number, cell in enumerate(notebook.cells):
        cell.metadata, cell.id = nbformat.NotebookNode(), f"cell-{number:02}"
        if cell.cell_type == "code":
            cell.outputs = _joined(cell.outputs)
    return notebook


def _joined(outputs: list) -> list:
    """Outputs without metadata, what was printed in one piece."""
    joined = []
    for output in outputs:
        if "metadata" in output:
            output.metadata = nbformat.NotebookNode()
        before = joined[-1] if joined else None
        if before and output.output_type == before.output_type == "stream" and output.name == before.name:
            before.text += output.text
        else:
            joined.append(output)
    return joined


def build(path: Path) -> None:
    """Execute a chapter, from its .py if there is one, and write the notebook."""
    source = path.with_suffix(".py")
    notebook = jupytext.read(source, fmt="py:percent") if source.exists() else nbformat.read(path, as_version=4)
    nbformat.write(strip(execute(notebook)), path)
    print(f"{path.name}: {sum(cell.cell_type == 'code' for cell in notebook.cells)} code cells executed")


def edit(path: Path) -> None:
    """Write a notebook's text as .py beside it; what is there already is somebody's work and stays."""
    source = path.with_suffix(".py")
    if source.exists():
        sys.exit(f"{source.name} is there already; delete it to start again from the notebook")
    source.write_text(as_text(nbformat.read(path, as_version=4)), encoding="utf-8")
    print(f"wrote {source.name}")


def as_text(notebook: nbformat.NotebookNode) -> str:
    """A notebook's cells in the percent format, without outputs and without a header."""
    text = jupytext.writes(strip(notebook), fmt="py:percent")
    return text[text.index("# %%") :]


def main() -> None:
    """Run it as a command; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="chapters, such as 01; all of them unless given")
    parser.add_argument("--edit", action="store_true", help="write the .py of a chapter instead")
    arguments = parser.parse_args()
    names = arguments.names or sorted(path.stem for path in CHAPTERS.glob("[0-9]*.ipynb"))
    for path in map(find, names):
        (edit if arguments.edit else build)(path)


if __name__ == "__main__":
    main()
