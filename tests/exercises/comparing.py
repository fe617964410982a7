"""Comparing and printing what exercises take and give: numbers, lists, dicts, dataclasses, arrays, tensors."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from numbers import Number

import numpy as np
import torch

MAX_SHOWN, MAX_ELEMENTS = 400, 16


@dataclass(frozen=True)
class Raised:
    """An outcome that is an exception: its type's name, its text, the line that raised it. No type: another misdeed."""

    kind: str
    text: str = ""
    where: str = ""

    def __str__(self) -> str:
        if not self.kind:
            return self.text
        return f"{self.kind}: {self.text}".removesuffix(": ") + (f" (your file, {self.where})" if self.where else "")


def difference(got, want, rtol: float, atol: float, path: str = "") -> str | None:
    """The first place where `got` is not `want`, in words; None where they agree.

    Numbers may be off by rtol x |want| or atol, two ints by nothing; NaN equals NaN. A list, a tuple and an array of
    equal content are equal where a list or an array is wanted; a tensor must have the wanted shape and dtype. Objects
    of other types are not compared.
    """
    at = f"at {path}: " if path else ""
    if hasattr(want, "differs"):
        return want.differs(got)
    if isinstance(got, Raised) or isinstance(want, Raised):
        same = isinstance(got, Raised) and isinstance(want, Raised) and got.kind == want.kind
        return None if same else f"{at}{show(got)}, should be {show(want)}"
    if got is None and want is not None:
        return f"{at}None, should be {show(want)}" if at else "None; was the result returned?"
    if isinstance(want, torch.Tensor):
        return _tensor_difference(got, want, rtol, atol, at)
    if isinstance(got, (np.ndarray, torch.Tensor, np.generic)):
        got = got.tolist()
    if isinstance(want, (np.ndarray, np.generic)):
        want = want.tolist()
    if isinstance(want, Mapping):
        return _mapping_difference(got, want, rtol, atol, path)
    if is_dataclass(want):
        return _mapping_difference(vars(got) if is_dataclass(got) else got, vars(want), rtol, atol, path)
    if isinstance(want, Sequence) and not isinstance(want, (str, bytes)):
        return _sequence_difference(got, want, rtol, atol, path)
    if isinstance(want, Number):
        return None if _is_close(got, want, rtol, atol) else f"{at}{show(got)}, should be {show(want)}"
    if isinstance(want, (str, bytes, type(None), set, frozenset)):
        return None if got == want else f"{at}{show(got)}, should be {show(want)}"
    return None


def _is_close(got, want: Number, rtol: float, atol: float) -> bool:
    """Whether a number is the wanted one; two ints must be equal."""
    if not isinstance(got, Number):
        return False
    if isinstance(got, int) and isinstance(want, int):
        return got == want
    both_nan = got != got and want != want
    return both_nan or got == want or math.isclose(got, want, rel_tol=rtol, abs_tol=atol)


def _mapping_difference(got, want: Mapping, rtol: float, atol: float, path: str) -> str | None:
    """The first difference of two dicts."""
    if not isinstance(got, Mapping):
        return f"{path or 'the result'} is {_kind(got)}; it should be a dict"
    missing, unexpected = [key for key in want if key not in got], [key for key in got if key not in want]
    if missing or unexpected:
        words = [f"no key {key!r}" for key in missing[:1]] + [f"an unexpected key {key!r}" for key in unexpected[:1]]
        return f"{path or 'the result'} has {' but '.join(words)}"
    found = (difference(got[key], want[key], rtol, atol, f"{path}[{key!r}]") for key in want)
    return next((text for text in found if text), None)


def _sequence_difference(got, want: Sequence, rtol: float, atol: float, path: str) -> str | None:
    """The first difference of two lists."""
    if not isinstance(got, Sequence) or isinstance(got, (str, bytes)):
        return f"{path or 'the result'} is {_kind(got)}; it should be a {type(want).__name__} of {len(want)}"
    if len(got) != len(want):
        return f"{path or 'the result'} has {len(got)} entries, should have {len(want)}"
    found = (difference(g, w, rtol, atol, f"{path}[{i}]") for i, (g, w) in enumerate(zip(got, want, strict=True)))
    return next((text for text in found if text), None)


def _tensor_difference(got, want: torch.Tensor, rtol: float, atol: float, at: str) -> str | None:
    """The first difference of two tensors, with its place."""
    if not isinstance(got, torch.Tensor):
        return f"{at}{_kind(got)}; it should be a tensor of shape {list(want.shape)}"
    for name in ("shape", "dtype"):
        if getattr(got, name) != getattr(want, name):
            mine, right = (_short(getattr(x, name)) for x in (got, want))
            return f"{at}{name} {mine}, should be {right}"
    close = torch.isclose(got, want, rtol=rtol, atol=atol, equal_nan=True)
    if close.all():
        return None
    place = (~close).nonzero()[0].tolist()
    num_wrong = f"{int((~close).sum())} of {want.numel()} numbers differ, first at {place}: "
    return f"{at}{num_wrong}{show(got[tuple(place)].item())}, should be {show(want[tuple(place)].item())}"


def _kind(x) -> str:
    """A value and its type, for a message on a wrong type."""
    return f"{show(x)}, of type {type(x).__name__}"


def _short(x) -> str:
    """A shape or a dtype without ceremony."""
    return str(x).removeprefix("torch.Size(").removesuffix(")").removeprefix("torch.")


def num_leaves(x) -> int:
    """How many numbers and names an input is made of: its size, when the smallest failing one is looked for."""
    if isinstance(x, (torch.Tensor, np.ndarray)):
        return int(np.prod(x.shape))
    if isinstance(x, Mapping):
        return sum(num_leaves(value) for value in x.values())
    if isinstance(x, (list, tuple)):
        return sum(num_leaves(value) for value in x)
    return 1


def show(x, call: str = "") -> str:
    """A value in at most 400 characters, close to what one would type; with `call`, its entries as arguments."""
    text = f"{call}({', '.join(f'{key}={_show(value)}' for key, value in x.items())})" if call else _show(x)
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 4]} ..."


def _show(x) -> str:
    """A value of any length."""
    if isinstance(x, (float, np.floating)):
        return f"{x:.6g}" + (".0" if f"{x:.6g}".lstrip("-").isdigit() else "")
    if isinstance(x, torch.Tensor):
        if x.numel() > MAX_ELEMENTS:
            return f"<tensor {list(x.shape)} {_short(x.dtype)}>"
        return f"torch.tensor({_show(x.tolist())})" if x.numel() else f"torch.zeros{_show(tuple(x.shape))}"
    if isinstance(x, np.ndarray):
        return f"np.array({_show(x.tolist())})" if x.size <= MAX_ELEMENTS else f"<array {list(x.shape)}>"
    if isinstance(x, Mapping):
        return "{" + ", ".join(f"{key!r}: {_show(value)}" for key, value in x.items()) + "}"
    if isinstance(x, (list, tuple)):
        inside = ", ".join(_show(value) for value in x)
        return f"[{inside}]" if isinstance(x, list) else f"({inside}{',' if len(x) == 1 else ''})"
    if is_dataclass(x) and type(x).__str__ is object.__str__:
        return f"{type(x).__name__}({', '.join(f'{key}={_show(value)}' for key, value in vars(x).items())})"
    if callable(x):
        return getattr(x, "__name__", type(x).__name__)
    if type(x).__repr__ is object.__repr__ or isinstance(x, np.random.Generator):
        return f"<{type(x).__name__}>"
    return str(x) if is_dataclass(x) else repr(x)
