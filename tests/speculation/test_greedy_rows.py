"""Rows that are all greedy need no distribution: what is kept is what `verify` would keep."""

from __future__ import annotations

import pytest
import torch

from minserve.batching.batcher import Phase, Slice
from minserve.choosing import choose_tokens
from minserve.draft_rows import DraftRow
from minserve.request import Request, SamplingParams
from minserve.speculation.verify import verify


@pytest.mark.parametrize("seed", range(20))
def test_greedy_rows_keep_what_the_rule_keeps_without_asking_it(seed):
    """Drafts of which some are the likeliest token, ties and penalties among them; with a row that has no drafts."""
    generator = torch.Generator().manual_seed(seed)
    slices, rows, logits = [], [], []
    for number in range(4):
        params = SamplingParams(frequency_penalty=0.5 * (number % 2), logprobs=1)
        request = Request(number, [1, 2, 3], params, seed=0)
        request.commit(3, [number])
        mine = torch.randint(0, 4, (1 + number, 6), generator=generator).double()  # few values: there are ties
        drafts = [int(row.argmax()) if torch.rand(1, generator=generator) < 0.7 else 5 for row in mine[:number]]
        slices.append(Slice(request, 3, 4, Phase.DECODE, number))
        rows += [DraftRow(request, number, drafts)] if number else []
        logits.append(mine)
    logits = torch.cat(logits)
    asked = []

    def by_the_rule(*args):
        asked.append(args)
        return verify(*args)

    wanted = choose_tokens(slices, logits, lambda request: [], rows, by_the_rule)
    found = choose_tokens(slices, logits, lambda request: [], rows)
    assert asked and (found.tokens, found.accepted) == (wanted.tokens, wanted.accepted)
