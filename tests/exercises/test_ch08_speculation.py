"""Checks of chapter 8's exercises. See AUTHORS.md in exercises/."""

import numpy as np
import torch
from checks import AtLeast, Case
from scored_drafts import tokens_per_step


def grid(num):
    """The midpoints of [0, 1) in so many equal parts: a share of them is a share of all random numbers."""
    return [(i + 0.5) / num for i in range(num)]


def share_kept(accept, p_of_draft, q_of_draft):
    """Of many such drafts, the share that is kept."""
    return sum(bool(accept(p_of_draft, q_of_draft, u)) for u in grid(200)) / 200


def test_8_1_accept(ex):
    def shares(p, q, want, note):
        return Case({"p_of_draft": p, "q_of_draft": q}, want, f"the share that is kept: {note}", run=share_kept)

    def case(p, q, u, want, note):
        return Case({"p_of_draft": p, "q_of_draft": q, "u": u}, want, note)

    ex.check("accept", [
        shares(0.2, 0.4, 0.5, "drafted twice as often as it should come out"),
        shares(0.6, 0.3, 1.0, "drafted half as often as it should come out"),
        shares(0.3, 0.3, 1.0, "drafted just as often as it should come out"),
        shares(0.75, 0.9375, 0.8, "a likely token, drafted too often"),
        shares(0.0, 0.5, 0.0, "a token that must not come out"),
        shares(0.3, None, 0.3, "looked up: it is drafted each time"),
        shares(0.9, None, 0.9, "looked up, and likely"), shares(1.0, None, 1.0, "looked up, and certain"),
        case(0.0, 0.5, 0.0, False, "u = 0, and a token that must not come out"),
        case(0.0, None, 0.0, False, "u = 0, and a token that must not come out, looked up"),
        case(1.0, 1.0, 0.999, True, "a greedy row, and its likeliest token"),
    ])  # fmt: skip


def test_8_2_residual(ex):
    def case(p, q, want, note, parts=1):
        p, q = (torch.tensor(x, dtype=torch.float64) / parts for x in (p, q))
        return Case({"p": p, "q": q}, want, note)

    ex.check("residual", [
        case([0.5, 0.5], [0.5, 0.5], [0.5, 0.5], "nothing is due"),
        case([0.25, 0.75], [0.25, 0.75], [0.25, 0.75], "nothing is due, and the two are not equally likely"),
        case([0.25, 0.75], [0.5, 0.5], [0, 1], "one token is due"),
        case([0.25, 0.75], [1, 0], [0, 1], "a draft that was looked up"),
        case([0.5, 0.25, 0.25], [0, 0, 1], [2 / 3, 1 / 3, 0], "looked up, among three"),
        case([0.5, 0.25, 0.25], [0.125, 0.125, 0.75], [0.75, 0.25, 0], "0.375 and 0.125 are due"),
        case([1, 0, 0], [0.5, 0.25, 0.25], [1, 0, 0], "a greedy row"),
        case([0, 2, 3, 5], [4, 3, 2, 1], [0, 0, 0.2, 0.8], "four tokens, in tenths", parts=10),
        case([8, 1, 7, 3, 0, 1], [2, 6, 3, 0, 5, 4], [6 / 13, 0, 4 / 13, 3 / 13, 0, 0], "in twentieths", parts=20),
    ])  # fmt: skip


def first_tokens(verify, p, q):
    """Many steps with one draft, as q draws it: how often each token comes first, and how many come."""
    first, num_tokens = [0.0] * p.shape[1], 0.0
    for draft, share in enumerate(q[0].tolist()):
        outcomes = [verify(p, [draft], q, [u], v) for u in grid(4) for v in grid(12)]
        for tokens in outcomes:
            for token in tokens[:1]:
                first[token] += share / len(outcomes)
            num_tokens += share * len(tokens) / len(outcomes)
    return {"comes_first": first, "tokens_per_step": num_tokens}


def verified(p, drafts, q, accept_u, sample_u):
    """Another way: probabilities are whole numbers of n-ths, and a token that is due has so many tickets."""
    tokens, tickets = [], p[0]
    for i, draft in enumerate(drafts):
        drawn = q[i] if q else [sum(p[i]) * (token == draft) for token in range(len(p[i]))]
        if accept_u[i] * drawn[draft] >= p[i][draft]:
            tickets = [max(0, mine - its) for mine, its in zip(p[i], drawn, strict=True)]
            break
        tokens, tickets = [*tokens, draft], p[i + 1]
    tickets = [token for token, num in enumerate(tickets) for _ in range(num)]
    return [*tokens, tickets[int(sample_u * len(tickets))]]


