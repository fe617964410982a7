"""The cases of the convolution, a loop that is slow and plain, and what an implementation makes of a case."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from kernel_checks import GUARD, NAN, check_margins, largest_difference, surrounded


@dataclass(frozen=True)
class Case:
    """One call: the tokens of each row, and the sizes of everything."""

    note: str
    lengths: tuple[int, ...]
    channels: int = 5
    keep: int = 3
    every_tail: bool = False

    def __str__(self):
        return self.note


CASES = [
    Case("one token, decode", (1,)),
    Case("rows shorter than the tail", (1, 2, 3)),
    Case("one token more than the tail", (4,)),
    Case("empty rows keep their tails", (0, 2, 0, 5, 0)),
    Case("no row", ()),
    Case("nothing but empty rows", (0, 0)),
    Case("many rows in one program", (1, 2, 1, 0, 3, 1)),
    Case("a row of several programs", (19, 1)),
    Case("one channel", (4, 1), channels=1),
    Case("more channels than a program has", (2, 5), channels=300),
    Case("a kernel of two looks back on one", (1, 3), keep=1),
    Case("a kernel of eight", (2, 11, 7), channels=6, keep=7),
    Case("a tail after every token", (1, 4, 0, 3), every_tail=True),
    Case("a tail after every token of a long row", (11, 1), channels=37, every_tail=True),
]


def tensors_of(case: Case, dtype=torch.float64, index_dtype=torch.int64) -> tuple[torch.Tensor, ...]:
    """The arguments of a call."""
    generator = torch.Generator().manual_seed(len(case.note) + sum(case.lengths))
    shapes = ((sum(case.lengths), case.channels), (case.channels, case.keep + 1))
    shapes += ((len(case.lengths), case.keep, case.channels),)
    numbers = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    return *numbers, torch.tensor([0, *case.lengths]).cumsum(0).to(index_dtype)


def convolved_by_a_loop(x, weight, tails, row_starts):
    """One token after the other, in float64: the outputs, each row's tail, and the tail after every token."""
    keep, out = tails.shape[1], torch.zeros(x.shape, dtype=torch.float64)
    last, after = tails.double().clone(), torch.zeros(len(x), *tails.shape[1:], dtype=torch.float64)
    for row in range(len(tails)):
        for t in range(*row_starts[row : row + 2].tolist()):
            inputs = torch.cat([last[row], x[t : t + 1].double()])
            mixed = (inputs * weight.double().T).sum(0)
            out[t], last[row] = mixed * mixed.sigmoid(), inputs[-keep:]
            after[t] = last[row]
    return out, last, after


def errors(kernel, case: Case, dtype) -> tuple[float, float]:
    """How far the kernel is from the loop, with inputs in NaN and results between guards: outputs, and tails."""
    args = tensors_of(case, dtype, torch.int32)
    x, weight, tails = (surrounded(x, NAN)[0] for x in args[:3])
    out, out_memory = surrounded(torch.full_like(x, NAN), GUARD)
    shape = (len(x) if case.every_tail else len(tails), *tails.shape[1:])
    new_tails, tails_memory = surrounded(torch.full(shape, NAN, dtype=dtype), GUARD)
    found = kernel(x, weight, tails, args[3], every_tail=case.every_tail, out=out, new_tails=new_tails)
    assert found[0] is out and found[1] is new_tails
    check_margins(out_memory)
    check_margins(tails_memory)
    wanted, last, after = convolved_by_a_loop(*args)
    return largest_difference(out, wanted), largest_difference(new_tails, after if case.every_tail else last)
