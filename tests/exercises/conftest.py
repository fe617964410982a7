"""Checking exercises with pytest: --target, --hint, "to do" instead of a failure, and a progress table at the end."""

import re
import sys
from functools import cache
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from catalogue import chapters, entries, mistakes_of, target  # noqa: E402
from checks import Exercise, ToDo, WrongAnswer  # noqa: E402

_CHECKS, _CHECK = re.compile(r"test_ch\d+_\w+\.py"), re.compile(r"test_(\d+)_(\d+)_")
_progress = pytest.StashKey[dict]()


def pytest_addoption(parser):
    group = parser.getgroup("exercises")
    group.addoption(
        "--target",
        default="exercises",
        metavar="WHAT",
        help="what to check: exercises (your work, the default), solutions, or wrong:NAME, a known wrong solution",
    )
    group.addoption("--hint", action="store_true", help="say which usual mistake a wrong answer looks like")


def pytest_configure(config):
    config.stash[_progress] = {}


def pytest_ignore_collect(collection_path, config):
    """Spare a reader who checks exercises the project's own tests of them. The whole suite runs them."""
    return True if _is_readers_run(config) and not _CHECKS.match(collection_path.name) else None


def _is_readers_run(config) -> bool:
    """Whether exercises, and nothing else, were asked for."""
    paths = [config.invocation_params.dir / argument.partition("::")[0] for argument in config.args]
    return all(path.resolve().is_relative_to(Path(__file__).parent) for path in paths)


@pytest.fixture(scope="module")
def load_target(request):
    """A function that loads the file under check, once for all its exercises."""
    chapter = request.path.stem.removeprefix("test_")
    return cache(lambda: target(chapter, request.config.getoption("target")))


@pytest.fixture
def ex(request, load_target):
    """The exercise under check."""
    wants_hint = request.config.getoption("hint")
    return Exercise(load_target, mistakes_of(request.path.stem.removeprefix("test_")) if wants_hint else None)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    """Turn "not attempted" into to do, a wrong answer into a failure without a traceback, and note how it went."""
    check = _CHECK.match(pyfuncitem.name)
    if not check or "ex" not in pyfuncitem.fixturenames:
        return (yield)
    number = ".".join(check.groups())
    progress = pyfuncitem.config.stash[_progress]
    progress[number] = "wrong"
    try:
        result = yield
        progress[number] = "done"
    except (ToDo, WrongAnswer) as error:
        result = error
    if isinstance(result, ToDo):
        progress[number] = "to do"
        pytest.skip(f"to do: {result}")
    if isinstance(score := pyfuncitem.funcargs["ex"].score, float):
        progress[number] += f", score {score:.3f}"
    if isinstance(result, WrongAnswer):
        pytest.fail(f"exercise {number}: {result}", pytrace=False)
    return result


def pytest_report_teststatus(report):
    """Count exercises not attempted as to do."""
    if report.skipped and isinstance(report.longrepr, tuple) and "to do: exercise" in report.longrepr[2]:
        return "to do", "-", "TO DO"


def pytest_terminal_summary(terminalreporter, config):
    """Print the progress table, when it was exercises that were asked for."""
    progress = config.stash.get(_progress, {})
    if not progress or not _is_readers_run(config):
        return
    known = {number: entry for chapter in chapters() for number, entry in entries(chapter).items()}
    terminalreporter.section("progress")
    to_go = 0
    for number, entry in known.items():
        if number in progress:
            state = progress[number]
            to_go += 0 if state.startswith("done") else entry.minutes
            terminalreporter.line(f"{number:>5} {entry.name:20} {entry.minutes:3} min  {entry.level:7} {state}")
    num_done = sum(state.startswith("done") for state in progress.values())
    left = f"; about {to_go} minutes of work left" if to_go else ""
    terminalreporter.line(f"{num_done} of {len(progress)} done{left}.")
    if any(state.startswith("wrong") for state in progress.values()) and not config.getoption("hint"):
        terminalreporter.line("With --hint, a wrong answer is compared with the usual mistakes.")