def drawn_steps(num_drafts, vocab, seed, is_drawn):
    """The arguments of a random step, in 60ths; most drafts are good ones."""
    rng = np.random.default_rng(seed)
    p = rng.multinomial(60, [1 / vocab] * vocab, size=num_drafts + 1).tolist()
    q = rng.multinomial(60, [1 / vocab] * vocab, size=num_drafts).tolist()
    drafts = [int(rng.choice(vocab, p=np.array(q[i] if is_drawn else p[i]) / 60)) for i in range(num_drafts)]
    return p, drafts, q if is_drawn else None, rng.random(num_drafts).tolist(), float(rng.random())


def test_8_3_verify(ex):
    def tensor(rows, parts):
        return None if rows is None else torch.tensor(rows, dtype=torch.float64) / parts

    def case(p, drafts, accept_u, sample_u, want, note, q=None, parts=10):
        args = {"p": tensor(p, parts), "drafts": drafts, "q": tensor(q, parts), "accept_u": accept_u}
        return Case(args | {"sample_u": sample_u}, want, note)

    def odds(p, q, num_tokens, note):
        want = {"comes_first": [part / 8 for part in p[0]], "tokens_per_step": num_tokens}
        return Case({"p": tensor(p, 8), "q": tensor(q, 8)}, want, note, first_tokens)

    plain, sure, other = [2, 3, 5], [0, 10, 0], [5, 0, 5]
    cases = [
        case([plain], [], [], 0.3, [1], "no draft: a plain step"),
        case([plain, other], [0], [0.1], 0.3, [0, 0], "looked up, kept"),  # fault E13
        case([plain, other], [0], [0.4], 0.3, [1], "looked up, lost: 3 and 5 of 8 are due"),
        case([plain, other], [0], [0.4], 0.5, [2], "the same, with another random number"),
        case([plain, other], [1], [0.9], 0.1, [0], "looked up, lost, with p of tokens on both sides"),
        case([sure, other], [1], [0.9], 0.6, [1, 2], "a greedy row, right"),
        case([sure, other], [2], [0.0], 0.6, [1], "a greedy row, wrong"),
        case([plain, other], [2], [0.9], 0.3, [2, 0], "drawn as it should be, kept", q=[plain]),  # fault E13
        case([plain, other], [0], [0.3], 0.9, [0, 2], "drawn too often, kept", q=[[4, 4, 2]]),
        case([plain, other], [0], [0.6], 0.1, [2], "drawn too often, lost: only the last is due", q=[[4, 4, 2]]),
        case([plain, other], [1], [0.8], 0.6, [2], "drawn too often, lost: 1 and 1 are due", q=[[1, 5, 4]]),
        # faults E5, E7: 2 + 2 + 1 eighths are kept
        odds([[2, 4, 2, 0], [4, 0, 0, 4]], [[4, 2, 1, 1]], 1.625, "many steps with one draft, drawn from q"),
        case([plain, other, plain], [0, 2], [0.1, 0.3], 0.3, [0, 2, 1], "looked up, two kept"),
        case([plain, other, plain], [0, 0], [0.1, 0.6], 0.3, [0, 2], "looked up, the second lost"),
        case([plain, sure, plain], [0, 1], [0.4, 0.0], 0.3, [1], "looked up, the first lost"),
        case([plain, sure, plain], [1, 1], [0.4, 0.9], 0.9, [2], "looked up, the first lost, the second certain"),
    ]  # fmt: skip
    for num_drafts, vocab, is_drawn in [(2, 3, True), (3, 4, False), (3, 5, True), (4, 3, False), (6, 4, True)]:
        for seed in range(8):
            step = drawn_steps(num_drafts, vocab, seed, is_drawn)
            p, drafts, q, accept_u, sample_u = step
            note = f"{num_drafts} drafts, {'drawn' if is_drawn else 'looked up'}"
            cases.append(case(p, drafts, accept_u, sample_u, verified(*step), note, q, parts=60))
    ex.check("verify", cases)


