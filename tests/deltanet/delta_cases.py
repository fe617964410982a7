"""The cases of the gated delta rule, a loop that is slow and plain, and what an implementation makes of a case."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from kernel_checks import GUARD, NAN, check_margins, largest_difference, surrounded


@dataclass(frozen=True)
class Case:
    """One call: the tokens of each row, the heads, and the sizes of everything."""

    note: str
    lengths: tuple[int, ...]
    key_heads: int = 1
    value_heads: int = 1
    key_dim: int = 5
    value_dim: int = 3
    chunk: int = 16
    every_state: bool = False
    fierce: bool = False

    def __str__(self):
        return self.note

    @property
    def iterations(self) -> int:
        """How many tokens the programs of the kernels go through; a chunk counts as half of its tokens."""
        short = sum(length for length in self.lengths if length <= self.chunk or self.every_state)
        chunks = sum(
            -(-length // self.chunk) for length in self.lengths if length > self.chunk and not self.every_state
        )
        return self.value_heads * (short + chunks * self.chunk // 2)


CASES = [
    Case("one token, decode", (1,)),
    Case("decode rows", (1, 1, 1), value_heads=2),
    Case("short rows beside empty ones", (0, 2, 0, 5, 0)),
    Case("no row", ()),
    Case("nothing but empty rows", (0, 0)),
    Case("a row as long as a chunk", (16,)),
    Case("a row one longer than a chunk", (17,)),
    Case("whole chunks", (32,)),
    Case("the last chunk is short", (35,)),
    Case("long and short rows, and drafts", (1, 20, 3, 0, 33, 1)),
    Case("chunks of 32", (40,), chunk=32),
    Case("chunks of 64", (65, 2), chunk=64, key_dim=3),
    Case("every key head serves three", (2, 17), key_heads=2, value_heads=6),
    Case("every head its own keys", (3, 18), key_heads=3, value_heads=3),
    Case("sizes of one", (2, 17), key_dim=1, value_dim=1),
    Case("head sizes 80 and 96", (2, 17), key_dim=80, value_dim=96),
    Case("head sizes 96 and 24", (2, 17), key_dim=96, value_dim=24),
    Case("more columns than one program has", (1, 17), key_dim=130, value_dim=70),
    Case("a state after every token", (1, 4, 0, 3), value_heads=2, every_state=True),
    Case("a state after every token of a long row", (18, 1), every_state=True),
    Case("decays beyond e^88", (40, 5), fierce=True),
]


def tensors_of(case: Case, dtype=torch.float64, index_dtype=torch.int64) -> tuple[torch.Tensor, ...]:
    """The arguments of a call: q, k, v in the dtype, the gates and the state wide. Keys have length one.

    Decay is 0.8 to 0.99 and beta 0.2 to 0.8: with 1 and 1 the rule would do nothing when a token came twice. Fierce
    gates are -30 for two tokens of three, so that e^-G is no number.
    """
    generator = torch.Generator().manual_seed(len(case.note) + sum(case.lengths))
    num, wide = sum(case.lengths), torch.promote_types(dtype, torch.float32)

    def drawn(draw, *shape):
        return draw(*shape, generator=generator, dtype=torch.float64)

    q, k = (torch.nn.functional.normalize(drawn(torch.randn, num, case.key_heads, case.key_dim), dim=-1) for _ in "qk")
    v = drawn(torch.randn, num, case.value_heads, case.value_dim)
    state = drawn(torch.randn, len(case.lengths), case.value_heads, case.key_dim, case.value_dim)
    g, beta, which = (drawn(torch.rand, num, case.value_heads) for _ in range(3))
    g = (0.8 + 0.19 * g).log()
    g = torch.where(which < 2 / 3, -30, g) if case.fierce else g
    row_starts = torch.tensor([0, *case.lengths]).cumsum(0).to(index_dtype)
    return *(x.to(dtype) for x in (q, k, v)), *(x.to(wide) for x in (g, 0.2 + 0.6 * beta, state)), row_starts


def run_by_a_loop(q, k, v, g, beta, state, row_starts):
    """One token and head after the other, in float64: the outputs, and the state before and after every token."""
    q, k, v, g, beta, state = (x.double() for x in (q, k, v, g, beta, state))
    out, after = torch.zeros_like(v), torch.zeros(len(v), *state.shape[1:], dtype=torch.float64)
    group, last = v.shape[1] // k.shape[1], state.clone()
    for row in range(len(state)):
        for t in range(*row_starts[row : row + 2].tolist()):
            for head in range(v.shape[1]):
                key, memory = k[t, head // group], last[row, head] * g[t, head].exp()
                delta = beta[t, head] * (v[t, head] - memory.T @ key)
                last[row, head] = memory + torch.outer(key, delta)
                out[t, head] = last[row, head].T @ q[t, head // group]
            after[t] = last[row]
    return out, last, after


def results_in_poison(kernel, case: Case, dtype, **options):
    """What the kernel makes of a case whose inputs lie in NaN and whose results lie between guards."""
    *numbers, row_starts = tensors_of(case, dtype, torch.int32)
    numbers = [surrounded(x, NAN)[0] for x in numbers]
    v, state = numbers[2], numbers[5]
    shape = (len(v) if case.every_state else len(state), *state.shape[1:])
    out, out_memory = surrounded(torch.full_like(v, NAN), GUARD)
    new_state, state_memory = surrounded(torch.full(shape, NAN, dtype=state.dtype), GUARD)
    options = {"every_state": case.every_state, "out": out, "new_state": new_state} | options
    found = kernel(*numbers, row_starts, case.chunk, **options)
    assert found[0] is out and found[1] is new_state
    check_margins(out_memory)
    check_margins(state_memory)
    return found


def errors(kernel, case: Case, dtype) -> tuple[float, float]:
    """How far the kernel is from the loop: the outputs, and the states."""
    out, last, after = run_by_a_loop(*tensors_of(case, dtype))
    found = results_in_poison(kernel, case, dtype)
    wanted = (out, after if case.every_state else last)
    return tuple(largest_difference(x, y) for x, y in zip(found, wanted, strict=True))
