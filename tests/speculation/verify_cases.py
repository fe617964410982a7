"""The cases of verification, a loop that is slow and plain, and how far an implementation is from it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from kernel_checks import GUARD, NAN, check_margins, largest_difference, surrounded


@dataclass(frozen=True)
class Case:
    """One call: how many drafts each row has, the vocabulary, and what p and q are like.

    kind: "drawn" from another distribution than p, "same" as p, "looked up" (q is None), or "greedy" (p is one-hot).
    """

    note: str
    drafts: tuple[int, ...]
    kind: str = "drawn"
    vocab: int = 7
    block: int = 16
    on_marks: bool = False  # probabilities and uniforms are multiples of 1/16: cumulative sums fall on the marks

    def __str__(self):
        return self.note

    @property
    def iterations(self) -> int:
        """How many drafts and blocks the kernel's programs look at, at most."""
        return sum(self.drafts) + 2 * len(self.drafts) * -(-self.vocab // self.block)


CASES = [
    Case("one draft", (1,)),
    Case("different counts, none among them", (0, 3, 1, 0, 0, 2)),
    Case("no row has a draft", (0, 0, 0)),
    Case("no row at all", ()),
    Case("many drafts", (9, 0, 8)),
    Case("p is q: all are kept", (3, 0, 5, 1), "same"),
    Case("p is q, on the marks", (3, 2, 4), "same", on_marks=True),
    Case("looked up", (2, 4, 0, 1, 3), "looked up"),
    Case("looked up, nearly always in vain", (1, 1, 1), "looked up", vocab=50),
    Case("greedy", (3, 0, 2, 4), "greedy"),
    Case("a single token", (2, 0, 1), vocab=1),
    Case("two tokens", (2, 0, 3, 1), vocab=2),
    Case("a block exactly", (3, 1, 2), vocab=16),
    Case("one token more than a block", (3, 1, 2), vocab=17),
    Case("several blocks", (3, 1, 0, 2), vocab=77),
    Case("several blocks, looked up", (3, 1, 0, 2), "looked up", vocab=77),
    Case("several blocks, greedy", (3, 1, 0, 2), "greedy", vocab=77),
    Case("blocks of one", (2, 1, 0), vocab=11, block=1),
    Case("on the marks", (1, 2, 0, 3, 1, 0), on_marks=True, vocab=13, block=4),
    Case("on the marks, looked up", (1, 2, 0, 3, 1, 0), "looked up", on_marks=True, vocab=13, block=4),
    Case("a large vocabulary", (2, 1, 0), vocab=5003, block=1024),
    Case("the largest vocabulary", (1, 0), vocab=250_001, block=8192),
]


def distributions(rows: int, case: Case, generator: torch.Generator) -> torch.Tensor:
    """Filtered ones: a third of the tokens has no probability, and another third in each row."""
    if case.on_marks:
        ids = torch.randint(case.vocab, (rows, 16), generator=generator)
        return torch.zeros(rows, case.vocab, dtype=torch.float64).scatter_add(
            1, ids, torch.full_like(ids, 1 / 16, dtype=torch.float64)
        )
    logits = 2 * torch.randn(rows, case.vocab, generator=generator, dtype=torch.float64)
    order = torch.rand(rows, case.vocab, generator=generator).argsort(1)
    return logits.masked_fill(order >= max(1, 2 * case.vocab // 3), -torch.inf).softmax(1)


def tensors_of(case: Case, dtype=torch.float64, index_dtype=torch.int64) -> tuple[torch.Tensor | None, ...]:
    """The arguments of a call. Drafts are drawn from q as it is after rounding."""
    generator = torch.Generator().manual_seed(len(case.note) + sum(case.drafts))
    num_rows, num_drafts = len(case.drafts), sum(case.drafts)
    p = distributions(num_drafts + num_rows, case, generator)
    if case.kind == "greedy":
        p = torch.nn.functional.one_hot(p.argmax(1), case.vocab)
    p = p.to(dtype)
    has_next = torch.tensor([i < d for d in case.drafts for i in range(d + 1)], dtype=torch.bool)
    q = (0.7 * p[has_next] + 0.3 * distributions(num_drafts, case, generator)).to(dtype)
    q = p[has_next].clone() if case.kind == "same" else q
    draft_ids = torch.multinomial(q.double(), 1, generator=generator)[:, 0] if num_drafts else torch.zeros(0)
    row_starts = torch.tensor(list(accumulate((d + 1 for d in case.drafts), initial=0)), dtype=index_dtype)
    u = torch.rand(num_drafts + num_rows, generator=generator, dtype=torch.float64)
    u = (u * 16).floor() / 16 if case.on_marks else u
    q = None if case.kind == "looked up" else q
    return p, draft_ids.to(index_dtype), q, row_starts, u[:num_drafts], u[num_drafts:]


def token_at(weights: list[float], u: float) -> int:
    """The first token whose cumulative weight exceeds u of them all; the last possible one if rounding leaves none."""
    mark, cumulative = u * sum_in_order(weights), 0.0
    for token, weight in enumerate(weights):
        cumulative += weight
        if weight > 0 and cumulative > mark:
            return token
    return max(token for token, weight in enumerate(weights) if weight > 0)


def sum_in_order(weights: list[float]) -> float:
    """A sum without the compensation that newer Pythons give theirs."""
    total = 0.0
    for weight in weights:
        total += weight
    return total


def verified_by_a_loop(p, draft_ids, q, row_starts, accept_u, sample_u):
    """What must come out, one row, one draft and one token after the other."""
    num_accepted, next_ids, draft = [], [], 0
    for row, u in enumerate(sample_u.tolist()):
        start, stop = row_starts[row : row + 2].tolist()
        kept, weights = 0, p[stop - 1].tolist()
        for position in range(start, stop - 1):
            this, token = draft + position - start, int(draft_ids[draft + position - start])
            of_q = 1.0 if q is None else q[this, token].item()
            if accept_u[this].item() * of_q >= p[position, token].item():
                theirs = [float(token == i) for i in range(p.shape[1])] if q is None else q[this].tolist()
                weights = [max(0.0, a - b) for a, b in zip(p[position].tolist(), theirs, strict=True)]
                break
            kept += 1
        num_accepted.append(kept)
        next_ids.append(token_at(weights, u))
        draft += stop - start - 1
    return torch.tensor(num_accepted, dtype=torch.int64), torch.tensor(next_ids, dtype=torch.int64)


def errors(kernel, case: Case, dtype) -> tuple[float, float]:
    """How far the counts and the tokens are from the loop's. What is read lies in NaN, the results between guards."""
    p, draft_ids, q, row_starts, accept_u, sample_u = args = tensors_of(case, dtype, torch.int32)
    wanted = verified_by_a_loop(*args)
    p, accept_u, sample_u = (surrounded(x, NAN)[0] for x in (p, accept_u, sample_u))
    q = None if q is None else surrounded(q, NAN)[0]
    (draft_ids, _), (row_starts, _) = surrounded(draft_ids, 10**6), surrounded(row_starts, 10**6)
    results = [surrounded(torch.full_like(x, -5), GUARD) for x in wanted]
    options = {"num_accepted": results[0][0], "next_ids": results[1][0], "block": case.block}
    found = kernel(p, draft_ids, q, row_starts, accept_u, sample_u, **options)
    for (result, memory), back in zip(results, found, strict=True):
        check_margins(memory)
        assert back.data_ptr() == result.data_ptr()
    return tuple(largest_difference(x, y) for x, y in zip(found, wanted, strict=True))
