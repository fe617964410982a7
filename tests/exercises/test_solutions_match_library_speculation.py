"""What a reader writes in chapter 8 is what the library does."""

import random

import numpy as np
import pytest
import torch
from catalogue import ROOT, load

from minserve.llm import LLM, EngineConfig
from minserve.model.tokenizer import ByteTokenizer
from minserve.parts import Parts
from minserve.request import FinishReason, SamplingParams
from minserve.speculation import depth, drafters
from minserve.speculation.verify import verify
from minserve.stopping import StopChecker

CH08 = load(ROOT / "solutions" / "ch08_speculation.py")
LARGEST_U = 1 - 2.0**-53


def distributions(num, vocab, rng, dtype):
    """Random rows, half of their entries 0, so that tokens are also certain, impossible, or in one of two alone."""
    parts = rng.integers(1, 9, (num, vocab)) ** 3 * (rng.random((num, vocab)) < 0.5)
    parts[np.arange(num), rng.integers(0, vocab, num)] += 1
    rows = torch.tensor(parts, dtype=dtype)
    return rows / rows.sum(-1, keepdim=True)


def drawn_from(rows, rng):
    """A token of each row, drawn."""
    return [int(rng.choice(len(row), p=row.double().numpy() / row.double().sum().item())) for row in rows]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("is_drawn", [True, False])
def test_verify_equals_the_library_row_by_row(is_drawn, dtype):  # faults E5, E13
    rng, vocab, lengths = np.random.default_rng(is_drawn), 7, set()
    for num_drafts in [[0], [1], [3, 0, 1], [2, 5, 0, 0, 4]] * 40:
        starts = np.cumsum([0, *(num + 1 for num in num_drafts)])
        p, q = (distributions(num, vocab, rng, dtype) for num in (int(starts[-1]), sum(num_drafts)))
        for row, num in enumerate(num_drafts):
            for i in range(starts[row], starts[row] + num):
                if rng.random() < 0.7:  # good drafts, so that it comes to later ones
                    q[i - row] = p[i]
        drafts = torch.tensor(drawn_from(q, rng), dtype=torch.int64) if is_drawn else q.argmax(-1)
        accept_u, sample_u = torch.tensor(rng.random(len(drafts))), torch.tensor(rng.random(len(num_drafts)))
        q = q if is_drawn else None
        num_accepted, next_ids = verify(p, drafts, q, torch.tensor(starts), accept_u, sample_u)
        for row, (start, stop) in enumerate(zip(starts, starts[1:], strict=False)):
            own = slice(start - row, stop - row - 1)
            mine = CH08.verify(
                p[start:stop], drafts[own].tolist(), q[own] if is_drawn else None, accept_u[own].tolist(),
                sample_u[row].item(),
            )  # fmt: skip
            assert mine == [*drafts[own][: num_accepted[row]].tolist(), int(next_ids[row])]
            lengths.add((num_drafts[row], len(mine)))
    assert lengths > {(num, num_tokens) for num in range(1, 5) for num_tokens in range(1, num + 2)}


@pytest.mark.parametrize("is_drawn", [True, False])
def test_accept_and_residual_equal_the_library(is_drawn):  # fault E7
    rng, num, vocab = np.random.default_rng(is_drawn), 600, 5
    p, q = (distributions(num, vocab, rng, torch.float64) for _ in range(2))
    drafts = drawn_from(q, rng)
    accept_u, sample_u = rng.random((2, num))
    accept_u[:50], accept_u[50:100] = 0.0, LARGEST_U
    num_accepted, next_ids = verify(
        p.repeat_interleave(2, 0), torch.tensor(drafts), q if is_drawn else None, 2 * torch.arange(num + 1),
        torch.tensor(accept_u), torch.tensor(sample_u),
    )  # fmt: skip
    one_hot = torch.eye(vocab, dtype=torch.float64)
    for row, draft in enumerate(drafts):
        is_kept = CH08.accept(p[row, draft].item(), q[row, draft].item() if is_drawn else None, accept_u[row])
        assert is_kept == bool(num_accepted[row])
        if not is_kept:
            due = CH08.residual(p[row], q[row] if is_drawn else one_hot[draft])
            assert CH08.token_at(due, sample_u[row]) == next_ids[row]
    assert 100 < num_accepted.sum() < num - 100


