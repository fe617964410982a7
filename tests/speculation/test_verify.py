"""Verification: a loop gives the same, nothing that it emits has another distribution than p, and none is lost."""

from __future__ import annotations

from fractions import Fraction
from random import Random

import pytest
import torch
from exact_odds import emitted, first_tokens, mean_accepted, plain
from verify_cases import CASES, Case, tensors_of, verified_by_a_loop

from minserve.errors import InvalidValue
from minserve.sampling import Stream, choose, uniform
from minserve.speculation.verify import check_lengths, verify

ALMOST_ONE = 1 - 2.0**-53  # the largest that `uniform` gives
P, Q = [[3, 5, 2]] * 3, [[6, 2, 2]] * 3  # fault E5's, in tenths
ARGMAX = [[10, 0, 0]] * 3  # where q is largest


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32], ids=str)
def test_the_reference_is_the_loop(case, dtype, index_dtype):
    args = tensors_of(case, dtype, index_dtype)
    before = [x if x is None else x.clone() for x in args]
    for found, wanted in zip(verify(*args), verified_by_a_loop(*args), strict=True):
        assert found.dtype == torch.int64 and torch.equal(found, wanted)
    assert all(x is y or torch.equal(x, y) for x, y in zip(args, before, strict=True)), "an argument was changed"


# --- the distribution, exactly


def random_table(random: Random, vocab: int, size: int) -> list[list[int]]:
    """A distribution after each token, in size-ths; some tokens have no probability."""
    rows = [[random.randrange(vocab) for _ in range(size)] for _ in range(vocab)]
    return [[row.count(token) for token in range(vocab)] for row in rows]


def test_drafts_drawn_from_q_leave_p():  # faults E5, E7
    odds = emitted(P, Q, Q, 1, accept_cells=10, sample_cells=30)
    assert first_tokens(odds, P, 2) == plain(P, 2)
    assert mean_accepted(odds) == Fraction(7, 10)


def test_argmax_drafts_are_one_hot():  # fault E5
    odds = emitted(P, ARGMAX, None, 1, accept_cells=10, sample_cells=70)
    assert first_tokens(odds, P, 2) == plain(P, 2) and mean_accepted(odds) == Fraction(3, 10)
    wrong = first_tokens(emitted(P, ARGMAX, Q, 1, accept_cells=10, sample_cells=30), P, 1)
    assert wrong == {(0,): Fraction(1, 2), (1,): Fraction(1, 2)}, "softmax q for argmax drafts must be seen to be wrong"


def test_drawn_drafts_taken_for_one_hot_are_kept_less_often():  # fault E7
    odds = emitted(P, Q, None, 1, accept_cells=10, sample_cells=280)
    assert first_tokens(odds, P, 2) == plain(P, 2), "no bias"
    assert mean_accepted(odds) == Fraction(32, 100)


@pytest.mark.parametrize("vocab", [2, 3, 5, 7])
@pytest.mark.parametrize("is_told", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_one_draft_of_any_kind(vocab, is_told, seed):
    random = Random(seed)
    p, drawn = random_table(random, vocab, 6), random_table(random, vocab, 6)
    odds = emitted(p, drawn, drawn if is_told else None, 1, accept_cells=60, sample_cells=60)
    assert first_tokens(odds, p, 2) == plain(p, 2)
    kept = [min(a, b) if is_told else a * b / 6 for a, b in zip(p[0], drawn[0], strict=True)]
    assert abs(float(mean_accepted(odds)) - sum(kept) / 6) < 1e-12


@pytest.mark.parametrize("depth, size, cells", [(0, 6, 60), (2, 4, 12), (3, 3, 6)])
@pytest.mark.parametrize("is_told", [True, False])
def test_several_drafts_and_the_tokens_behind_them(depth, size, cells, is_told):
    """The joint distribution of all tokens that a step may give, and of one more."""
    random = Random(depth)
    p, drawn = random_table(random, 3, size), random_table(random, 3, size)
    odds = emitted(p, drawn, drawn if is_told else None, depth, cells, cells)
    assert first_tokens(odds, p, depth + 2) == plain(p, depth + 2)


# --- the distribution, with the random numbers of requests

NUM_SAMPLES = 20_000


@pytest.fixture(scope="module")
def drawn_numbers():
    """Random numbers of requests, as an engine draws them, by stream: one row for each position, a column per seed."""
    wanted = {Stream.DRAFT: 3, Stream.ACCEPT: 3, Stream.RESAMPLE: 1, Stream.SAMPLE: 2}
    return {
        stream: torch.tensor(
            [[uniform(seed, position, stream) for seed in range(NUM_SAMPLES)] for position in range(num)],
            dtype=torch.float64,
        )
        for stream, num in wanted.items()
    }


def p_value(p: torch.Tensor, tokens: torch.Tensor) -> float:
    """How likely counts as far from the distribution of two tokens in a row are, if it is theirs: chi-square."""
    vocab = len(p)
    wanted = (p[0][:, None] * p).flatten() * len(tokens)
    counts = torch.bincount(tokens[:, 0] * vocab + tokens[:, 1], minlength=vocab**2).double()
    chi_square = ((counts - wanted) ** 2 / wanted).sum()
    return torch.special.gammaincc(torch.tensor((vocab**2 - 1) / 2, dtype=torch.float64), chi_square / 2).item()


def first_two(p, q, depths: torch.Tensor, numbers, drafter: str, is_told: bool) -> torch.Tensor:
    """Two tokens of each request: a step with drafts, of which rows have different numbers; then plain steps."""
    before, drafts = torch.zeros(NUM_SAMPLES, dtype=torch.int64), []
    for u in numbers[Stream.DRAFT]:
        drawn = {"draws": choose(q[before], u), "argmax": q[before].argmax(1), "constant": torch.ones_like(before)}
        before = drawn[drafter]
        drafts.append(before)
    rows = torch.stack([torch.zeros_like(before), *drafts], 1)
    has_token, has_draft = (torch.arange(n) < (depths + n - 3)[:, None] for n in (4, 3))
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), (depths + 1).cumsum(0)])
    num_accepted, next_ids = verify(
        p[rows][has_token], rows[:, 1:][has_draft], q[rows[:, :-1]][has_draft] if is_told else None, starts,
        numbers[Stream.ACCEPT].T[has_draft], numbers[Stream.RESAMPLE][0],
    )  # fmt: skip
    one = torch.where(num_accepted > 0, rows[:, 1], next_ids)
    follows = torch.where(num_accepted > 1, rows[:, 2], next_ids)
    return torch.stack([one, torch.where(num_accepted > 0, follows, choose(p[one], numbers[Stream.SAMPLE][1]))], 1)


