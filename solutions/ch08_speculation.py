"""Chapter 8, speculation: cheap guesses at the next tokens, one step that checks them all, and no token changed by it.

A step runs a row's newest known token and its d drafts. Behind each of these d + 1 tokens the model gives a
distribution of the next one: p[0] where the first draft stands, p[d] behind the last. Drafts were drawn from q, or they
were looked up, and then there is no q. p and q are as in plain sampling: temperature and filters are in them.
"""

from collections import Counter

import torch


def token_at(weights: torch.Tensor, u: float) -> int:
    """Find the token that u, 0 <= u < 1, falls on: the first whose cumulative weight exceeds u times the total.

    >>> token_at(torch.tensor([0.25, 0.0, 0.75]), 0.25)
    2
    """
    cumulative = weights.double().cumsum(-1)
    return int((cumulative > u * cumulative[-1]).int().argmax())


def accept(p_of_draft: float, q_of_draft: float | None, u: float) -> bool:
    """Decide whether a draft is kept: as often as can be, and such that what comes out is distributed as p is.

    Args:
        p_of_draft: how likely this token is in the model's distribution, 0 to 1.
        q_of_draft: how likely it was to be drafted, above 0; None if it was looked up: no other could have been.
        u: a random number, 0 <= u < 1.

    Returns:
        Whether it is kept.

    >>> accept(0.2, 0.4, u=0.3), accept(0.2, 0.4, u=0.7)
    (True, False)
    """
    # solution: 8.1 [10 min, easy] 100 steps: how often is it drafted, and how often at most should it come out?
    return u * (1.0 if q_of_draft is None else q_of_draft) < p_of_draft
    # end


def residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Say what the next token is drawn from where a draft was lost, so that all in all tokens come as p has them.

    Args:
        p: [vocab], the model's distribution.
        q: [vocab], what the draft was drawn from.

    Returns:
        [vocab], a distribution. If p and q are the same, no draft is lost but by rounding; then it is p.

    >>> residual(torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.125, 0.125, 0.75])).tolist()
    [0.75, 0.25, 0.0]
    """
    # solution: 8.2 [10 min, easy] how much of each token have the kept drafts brought, and how much is still due?
    due = (p - q).clamp(min=0)
    total = due.sum()
    return due / total if total > 0 else p
    # end


def verify(
    p: torch.Tensor, drafts: list[int], q: torch.Tensor | None, accept_u: list[float], sample_u: float
) -> list[int]:
    """Turn a row's step into tokens: the drafts that it keeps, and one token more.

    Args:
        p: [d + 1, vocab], the model's distributions.
        drafts: d token ids; d may be 0.
        q: [d, vocab], what each draft was drawn from; None if they were looked up.
        accept_u: a random number for each draft.
        sample_u: one for the token that is no draft; see `token_at`.

    Returns:
        1 to d + 1 token ids.

    >>> p = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.5, 0.5]])
    >>> verify(p, [1], None, accept_u=[0.3], sample_u=0.9), verify(p, [1], None, accept_u=[0.7], sample_u=0.9)
    ([1, 2], [0])
    """
    # solution: 8.3 [30 min, hard] draft by draft, with 8.1 and 8.2; what is q of one that was looked up?
    for i, draft in enumerate(drafts):
        if q is None:
            drafted_from = torch.zeros_like(p[i])
            drafted_from[draft] = 1.0
        else:
            drafted_from = q[i]
        if not accept(p[i, draft].item(), drafted_from[draft].item(), accept_u[i]):
            return drafts[:i] + [token_at(residual(p[i], drafted_from), sample_u)]
    return drafts + [token_at(p[-1], sample_u)]
    # end


def keep(tokens: list[int], num_before: int, max_tokens: int, stop_ids: set[int]) -> tuple[list[int], str | None]:
    """Decide which of a step's tokens belong to the answer, and whether it ends with them. Plain steps bring one token.

    Args:
        tokens: what the step brought, in order.
        num_before: tokens of the answer so far; fewer than max_tokens.
        max_tokens: the answer never has more.
        stop_ids: a token that ends the answer. It belongs to it, and counts.

    Returns:
        The tokens that belong to it, and "stop", "length", or None if the answer goes on.

    >>> keep([10, 11, 99, 20], num_before=3, max_tokens=50, stop_ids={99})
    ([10, 11, 99], 'stop')
    """
    # solution: 8.4 [10 min, medium] had the tokens come one by one, which would never have come?
    kept = tokens[: max_tokens - num_before]
    for i, token in enumerate(kept):
        if token in stop_ids:
            return kept[: i + 1], "stop"
    return kept, "length" if num_before + len(kept) == max_tokens else None
    # end


def ngram_draft(tokens: list[int], most: int, longest: int = 3) -> list[int]:
    """Draft what came next when the last tokens occurred before: over as many of them as can be, and the latest time.

    Args:
        tokens: the request's, prompt and output.
        most: drafts wanted at most.
        longest: to agree over more tokens than so many counts for no more.

    Returns:
        Up to `most` token ids that follow one another in tokens; none if the last token is new.

    >>> ngram_draft([1, 2, 3, 4, 9, 2, 3], most=2)
    [4, 9]
    """
    # solution: 8.5 [15 min, medium] the longest end first; for each, from which place backwards?
    for length in range(longest, 0, -1):
        for start in range(len(tokens) - length - 1, -1, -1):
            if tokens[start : start + length] == tokens[-length:]:
                return tokens[start + length : start + length + most]
    return []
    # end


def rewind(start: int, num_accepted: int, states: list, inputs: list, pages: list[int], page_size: int) -> dict:
    """Say what a row of a hybrid model goes on with after a step, some of whose drafts may be lost.

    Args:
        start: the position of its newest token; all before it had run, in the drafter too.
        num_accepted: drafts that are kept.
        states: a DeltaNet layer's state after each token of the step.
        inputs: what its convolution saw: the tail before the step, oldest first, and an input for each token.
        pages: the row's page table; page_size tokens fit in a page.

    Returns:
        "num_computed", the row's tokens that have run; the "state" and the "tail" there; the "pages" that hold them;
        "draft_from", the first position that the drafter, a small model with a cache of its own, has yet to run. To get
        a draft, it runs the token before it.

    >>> rewind(5, 1, ["s5", "s6", "s7"], ["x2", "x3", "x4", "x5", "x6", "x7"], [8, 3], page_size=4)
    {'num_computed': 7, 'state': 's6', 'tail': ['x4', 'x5', 'x6'], 'pages': [8, 3], 'draft_from': 7}
    """
    # solution: 8.6 [25 min, medium] which tokens of the step stay, and which of them did the drafter run?
    num_kept = num_accepted + 1
    tail_length = len(inputs) - len(states)
    num_computed = start + num_kept
    return {
        "num_computed": num_computed,
        "state": states[num_kept - 1],
        "tail": inputs[num_kept : num_kept + tail_length],
        "pages": pages[: -(-num_computed // page_size)],
        "draft_from": start + min(num_kept, len(states) - 1),
    }
    # end


def best_depth(rates: list[float], step_costs: list[float], draft_cost: float) -> int:
    """Choose how many drafts a step verifies, for the most tokens in the same time.

    Args:
        rates: how often the first draft is kept, how often the second where the first was kept, and so on.
        step_costs: seconds of a step that verifies 0, 1, 2, ... drafts, up to as many as there are rates. They may rise
            by leaps.
        draft_cost: seconds that each draft takes before that.

    Returns:
        The number of drafts; of equally good ones the smallest.

    >>> best_depth([0.8, 0.8, 0.8], [1.0, 1.05, 1.1, 1.15], draft_cost=0.1)
    3
    """
    # solution: 8.7 [15 min, medium] how many tokens does a step give on average, and what does it cost with its drafts?
    best, best_speed = 0, 1 / step_costs[0]
    num_tokens = chance = 1.0
    for depth, rate in enumerate(rates, start=1):
        chance *= rate
        num_tokens += chance
        speed = num_tokens / (step_costs[depth] + depth * draft_cost)
        if speed > best_speed:
            best, best_speed = depth, speed
    return best
    # end


def draft(tokens: list[int], most: int = 4) -> list[int]:
    """Draft without a model, better than 8.5: this one is scored, and there is no best answer.

    A model writes four texts: it corrects a program, lists records, answers from a document, makes a table. Tokens are
    bytes. Each step keeps your drafts up to the first wrong one, and gives one token more. The score is the tokens per
    step, all in all: 1 without drafts, 5 at best, and about 2.6 with `ngram_draft`.

    Args:
        tokens: prompt and output so far.
        most: no more drafts are looked at.

    Returns:
        Token ids; to be wrong costs nothing here.

    >>> draft(list(b"for row in rows: print(ro"))[0] == ord("w")
    True
    """
    # solution: 8.8 [40 min, open] over how many tokens do two places agree? What if the drafts reach the text's end?
    drafts = []
    for _ in range(most):
        text, votes = tokens + drafts, Counter()
        for place in range(1, len(text)):
            if text[place - 1] == text[-1]:
                agreed = range(min(place, 12))
                length = next((n for n in agreed if text[place - 1 - n] != text[-1 - n]), len(agreed))
                votes[text[place]] += 10**length
        drafts += [token for token, _ in votes.most_common(1)]
    return drafts
    # end
