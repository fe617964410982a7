"""The README: what its Python prints is what it says, and its first screen holds what a newcomer needs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
# A python block, and the text block behind it with what it prints.
EXAMPLES = re.findall(r"```python\n(.*?)```\s*```text\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.parametrize("code,printed", EXAMPLES)
def test_python_in_the_readme_prints_what_stands_behind_it(code, printed):
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert run.stdout.rstrip() == printed.rstrip()


def test_every_python_block_has_its_output():
    assert len(EXAMPLES) == README.count("```python\n") >= 1


def test_the_first_40_lines_hold_a_picture_the_two_commands_and_python():
    first = "\n".join(README.splitlines()[:40])
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", first)
    assert pictures and all((ROOT / picture).is_file() for picture in pictures)
    assert "make demo" in first and "make test" in first and "from minserve import" in first


def test_every_path_and_command_that_the_readme_names_exists():
    links = re.findall(r"\]\((?!https?:|#)([^)]+)\)", README)
    assert links and all((ROOT / link).exists() for link in links)
    targets = set(re.findall(r"`make (\w+)", README))
    makefile = (ROOT / "Makefile").read_text()
    assert targets and all(re.search(rf"^{target}:", makefile, flags=re.MULTILINE) for target in targets)


def test_the_chapter_table_marks_exactly_the_unwritten_chapters():
    rows = re.findall(r"^\| (\d\d) \| (.+?) \|", README, flags=re.MULTILINE)
    assert [number for number, _ in rows] == [f"{i:02}" for i in range(1, 14)]
    written = {path.name[:2] for path in (ROOT / "chapters").glob("*.ipynb")}
    for number, name in rows:
        assert (number in written) == ("](chapters/" in name), f"chapter {number}"
