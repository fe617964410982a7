"""The kernel of verification, interpreted: on the reference's cases, at every block size, and on what is no number."""

from __future__ import annotations

import pytest
import torch
from kernel_checks import (
    DTYPES,
    MOST_ITERATIONS,
    check_a_compiled_kernel_wants_a_gpu,
    check_a_missing_triton_is_named,
    check_interpreted,
    needs_triton,
)
from verify_cases import CASES, Case, errors, tensors_of

from minserve.errors import InvalidValue
from minserve.sampling import choose
from minserve.speculation.verify import verify

RAGGED = next(case for case in CASES if case.note.startswith("different counts"))
BLOCKS = [case for case in CASES if case.note.startswith("several blocks")]


@pytest.fixture(scope="module")
def kernel():
    """The wrapper of the kernel, in the interpreter."""
    from minserve.speculation import verify_triton

    check_interpreted(verify_triton.verify_kernel)
    return verify_triton.verify


def check_same(found, wanted):
    """The same counts and tokens, as 64-bit numbers."""
    for x, y in zip(found, wanted, strict=True):
        assert x.dtype == y.dtype == torch.int64 and torch.equal(x, y)


@needs_triton
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernel_is_the_loop(kernel, case, dtype):  # faults K2, K4: inputs lie in NaN, results between guards
    assert case.iterations <= MOST_ITERATIONS
    assert errors(kernel, case, dtype) == (0, 0)


@needs_triton
@pytest.mark.parametrize("block", [1, 2, 4, 8, 16, None])
@pytest.mark.parametrize("kind", ["drawn", "looked up"])
def test_where_blocks_end_does_not_matter(kernel, block, kind):
    """Sums of sixteenths are exact, and u often falls on one: a token more or less is a wrong comparison."""
    for seed in range(5):
        args = tensors_of(Case("x" * seed, (1, 0, 2), kind, vocab=9 + seed % 3, on_marks=True))
        check_same(kernel(*args, block=block), verify(*args))


@needs_triton
@pytest.mark.parametrize("u", [0.0, 1 - 2.0**-53])
@pytest.mark.parametrize("case", [RAGGED, *BLOCKS], ids=str)
def test_the_first_and_the_last_token(kernel, case, u):
    """Of those that have any probability."""
    *args, sample_u = tensors_of(case, torch.float32)
    args.append(torch.full_like(sample_u, u))
    check_same(kernel(*args, block=case.block), verify(*args))


