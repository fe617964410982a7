"""The gates on the exercises themselves: what a chapter's author must get right, checked for every chapter."""

import ast
import doctest
import shutil
import subprocess
import sys

import pytest
from catalogue import (
    ROOT,
    Wrong,
    also_right,
    chapters,
    entries,
    load,
    mistakes_of,
    target,
    with_mistake,
    wrong_solutions,
)
from checks import Exercise, ToDo, WrongAnswer
from mutants import checks_of, trial

SYNC = load(ROOT / "exercises" / "sync.py")
MISTAKES = [(chapter, wrong) for chapter in chapters() for wrong in wrong_solutions(chapter)]
KILLED_SHARE = 0.9


def test_stubs_are_fresh():
    stale = [name for name, state in SYNC.sync(check=True).items() if state == "stale"]
    assert not stale, f"{stale}: run python exercises/sync.py"


@pytest.mark.parametrize("chapter", chapters())
def test_every_exercise_has_a_check_and_known_mistakes(chapter):
    known = entries(chapter)
    assert list(checks_of(chapter)) == list(known), "a check is test_<number>_<name>, in the order of the exercises"
    mistaken = [wrong.number for wrong in wrong_solutions(chapter)]
    assert all(mistaken.count(number) >= 2 for number in known), "each exercise needs two known wrong solutions"


def test_names_of_mistakes_are_unique():
    names = [wrong.name for _, wrong in MISTAKES]
    assert len(names) == len({*names})


@pytest.mark.parametrize("chapter", chapters())
def test_solutions_pass(chapter):
    for check in checks_of(chapter).values():
        check(Exercise(lambda: target(chapter, "solutions")))
    for way in also_right(chapter):
        module = with_mistake(target(chapter, "solutions"), entries(chapter)[way.number], way)
        checks_of(chapter)[way.number](Exercise(lambda module=module: module))


@pytest.mark.parametrize("chapter", chapters())
def test_every_check_finds_a_stub_to_do(chapter, tmp_path):
    path = tmp_path / f"{chapter}.py"
    path.write_text(SYNC.stub((ROOT / "solutions" / path.name).read_text("utf-8")), "utf-8")
    for number, check in checks_of(chapter).items():
        with pytest.raises(ToDo, match=f"^exercise {number}$"):
            check(Exercise(lambda: load(path)))


@pytest.mark.parametrize("chapter, wrong", MISTAKES, ids=[f"{chapter}-{wrong.name}" for chapter, wrong in MISTAKES])
def test_wrong_solution_is_rejected_and_named(chapter, wrong):
    module = with_mistake(load(ROOT / "solutions" / f"{chapter}.py"), entries(chapter)[wrong.number], wrong)
    with pytest.raises(WrongAnswer) as caught:
        checks_of(chapter)[wrong.number](Exercise(lambda: module, mistakes_of(chapter)))
    named = [line for line in str(caught.value).splitlines() if "looks like" in line]
    assert named == [f"looks like {wrong.name}: {wrong.hint}"], caught.value


def test_one_of_two_mistakes_at_once_is_named():
    two = {wrong.name: wrong for wrong in wrong_solutions("ch01_serving")}
    replace = two["ttft_from_admission"].replace | two["tpot_over_n"].replace
    both = with_mistake(target("ch01_serving", "solutions"), entries("ch01_serving")["1.1"], Wrong("", "", "", replace))
    with pytest.raises(WrongAnswer, match="in part, .'ttft_p50_s'. looks like ttft_from_admission"):
        checks_of("ch01_serving")["1.1"](Exercise(lambda: both, mistakes_of("ch01_serving")))


@pytest.mark.parametrize("chapter", chapters())
def test_mutants_are_killed(chapter):
    num_tried, survivors = trial(chapter)
    text = "\n".join(f"{mutant.number} line {mutant.line}: {mutant.change}" for mutant in survivors)
    print(f"{num_tried - len(survivors)} of {num_tried} killed; survivors:\n{text}")
    assert len(survivors) <= (1 - KILLED_SHARE) * num_tried


@pytest.mark.parametrize("chapter", chapters())
def test_docstrings_are_short_and_their_examples_run(chapter):
    solution = load(ROOT / "solutions" / f"{chapter}.py")
    for entry in entries(chapter).values():
        documented = ast.get_docstring(ast.parse(entry.given + entry.body).body[0]) or ""
        assert ">>>" in documented, f"{entry.name} has no example"
        num_lines, limit = documented.count("\n") + 1, max(20, 2 * entry.body.count("\n"))
        assert num_lines <= limit, f"{entry.name}: {num_lines} lines of docstring, at most {limit}"
    results = doctest.testmod(solution)
    assert results.attempted and not results.failed


@pytest.fixture
def copy_of_the_book(tmp_path):
    """A copy of what a reader works with, every exercise untouched."""
    for name in ("solutions", "tests/exercises"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "exercises").mkdir()
    shutil.copy(ROOT / "exercises" / "sync.py", tmp_path / "exercises")
    SYNC.sync(tmp_path)
    return tmp_path


def run_pytest(root, *arguments):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", *arguments]
    return subprocess.run([*command, f"--rootdir={root}"], cwd=root, capture_output=True, text=True, timeout=600)


def test_a_reader_sees_what_is_to_do_and_what_is_wrong(copy_of_the_book):
    path = copy_of_the_book / "exercises" / "ch01_serving.py"
    answer = "return machine.overhead_s + num_bytes / machine.bytes_per_s + flops / machine.flops_per_s[dtype]"
    path.write_text(path.read_text("utf-8").replace('raise NotImplementedError("exercise 1.4")', answer), "utf-8")
    run = run_pytest(copy_of_the_book, "tests/exercises/test_ch01_serving.py", "--hint")
    assert run.returncode == 1 and "1 failed, 6 to do" in run.stdout, run.stdout + run.stderr
    assert "sum_for_max" in run.stdout and "expected:  3.5" in run.stdout and "Traceback" not in run.stdout, run.stdout

    assert SYNC.sync(copy_of_the_book)[path.name] == "edited" and answer in path.read_text("utf-8")
    assert SYNC.sync(copy_of_the_book, force="ch01_serving")[path.name] == "written"
    assert answer not in path.read_text("utf-8")


def test_a_changed_solution_makes_its_stub_stale_and_an_unmarked_body_is_refused(copy_of_the_book):
    path = copy_of_the_book / "solutions" / "ch01_serving.py"
    text = path.read_text("utf-8")
    path.write_text(text.replace("which of the two takes longer?", "hm?"), "utf-8")
    assert SYNC.sync(copy_of_the_book, check=True)[path.name] == "stale"
    assert SYNC.sync(copy_of_the_book)[path.name] == "written"
    assert SYNC.sync(copy_of_the_book, check=True)[path.name] == "fresh"
    path.write_text(text.replace("    # end\n", "", 1), "utf-8")
    with pytest.raises(ValueError, match="are marked"):
        SYNC.sync(copy_of_the_book)