def test_8_4_keep(ex):
    def case(tokens, num_before, max_tokens, want, note, stop_ids=(99,)):
        args = {"tokens": tokens, "num_before": num_before, "max_tokens": max_tokens, "stop_ids": {*stop_ids}}
        return Case(args, want, note)

    ex.check("keep", [
        case([10], 0, 5, ([10], None), "a plain step"),
        case([99], 0, 5, ([99], "stop"), "a plain step, and a stop"),
        case([10], 4, 5, ([10], "length"), "the last token that there is room for"),
        case([99], 4, 5, ([99], "stop"), "a stop on the last place"),
        case([10, 11], 0, 5, ([10, 11], None), "two tokens"),
        case([10, 11], 3, 5, ([10, 11], "length"), "two tokens, and room for two"),
        case([10, 11], 4, 5, ([10], "length"), "two tokens, and room for one"),
        case([10, 99], 3, 5, ([10, 99], "stop"), "a stop on the last place, after another token"),
        case([10, 99], 4, 5, ([10], "length"), "a stop for which there is no room"),
        case([99, 10], 0, 5, ([99], "stop"), "a token behind the stop"),
        case([99, 10], 3, 5, ([99], "stop"), "a token behind the stop, and room for both"),
        case([99, 98], 0, 5, ([99], "stop"), "two stops", stop_ids=(98, 99)),
        case([10, 11, 99], 0, 2, ([10, 11], "length"), "a stop just behind the cap"),
        case([10, 11, 99, 20, 21, 22], 0, 5, ([10, 11, 99], "stop"), "a stop, then the cap"),  # fault E1
        case([10, 11, 20, 21, 22, 99], 0, 5, ([10, 11, 20, 21, 22], "length"), "the cap, then a stop"),
        case([10, 11, 99, 20, 21, 22], 7, 12, ([10, 11, 99], "stop"), "a stop, then the cap, in a longer answer"),
        case([10, 11, 12], 0, 3, ([10, 11, 12], "length"), "no stops", stop_ids=()),
    ])  # fmt: skip


def test_8_5_ngram_draft(ex):
    def case(tokens, most, want, note, longest=3):
        return Case({"tokens": tokens, "most": most, "longest": longest}, want, note)

    ex.check("ngram_draft", [
        case([], 2, [], "nothing"), case([5], 2, [], "one token"), case([5, 6], 2, [], "the last one is new"),
        case([5, 5], 2, [5], "the same token twice"), case([5, 5, 5], 1, [5], "three times: the latest, over two"),
        case([5, 6, 5], 2, [6, 5], "the last one occurred before"), case([5, 6, 5], 1, [6], "one draft is wanted"),
        case([5, 6, 5], 0, [], "none is wanted"), case([5, 6, 5], 4, [6, 5], "drafts reach to the tokens' end"),
        case([1, 8, 1, 9, 1], 1, [9], "twice before: the latest time"),
        case([1, 2, 8, 1, 9, 5, 2, 1, 2], 1, [8], "an older place agrees over two"),
        case([7, 7, 7, 7, 7], 3, [7], "the two places may share tokens"),
        case([1, 2, 3, 4, 9, 2, 3], 2, [4, 9], "over two tokens"),
        case([1, 2, 3, 8, 2, 3, 9, 1, 2, 3], 1, [8], "over three, though two are later"),
        case([1, 2, 3, 8, 2, 3, 9, 1, 2, 3], 1, [9], "no more than two count", longest=2),
        case([4, 1, 2, 3, 8, 1, 2, 3, 9, 4, 1, 2, 3], 2, [9, 4], "no more than three count"),
        case([4, 1, 2, 3, 8, 1, 2, 3, 9, 4, 1, 2, 3], 2, [8, 1], "four count", longest=4),
        case([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 1, 4], 5, [1, 5, 9, 2, 6], "from the very beginning"),
    ])  # fmt: skip


