"""What the checks of the exercises are made of: cases, comparing, and a message that helps.

A check is a plain test function. It hands its cases to `ex.check`, which runs them from the smallest input to the
largest and stops at the first wrong answer, so that a reader sees the smallest failing input:

    def test_3_1_slots_of(ex):
        ex.check("slots_of", [
            Case({"pages": [7, 2], "start": 3, "stop": 6, "page_size": 4}, want=[31, 8, 9], note="across two pages"),
        ])
"""

import signal
import threading
import traceback
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property

from comparing import Raised, difference, num_leaves, show

TIME_LIMIT_S = 10


class ToDo(Exception):
    """An exercise that nobody has attempted yet."""


class WrongAnswer(AssertionError):
    """An exercise that is wrong; the text says on which input, what came out, and what should have."""


class NeverEnds(BaseException):
    """A body that ran too long. No Exception, so that no `except Exception` in the body swallows it."""


def call(function: Callable, **args):
    """The plain way to run a case."""
    return function(**args)


@dataclass(frozen=True, eq=False)
class Case:
    """One input of an exercise, and what should come out.

    Arguments:
        args: keyword arguments; each run gets a deep copy.
        want: the right result, `AtLeast(aim)` for a scored exercise, or `Raised("ValueError")` where it must refuse.
        note: what this input is about, a few words for the reader.
        run: run(function, **args) -> what is compared with `want`: a summary of a random result, the answers of a class
            to a list of calls, a score.
        rtol, atol: how far numbers may be off.
        may_change: arguments that the exercise is meant to change; changing any other one is wrong.
    """

    args: dict
    want: object
    note: str = ""
    run: Callable = call
    rtol: float = 1e-6
    atol: float = 1e-9
    may_change: tuple[str, ...] = ()

    def outcome(self, function: Callable):
        """What the function makes of this input; a `Raised` where it raises or changes what is not its own."""
        args = deepcopy(self.args)
        try:
            with _time_limit():
                result = self.run(function, **args)
        except NotImplementedError as error:
            if str(error).startswith("exercise "):
                raise ToDo(str(error)) from None
            return _raised(error, function)
        except (Exception, NeverEnds) as error:
            return _raised(error, function)
        for name in args.keys() - set(self.may_change):
            if difference(args[name], self.args[name], 0, 0):
                return Raised("", f"the caller's {name} was changed; it must stay as it is")
        return result

    def is_wrong(self, outcome) -> str | None:
        """Where an outcome differs from the right one, in words; None if it is right."""
        return difference(outcome, self.want, self.rtol, self.atol)


@dataclass(frozen=True, eq=False)
class Mistake:
    """A known wrong solution: its name, what to tell who made it, and the function."""

    name: str
    hint: str
    function: Callable


class Exercise:
    """One exercise under check: the reader's module, and the mistakes that its answers are compared with.

    Names that are not its own are looked up in the module, so that a check can say `ex.Machine(...)`.

    Arguments:
        load: a callable that gives the module.
        mistakes: mistakes(name) -> the known mistakes of that exercise; None when no hint is wanted.
    """

    def __init__(self, load: Callable, mistakes: Callable[[str], Iterable[Mistake]] | None = None):
        self._load, self._mistakes, self.score = load, mistakes, None

    @cached_property
    def module(self):
        """The module, loaded at first use."""
        try:
            return self._load()
        except Exception as error:
            place = f"line {error.lineno}, " if isinstance(error, SyntaxError) else ""
            raise WrongAnswer(f"the file cannot be imported: {place}{type(error).__name__}: {error}") from None

    def __getattr__(self, name: str):
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return getattr(self.module, name)
        except AttributeError:
            raise WrongAnswer(f"there is no {name} in the exercise file any more") from None

    def check(self, name: str, cases: Iterable[Case]) -> None:
        """Run the cases from small to large (equally large ones in the order given) and stop at the first wrong one."""
        cases = sorted(cases, key=lambda case: num_leaves(case.args))
        function = getattr(self, name)
        for case in cases:
            outcome = case.outcome(function)
            wrong = case.is_wrong(outcome)
            if isinstance(case.want, AtLeast) and isinstance(outcome, (int, float)):
                self.score = float(outcome)
            if wrong:
                is_endless = isinstance(outcome, Raised) and outcome.kind == NeverEnds.__name__
                hints = self.likely(name, cases, case) if self._mistakes and not is_endless else []
                raise WrongAnswer(_message(name, case, outcome, wrong, hints))

    def likely(self, name: str, cases: list[Case], shown: Case) -> list[str]:
        """In words, which known mistakes explain a wrong answer.

        The first that finds any: the same answer on the shown input; the same first wrong entry of a dict or tuple,
        for somebody may have made two mistakes at once; the same answer on at least half of the inputs it is wrong on.
        """
        mine, at = [case.outcome(getattr(self, name)) for case in cases], cases.index(shown)
        theirs = {m: [case.outcome(m.function) for case in cases] for m in self._mistakes(name)}
        everywhere = list(range(len(cases)))
        if found := _most_alike(mine, theirs, everywhere, at):
            return [f"looks like {mistake.name}: {mistake.hint}" for mistake in found]
        if (key := _first_wrong_key(mine[at], shown)) is not None:
            my_entry = [_parts(outcome).get(key) for outcome in mine]
            their_entry = {m: [_parts(outcome).get(key) for outcome in outcomes] for m, outcomes in theirs.items()}
            if found := _most_alike(my_entry, their_entry, everywhere, at):
                return [f"in part, [{key!r}] looks like {mistake.name}: {mistake.hint}" for mistake in found]
        wrong = [i for i in everywhere if cases[i].is_wrong(mine[i])]
        if found := _most_alike(mine, theirs, wrong):
            return [f"in part, on other inputs, looks like {mistake.name}: {mistake.hint}" for mistake in found]
        return (
            [] if isinstance(mine[at], Raised) else ["looks like none of the usual mistakes, or like several at once"]
        )