@pytest.mark.parametrize("alphabet", [1, 2, 4, 9])
def test_ngram_draft_equals_the_drafter(alphabet):
    draw, num_found = random.Random(alphabet), 0
    for length in [*range(12), 20, 31, 47] * 4:
        tokens = [draw.randrange(alphabet) for _ in range(length)]
        for longest in (1, 2, 3, 5):
            drafter = drafters.NGramDrafter(longest=longest, shortest=1)
            for most in (0, 1, 4, 100):
                mine = CH08.ngram_draft(tokens, most, longest)
                assert mine == drafter.propose(tokens, most)
                num_found += bool(mine)
    assert num_found > 50


def test_the_scored_draft_is_a_drafter():
    """The engine takes it once it has a method of that name."""

    class Mine:
        def propose(self, tokens, most):
            return CH08.draft(list(tokens), most)

    assert isinstance(Mine(), drafters.Drafter)
    assert [Mine().propose(b"a word, a wo", most) for most in (0, 2)] == [[], list(b"rd")]


def test_best_depth_equals_the_library():
    rng, chosen = np.random.default_rng(0), set()
    for _ in range(500):
        most = int(rng.integers(0, 6))
        rates = rng.choice([0.0, 0.25, 0.5, 0.75, 0.875, 1.0], most).tolist()  # of dyadic costs: equals are equal
        step_costs = np.cumsum([1.0, *rng.choice([0.0, 0.0, 0.125, 0.5], most)]).tolist()
        draft_cost = float(rng.choice([0.0, 0.0625, 0.25]))
        mine = CH08.best_depth(rates, step_costs, draft_cost)
        assert mine == depth.best_depth(rates, step_costs, draft_cost)
        chosen.add(mine)
    assert chosen == {0, 1, 2, 3, 4, 5}


def test_keep_equals_the_stop_checker():  # fault E1
    draw, reasons = random.Random(0), set()
    for _ in range(300):
        max_tokens, stops, num_before, reason = draw.randrange(1, 9), draw.sample(range(97, 102), 2), 0, None
        params = SamplingParams(max_tokens=max_tokens, stop_token_ids=stops)
        checker = StopChecker(params, ByteTokenizer().incremental())
        while reason is None:
            tokens = [draw.randrange(97, 107) for _ in range(draw.randrange(1, 6))]
            kept, reason = CH08.keep(tokens, num_before, max_tokens, {*stops})
            theirs = checker.push(tokens)
            assert (len(kept), reason and FinishReason(reason)) == (theirs.num_kept, theirs.finish_reason)
            assert kept == tokens[: len(kept)]
            num_before += len(kept)
        reasons.add((reason, len(tokens) > len(kept)))
    assert reasons == {(reason, is_cut) for reason in ("stop", "length") for is_cut in (True, False)}


@pytest.mark.parametrize("draft", ["ngram", "mtp"])
def test_the_engine_gives_the_same_tokens_with_the_readers_verify(draft):
    config = EngineConfig(dtype="float64", draft=draft, draft_tokens=3, adapt_drafts=False, num_pages=64)
    prompts = ["for row in rows: print(row)\nfor row in rows:", "a, b, c = a, b, c\na, b,", "x"]
    params = [SamplingParams(max_tokens=16), *(SamplingParams(max_tokens=16, temperature=0.8, seed=i) for i in (1, 2))]
    calls = []

    def counted(*args):
        calls.append(args)
        return CH08.verify(*args)

    theirs = LLM(config=config).generate(prompts, params)
    mine = LLM(config=config, parts=Parts(verify=counted)).generate(prompts, params)
    assert [output.token_ids for output in mine] == [output.token_ids for output in theirs]
    for one, other in zip(mine, theirs, strict=True):
        assert one.usage == other.usage
    assert calls and sum(output.usage.accepted_tokens for output in mine) > 0