@pytest.mark.parametrize("vocab", [3, 5, 7])
@pytest.mark.parametrize("depths", [[1], [2], [3], [0, 1, 2, 3], [2, 0]], ids=str)
@pytest.mark.parametrize(
    "drafter, is_told", [("draws", True), ("draws", False), ("argmax", False), ("constant", False)]
)
def test_requests_get_tokens_of_the_distribution(drawn_numbers, vocab, depths, drafter, is_told):  # faults E5, E7
    generator = torch.Generator().manual_seed(vocab)
    p, q = torch.randn(2, vocab, vocab, generator=generator, dtype=torch.float64).softmax(-1)
    depths = torch.tensor(depths).repeat(NUM_SAMPLES)[:NUM_SAMPLES]
    assert p_value(p, first_two(p, q, depths, drawn_numbers, drafter, is_told)) > 1e-3
    if drafter != "draws":  # the test must be able to see that a softmax is not what these drafts come from
        assert p_value(p, first_two(p, q, depths, drawn_numbers, drafter, True)) < 1e-9


# --- single tokens


@pytest.mark.parametrize("drafts", [(1,), (3,), (0, 4, 1, 2), (5, 5)], ids=str)
@pytest.mark.parametrize("u", [0.0, 0.5, ALMOST_ONE])
def test_where_p_is_q_a_step_gives_one_token_more_than_drafts(drafts, u):  # fault E13
    p, draft_ids, q, row_starts, accept_u, sample_u = tensors_of(Case("", drafts, "same", vocab=50), torch.float32)
    num_accepted, next_ids = verify(p, draft_ids, q, row_starts, torch.full_like(accept_u, u), sample_u)
    assert num_accepted.tolist() == list(drafts)
    assert torch.equal(next_ids, choose(p[row_starts[1:] - 1], sample_u)), "the token behind the last draft"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
def test_a_row_without_drafts_gets_the_token_of_a_plain_step(dtype):
    case = Case("", (0,) * 300, vocab=40)
    p, draft_ids, q, row_starts, accept_u, sample_u = tensors_of(case, dtype)
    p[::3, 7:] = 0
    sample_u[::5], sample_u[1::5] = 0, ALMOST_ONE
    _, next_ids = verify(p, draft_ids, q, row_starts, accept_u, sample_u)
    assert torch.equal(next_ids, choose(p, sample_u)) and (p[range(300), next_ids] > 0).all()
    p[range(300), torch.arange(300) % 40] = torch.nan
    _, next_ids = verify(p, draft_ids, q, row_starts, accept_u, sample_u)
    assert torch.equal(next_ids, choose(p, sample_u)), "even of what is no number"