def _most_alike(mine: list, theirs: dict[Mistake, list], where: list[int], at: int | None = None) -> list[Mistake]:
    """The mistakes whose outcomes equal mine most often, in the places `where`.

    Only those that do at index `at`; without one, only those that do in half of the places.
    """
    num_equal = {}
    for mistake, outcomes in theirs.items():
        same = [i for i in where if difference(mine[i], outcomes[i], 1e-6, 1e-9) is None]
        if (at in same) if at is not None else (2 * len(same) >= len(where)):
            num_equal[mistake] = len(same)
    return [mistake for mistake, num in num_equal.items() if num == max(num_equal.values())]


def _first_wrong_key(outcome, case: Case):
    """The first entry of a dict or tuple that differs from the right one; None if it is neither, or wrong otherwise."""
    wanted = _parts(case.want)
    wrong = (key for key in wanted if difference(_parts(outcome).get(key), wanted[key], case.rtol, case.atol))
    return next(wrong, None) if _parts(outcome).keys() == wanted.keys() else None


def _parts(outcome) -> dict:
    """The entries of a dict or a tuple."""
    return outcome if isinstance(outcome, dict) else dict(enumerate(outcome)) if isinstance(outcome, tuple) else {}


@dataclass(frozen=True)
class AtLeast:
    """What a scored exercise should reach; more is better."""

    aim: float

    def differs(self, score) -> str | None:
        """In words, how far a score falls short."""
        try:
            return None if score >= self.aim else f"{show(score)} is {self.aim - score:.3g} short"
        except TypeError:
            return f"there is no score: {show(score)}"

    def __str__(self) -> str:
        return f"a score of at least {self.aim:g}"


def _message(name: str, case: Case, outcome, wrong: str, hints: list[str]) -> str:
    """The whole report on a wrong answer."""
    headline = f"{name} is wrong. The smallest input that shows it"
    if isinstance(case.want, AtLeast) and not isinstance(outcome, Raised):
        headline = f"{name} scores {show(outcome)}, and the aim is {case.want.aim:g}. It was tried on"
    lines = [
        headline + (f" ({case.note}):" if case.note else ":"),
        f"  {show(case.args, call=name)}",
        f"came out:  {show(outcome)}",
        f"expected:  {show(case.want)}",
    ]
    if not isinstance(outcome, Raised):
        lines.append(f"differs:   {wrong}")
    return "\n".join(lines + hints)


def _raised(error: BaseException, function: Callable) -> Raised:
    """An exception as an outcome, with the reader's own line."""
    code = getattr(function, "__code__", None) or next(
        (method.__code__ for method in vars(function).values() if hasattr(method, "__code__")), None
    )
    frames = [f for f in traceback.extract_tb(error.__traceback__) if code and f.filename == code.co_filename]
    return Raised(type(error).__name__, str(error), f"line {frames[-1].lineno}" if frames else "")


@contextmanager
def _time_limit():
    """Stop a body that never ends, where there is an alarm clock: not on Windows, not outside the main thread."""
    if not hasattr(signal, "SIGALRM") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(*_):
        raise NeverEnds(f"still running after {TIME_LIMIT_S} s: does a loop never end?")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, TIME_LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
