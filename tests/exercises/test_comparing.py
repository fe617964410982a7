"""The machinery under the exercises: what counts as equal, what is shown, and how a check stops."""

import math
from dataclasses import dataclass
from types import SimpleNamespace

import checks
import numpy as np
import pytest
import torch
from checks import AtLeast, Case, Exercise, ToDo, WrongAnswer
from comparing import Raised, difference, num_leaves, show


@dataclass(frozen=True)
class Point:
    x: int
    y: float


EQUAL = (
    (1, 1), (1.0, 1), (0.1 + 0.2, 0.3), (math.nan, math.nan), (math.inf, math.inf), (np.float32(2), 2.0), (True, 1),
    ([1, 2], (1, 2)), (np.arange(3), [0, 1, 2]), ([0, 1, 2], np.arange(3)), (torch.arange(3), [0, 1, 2]),
    (torch.tensor(2.0), 2.0), ({"a": [1]}, {"a": (1,)}), (Point(1, 2.0), Point(1, 2.0)), ("a", "a"), (None, None),
    (torch.tensor([math.nan]), torch.tensor([math.nan])), (Raised("KeyError", "a"), Raised("KeyError", "b")),
    (0.8, AtLeast(0.8)),
)  # fmt: skip
DIFFERENT = (
    (1_000_000_001, 1_000_000_000, "should be"), (None, 1, "was the result returned"), ("1", 1, "'1', should be 1"),
    ([1], [1, 2], "has 1 entries, should have 2"), ([1, [2, 3]], [1, [2, 4]], r"at \[1\]\[1\]: 3, should be 4"),
    ({"a": 1}, {"b": 1}, "no key 'b' but an unexpected key 'a'"), (3, {"b": 1}, "of type int; it should be a dict"),
    ({}, {"b": 1}, "no key 'b'"), ({"a": 1, "b": 1}, {"b": 1}, "an unexpected key 'a'"),
    (3, [3], "of type int; it should be a list of 1"), (Point(1, 2.0), Point(1, 3.0), r"\['y'\]: 2.0, should be 3.0"),
    (torch.zeros(2), torch.zeros(3), r"shape \[2\], should be \[3\]"), ([0.0], torch.zeros(1), "should be a tensor"),
    (torch.zeros(2), torch.zeros(2).double(), "dtype float32, should be float64"), (Raised("KeyError"), 1, "KeyError"),
    (torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 3.0]]), r"1 of 2 numbers differ, first at \[0, 1\]: 2.0"),
    (0.79, AtLeast(0.8), "0.01 short"), ("no", AtLeast(0.8), "no score"), (1, None, "1, should be None"),
)  # fmt: skip


@pytest.mark.parametrize("got, want", EQUAL)
def test_equal(got, want):
    assert difference(got, want, 1e-6, 1e-9) is None


@pytest.mark.parametrize("got, want, message", DIFFERENT)
def test_different(got, want, message):
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(difference(got, want, 1e-6, 1e-9))


def test_an_input_is_shown_as_one_would_type_it():
    args = {"p": Point(1, 2.0), "t": torch.tensor([[0.5]]), "e": torch.zeros(0, 2), "big": torch.zeros(20, 2), "f": max}
    shown = "f(p=Point(x=1, y=2.0), t=torch.tensor([[0.5]]), e=torch.zeros(0, 2), big=<tensor [20, 2] float32>, f=max)"
    assert show(args, call="f") == shown
    assert len(show(list(range(1000)))) <= 400
    assert num_leaves(args) == 1 + 1 + 0 + 40 + 1


def exercise(function):
    return Exercise(lambda: SimpleNamespace(f=function))


def test_the_smallest_wrong_input_is_shown():
    cases = [Case({"x": list(range(n))}, want=n) for n in (5, 1, 3)]
    with pytest.raises(WrongAnswer, match=r"f\(x=\[0, 1, 2\]\)\ncame out:  0\nexpected:  3\n"):
        exercise(lambda x: len(x) if len(x) < 2 else 0).check("f", cases)


def test_what_belongs_to_the_caller_stays():
    case = {"x": [1]}
    exercise(lambda x: x.append(2)).check("f", [Case(case, want=None, may_change=("x",))])
    with pytest.raises(WrongAnswer, match="the caller's x was changed"):
        exercise(lambda x: x.append(2)).check("f", [Case(case, want=None)])
    assert case == {"x": [1]}, "each run has a copy"


def test_a_refusal_can_be_wanted_and_an_exception_is_shown_with_its_line():
    exercise(lambda: [][0]).check("f", [Case({}, want=Raised("IndexError"))])
    with pytest.raises(WrongAnswer, match=r"came out:  IndexError: .* \(your file, line \d+\)"):
        exercise(lambda: [][0]).check("f", [Case({}, want=1)])


def test_what_is_not_begun_is_to_do_and_another_notimplementederror_is_wrong():
    def not_begun():
        raise NotImplementedError("exercise 9.1")

    def not_supported():
        raise NotImplementedError("sparse tensors")

    with pytest.raises(ToDo, match="exercise 9.1"):
        exercise(not_begun).check("f", [Case({}, want=1)])
    with pytest.raises(WrongAnswer, match="sparse tensors"):
        exercise(not_supported).check("f", [Case({}, want=1)])


def test_a_file_that_cannot_be_imported_says_where():
    def load():
        compile("x = 1\ndef f(:", "ch09.py", "exec")

    with pytest.raises(WrongAnswer, match="cannot be imported: line 2, SyntaxError"):
        Exercise(load).check("f", [])
    with pytest.raises(WrongAnswer, match="there is no g in the exercise file"):
        exercise(max).check("g", [])


@pytest.mark.skipif(not hasattr(checks.signal, "SIGALRM"), reason="this system has no alarm clock")
def test_a_loop_that_never_ends_is_stopped(monkeypatch):
    def loop():
        while True:
            pass

    monkeypatch.setattr(checks, "TIME_LIMIT_S", 0.05)
    with pytest.raises(WrongAnswer, match="does a loop never end"):
        exercise(loop).check("f", [Case({}, want=1)])


def test_a_score_is_kept():
    under_check = exercise(lambda: 0.5)
    with pytest.raises(WrongAnswer, match=r"f scores 0\.5, and the aim is 0\.75"):
        under_check.check("f", [Case({}, want=AtLeast(0.75))])
    assert under_check.score == 0.5
