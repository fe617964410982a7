"""A model that keeps books instead of computing: pages hold token ids, and a state is a number made of all it has seen.

What it says next depends on every token in the pages and on every token in the state, in their order. So a wrong page,
a state that has seen another count, and memory that nobody has written all show, at a tenth of a real model's cost.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import torch
from served import Plain
from small_engine import CONFIG

from minserve.model.config import FULL

PRIME = 65521


def entered(seen, tokens):
    """The number that stands for a sequence, after some more tokens; NaN stays NaN."""
    for token in tokens:
        seen = (31 * seen + token + 1) % PRIME
    return seen


def logits(paged, state):
    """What is said after tokens that pages and state stand for: 26 numbers, no two sequences the same."""
    return [((k + 1) * paged + (k + 3) * state) % 997 / 100 for k in range(CONFIG.vocab_size)]


class Ledger:
    """A model for the engine; it uses the first number of each page's place and of each slot.

    Arguments:
        has_states: whether it has a state layer.
    """

    def __init__(self, has_states=True):
        self.config = CONFIG if has_states else replace(CONFIG, layer_types=(FULL, FULL))
        self.model = SimpleNamespace(embed_tokens=SimpleNamespace(weight=torch.zeros(1, dtype=torch.float64)))

    def __call__(self, step, memory):
        places, pools = memory._places, memory._pools
        pages = next(iter(pools.k_pages.values())).flatten(0, 1)[:, 0, 0]
        states = next(iter(pools.states.values()))[:, 0, 0, 0] if pools.states else None
        pages[places.slots] = step.tokens.to(pages.dtype)
        between = {}  # the slot of the state after a packed token
        for part in places.parts:
            ends = part.tokens if part.every_state else part.tokens[part.row_starts[1:] - 1]
            between.update(zip(ends.tolist(), part.state_write.tolist(), strict=True))
        ids, starts, rows = step.tokens.tolist(), step.row_starts.tolist(), {}
        per_row = zip(places.page_tables.tolist(), places.context_lens.tolist(), places.state_read.tolist(),
                      places.state_write.tolist(), starts, starts[1:], strict=False)  # fmt: skip
        size = pools.k_pages[next(iter(pools.k_pages))].shape[1]
        for table, context, read, write, start, stop in per_row:
            state = float(states[read]) if states is not None and read >= 0 else 0.0
            contents = pages.view(-1, size)[table[: -(-context // size)]].flatten()[:context].tolist()
            paged = entered(0.0, contents[: context - (stop - start)])
            for at, token in enumerate(contents[context - (stop - start) :], start=start):
                paged, state = entered(paged, [token]), entered(state, [ids[at]])
                rows[at] = logits(paged, state if states is not None else 0.0)
                if at in between:
                    states[between[at]] = state
            if states is not None:
                states[write] = state
        logits_of = torch.tensor([rows[at] for at in step.chosen.tolist()], dtype=torch.float64)
        return SimpleNamespace(logits=logits_of, hidden=None)


class PlainLedger(Plain):
    """What the ledger says about a sequence, told without pages and slots."""

    def logprobs(self, ids):
        """The log-probabilities of what follows each token of a sequence."""
        seen, rows = 0.0, []
        for token in ids:
            seen = entered(seen, [token])
            rows.append(logits(seen, seen if self._model.config.layer_types[0] != FULL else 0.0))
        return [dict(enumerate(row)) for row in torch.tensor(rows, dtype=torch.float64).log_softmax(-1).tolist()]