def test_8_6_rewind(ex):
    def case(start, num_drafts, num_accepted, note, page_size=4, tail=3):
        """States and inputs are named after the position of their token, pages are numbered from 20."""
        seen, last = range(start, start + num_drafts + 1), start + num_accepted
        in_drafter = {*range(start), *seen[:-1]} & {*range(last + 1)}
        args = {
            "start": start, "num_accepted": num_accepted, "states": [f"s{at}" for at in seen],
            "inputs": [f"x{at}" for at in range(start - tail, start + num_drafts + 1)],
            "pages": [20 + first // page_size for first in range(0, seen.stop, page_size)], "page_size": page_size,
        }  # fmt: skip
        want = {
            "num_computed": last + 1, "state": f"s{last}", "tail": [f"x{last - i}" for i in range(tail)][::-1],
            "pages": [20 + first // page_size for first in range(0, last + 1, page_size)],
            "draft_from": min({*range(last + 2)} - in_drafter),
        }  # fmt: skip
        return Case(args, want, note)

    ex.check("rewind", [
        case(5, 0, 0, "no draft"),  # fault E4
        case(5, 1, 1, "one draft, kept"), case(5, 1, 0, "one draft, lost"),
        case(5, 2, 0, "two drafts, both lost"), case(5, 2, 1, "two drafts, one kept"),
        case(5, 2, 2, "two drafts, both kept"),  # fault E12
        case(7, 0, 0, "no draft, and a page that is full"), case(8, 0, 0, "no draft, and a new page"),
        case(6, 2, 0, "a page that only lost drafts needed"), case(6, 2, 1, "a full page, and one that goes"),
        case(6, 2, 2, "a token on the last page"), case(9, 3, 2, "three drafts, two kept"),
        case(9, 3, 0, "three drafts, all lost"), case(9, 5, 3, "more drafts than the tail has inputs"),
        case(9, 5, 5, "five drafts, all kept"), case(13, 6, 0, "three pages go", page_size=2),
        case(12, 4, 3, "pages of one token", page_size=1), case(11, 3, 1, "a short tail", tail=1),
    ])  # fmt: skip


def test_8_7_best_depth(ex):
    def case(rates, step_costs, draft_cost, want, note):
        return Case({"rates": rates, "step_costs": step_costs, "draft_cost": draft_cost}, want, note)

    ex.check("best_depth", [
        case([], [1.0], 0.5, 0, "no drafts are to be had"),
        case([0.5], [1.0, 1.0], 0.25, 1, "1.5 tokens in 1.25 s"), case([0.5], [1.0, 1.0], 0.75, 0, "1.5 in 1.75 s"),
        case([0.5], [1.0, 1.5], 0.0, 0, "1.5 tokens in 1.5 s: not more than without"),
        case([0.5], [1.0, 1.25], 0.5, 0, "1.5 tokens in 1.75 s: a step and a draft"),
        case([0.0], [1.0, 1.0], 0.0, 0, "never kept"), case([1.0], [1.0, 1.9], 0.05, 1, "always kept"),
        case([1.0, 1.0], [1.0, 1.0, 1.5], 0.0, 1, "2 tokens in 1 s, or 3 in 1.5 s: no more"),
        case([0.5, 0.5], [1.0, 1.0, 1.0], 0.15, 2, "1.5 in 1.15 s, or 1.75 in 1.3 s"),
        case([0.6, 0.6], [1.0, 1.2, 1.5], 0.0, 1, "1.6 in 1.2 s, or 1.96 in 1.5 s"),
        case([0.9, 0.1], [1.0, 1.0, 1.0], 0.1, 1, "the first is good, the second is not"),
        case([0.1, 0.9], [1.0, 1.0, 1.0], 0.08, 2, "if the first is kept, so is the second"),
        case([0.3, 0.9, 0.9], [1.0, 1.2, 1.35, 1.5], 0.0, 3, "the first is bad, the others good"),
        case([0.8, 0.8, 0.8], [1.0, 1.05, 1.1, 1.15], 0.1, 3, "a cheap drafter"),
        case([0.8, 0.8, 0.8], [1.0, 1.05, 1.1, 1.15], 0.4, 2, "a drafter that is not"),
        case([0.9, 0.9, 0.9, 0.9], [1.0, 1.9, 1.9, 1.9, 1.9], 0.0, 4, "a leap, and a plain after it"),
        case([0.9, 0.9, 0.9, 0.9], [1.0, 1.0, 1.0, 2.0, 2.0], 0.0, 2, "a plain, and a leap after it"),
        case([0.85, 0.7, 0.6, 0.5], [1.0, 1.1, 1.2, 1.3, 1.4], 0.05, 3, "it gets worse with depth"),
        case([0.85, 0.7], [0.008, 0.009, 0.01], 0.008, 0, "milliseconds: 1 token in 8, 1.85 in 17, or 2.445 in 26"),
    ])  # fmt: skip


def test_8_8_draft(ex):
    case = Case({"most": 4}, AtLeast(2.87), "four texts, about 400 bytes each", run=tokens_per_step)
    ex.check("draft", [case])