@needs_triton
@pytest.mark.parametrize("u", [0.0, 0.3, 0.7])
def test_where_rounding_leaves_no_rest_the_token_comes_from_p(kernel, u):
    p = torch.tensor([[0.0, 0.5, 0.5, 0.0], [1.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    q = torch.tensor([[0.0, 0.5 + 1e-9, 0.5, 0.0]], dtype=torch.float64)
    u_of_draft, u_of_row = (torch.tensor([x], dtype=torch.float64) for x in (1 - 2.0**-53, u))
    args = (p, torch.tensor([1]), q, torch.tensor([0, 2]), u_of_draft, u_of_row)
    check_same(kernel(*args, block=2), verify(*args))
    assert kernel(*args)[1].item() == (1 if u < 0.5 else 2)


@needs_triton
@pytest.mark.parametrize("kind", ["drawn", "looked up"])
@pytest.mark.parametrize("tokens", [[0], [5], [3, 16], list(range(17))], ids=str)
def test_what_is_no_number_gets_what_the_reference_gives_it(kernel, kind, tokens):
    case = Case("", (2, 0, 3, 1), kind, vocab=17, block=8)
    p, *rest = tensors_of(case)
    for position in range(len(p)):
        broken = p.clone()
        broken[position, tokens] = torch.nan
        found = kernel(broken, *rest, block=case.block)
        check_same(found, verify(broken, *rest))
        assert ((found[1] >= 0) & (found[1] < 17)).all()


@needs_triton
@pytest.mark.parametrize("token", [-1, 7, 2**40, -(2**40)])
@pytest.mark.parametrize("kind", ["drawn", "looked up"])
@pytest.mark.parametrize("u", [0.0, 0.999])
def test_a_draft_outside_the_vocabulary_is_turned_down(kernel, token, kind, u):
    p, draft_ids, q, row_starts, accept_u, sample_u = tensors_of(Case("", (1, 3), kind))
    p = (p + 0.01).softmax(1)  # whatever lies beside a row would be accepted
    draft_ids[2] = token
    found = kernel(p, draft_ids, q, row_starts, torch.zeros_like(accept_u), torch.full_like(sample_u, u))
    rest = p[3] if q is None else (p[3] - q[2]).clamp(min=0)
    assert found[0].tolist() == [1, 1] and found[1][1] == choose(rest, u)


@needs_triton
def test_a_draft_that_q_could_not_draw_is_kept_where_p_could(kernel):
    p, q = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]), torch.tensor([[0.0, 0.0, 1.0]])
    u = torch.tensor([0.9])
    for token, wanted in (0, [1, 2]), (2, [0, 1]):
        found = kernel(p, torch.tensor([token]), q, torch.tensor([0, 2]), u, u)
        assert [x.item() for x in found] == wanted


@needs_triton
@pytest.mark.parametrize("case", [RAGGED, *BLOCKS], ids=str)
def test_what_else_is_in_the_batch_changes_nothing(kernel, case):  # fault J4
    p, draft_ids, q, row_starts, accept_u, sample_u = args = tensors_of(case, torch.float32)
    wanted = kernel(*args, block=case.block)
    for row, num_drafts in enumerate(case.drafts):
        start = row_starts[row].item()
        of_row = slice(start - row, start - row + num_drafts)
        alone = kernel(
            p[start : start + num_drafts + 1], draft_ids[of_row], None if q is None else q[of_row],
            torch.tensor([0, num_drafts + 1]), accept_u[of_row], sample_u[[row]], block=case.block,
        )  # fmt: skip
        check_same(alone, [x[[row]] for x in wanted])


@needs_triton
def test_numbers_of_any_dtype_and_tensors_that_are_views(kernel):
    case = BLOCKS[0]
    p, draft_ids, q, row_starts, accept_u, sample_u = args = tensors_of(case, torch.float16)
    wanted = verify(*args)
    views = [
        torch.stack([x, x], -1)[..., 0] for x in (p.double(), draft_ids, q.float(), row_starts, accept_u, sample_u)
    ]
    assert not any(x.is_contiguous() for x in views)
    check_same(kernel(*views, block=case.block), wanted)


class FewerPrograms:
    """A kernel of which only the first programs run."""

    def __init__(self, kernel, num_programs):
        self.kernel, self.num_programs = kernel, num_programs

    def __getitem__(self, grid):
        return self.kernel[(min(self.num_programs, grid[0]),)]


@needs_triton
def test_a_program_writes_its_own_row_only(kernel, monkeypatch):  # fault K6
    from minserve.speculation import verify_triton as module

    monkeypatch.setattr(module, "verify_kernel", FewerPrograms(module.verify_kernel, 2))
    args = tensors_of(RAGGED)
    results = [torch.full((len(RAGGED.drafts),), -5) for _ in range(2)]
    found = kernel(*args, num_accepted=results[0], next_ids=results[1])
    for result, wanted in zip(found, verify(*args), strict=True):
        assert result.tolist() == [*wanted[:2].tolist(), *[-5] * 4]


@needs_triton
@pytest.mark.parametrize("vocab", [248_320, 257])
@pytest.mark.parametrize("position", [1, 8648, 8649, 2**31 - 1])
def test_offsets_are_64_bits_wide(kernel, position, vocab):  # fault K1
    """A kernel of its own stores the offsets that this one computes; no tensor of that size is needed."""
    from far_positions import offset_of

    assert offset_of(position, vocab) == position * vocab


@needs_triton
def test_what_the_kernel_refuses(kernel):
    p, draft_ids, q, row_starts, accept_u, sample_u = args = tensors_of(RAGGED)
    with pytest.raises(InvalidValue, match="draft_ids"):
        kernel(p, draft_ids[:-1], q, row_starts, accept_u, sample_u)
    with pytest.raises(InvalidValue, match="q.shape"):
        kernel(p, draft_ids, q[:, 1:], row_starts, accept_u, sample_u)
    for name in ("num_accepted", "next_ids"):
        for wrong in (torch.zeros(5, dtype=torch.int64), torch.zeros(12, dtype=torch.int64)[::2]):
            with pytest.raises(InvalidValue, match=name):
                kernel(*args, **{name: wrong})
    for block in (-8, 12):
        with pytest.raises(InvalidValue, match="block"):
            kernel(*args, block=block)


@needs_triton
def test_a_compiled_kernel_wants_a_gpu(kernel, monkeypatch):
    from minserve.speculation import verify_triton as module

    args = tensors_of(CASES[0], torch.float32)
    check_a_compiled_kernel_wants_a_gpu(monkeypatch, module, "verify_kernel", lambda: kernel(*args))


def test_a_missing_triton_is_named(monkeypatch):
    check_a_missing_triton_is_named(monkeypatch, "minserve/speculation/verify_triton.py")