@pytest.mark.parametrize("u", [0.0, 0.5, ALMOST_ONE])
@pytest.mark.parametrize("q_is", ["drawn", "one-hot"])
def test_greedy_rows_keep_the_likeliest_token_alone(u, q_is):
    p = torch.eye(4)[[2, 0, 3]]
    for drafts, kept, token in ([2, 0], 2, 3), ([2, 1], 1, 0), ([1, 0], 0, 2), ([0, 0], 0, 2):
        q = None if q_is == "one-hot" else torch.full((2, 4), 0.25)
        u_of_drafts, u_of_rows = torch.full((2,), u, dtype=torch.float64), torch.full((1,), u, dtype=torch.float64)
        found = verify(p, torch.tensor(drafts), q, torch.tensor([0, 3]), u_of_drafts, u_of_rows)
        assert [x.tolist() for x in found] == [[kept], [token]]


@pytest.mark.parametrize("u", [0.0, 0.3, 0.7, ALMOST_ONE])
def test_where_rounding_leaves_no_rest_the_token_comes_from_p(u):
    p = torch.tensor([[0.0, 0.5, 0.5, 0.0], [1.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    q = torch.tensor([[0.0, 0.5 + 1e-9, 0.5, 0.0]], dtype=torch.float64)
    u_of_draft, u_of_row = (torch.tensor([x], dtype=torch.float64) for x in (ALMOST_ONE, u))
    found = verify(p, torch.tensor([1]), q, torch.tensor([0, 2]), u_of_draft, u_of_row)
    assert [x.tolist() for x in found] == [[0], choose(p[:1], u_of_row).tolist()]


@pytest.mark.parametrize("where", ["everywhere", "in p of the draft", "behind it", "in one token", "in q"])
def test_a_row_of_nan_gets_some_token_and_the_others_their_own(where):
    args = tensors_of(Case("", (1, 2, 0), vocab=6))
    wanted = verify(*args)
    p, draft_ids, q = (x.clone() for x in args[:3])
    if where == "in q":
        q[1:, (draft_ids[1] + 1) % 6] = torch.nan
        q[2, draft_ids[2]] = 0.5
    p[
        {"everywhere": [2, 3, 4], "in p of the draft": [2], "behind it": [3, 4], "in one token": [2], "in q": []}[where]
    ] = torch.nan
    if where == "in one token":
        p[2] = args[0][2]
        p[2, 3] = torch.nan
    found = verify(p, draft_ids, q, *args[3:])
    for result, clean in zip(found, wanted, strict=True):
        assert torch.equal(result[[0, 2]], clean[[0, 2]])
    assert 0 <= found[0][1] <= 2 and 0 <= found[1][1] < 6


# --- what is refused


def test_a_draft_that_q_could_not_draw_is_refused():
    p, draft_ids, q, *rest = tensors_of(Case("", (1, 0, 2)))
    for value in (0.0, torch.nan):
        q[2, draft_ids[2]] = value
        with pytest.raises(InvalidValue, match="q of draft 2, of row 2"):
            verify(p, draft_ids, q, *rest)
    verify(p, draft_ids, None, *rest)


@pytest.mark.parametrize("token", [-1, 7, 1000])
def test_a_draft_outside_the_vocabulary_is_refused(token):
    p, draft_ids, q, *rest = tensors_of(Case("", (1, 0, 2)))
    draft_ids[1] = token
    for told in (q, None):
        with pytest.raises(InvalidValue, match="draft_ids of draft 1, of row 2"):
            verify(p, draft_ids, told, *rest)


@pytest.mark.parametrize(
    "starts, said",
    [([0, 2, 2, 6], r"row_starts\[2\]"), ([0, 3, 2, 6], r"row_starts\[2\]"), ([0, 2, 3, 5], "row_starts"),
     ([1, 2, 3, 6], "row_starts")],
)  # fmt: skip
def test_rows_that_do_not_fit_are_refused(starts, said):
    p, draft_ids, q, _, *rest = tensors_of(Case("", (1, 0, 2)))
    with pytest.raises(InvalidValue, match=said):
        verify(p, draft_ids, q, torch.tensor(starts), *rest)


@pytest.mark.parametrize(
    "argument, said",
    [(0, "draft_ids"), (1, "draft_ids"), (2, "q.shape"), (3, "row_starts"), (4, "accept_u"), (5, "row_starts")],
)
def test_lengths_that_do_not_fit_are_refused(argument, said):
    args = list(tensors_of(Case("", (1, 0, 2))))
    check_lengths(*args)
    args[argument] = args[argument][:-1]
    with pytest.raises(InvalidValue, match=said):
        check_lengths(*args)
    args = list(tensors_of(Case("", (1, 0, 2))))
    with pytest.raises(InvalidValue, match="draft_ids"):  # nothing but this tells verify that p has a row too many
        verify(torch.cat([args[0], args[0][:1]]), *args[1:])
    with pytest.raises(InvalidValue, match="q.shape"):
        check_lengths(args[0], args[1], args[2][:, :-1], *args[3:])
