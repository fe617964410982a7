"""A model of four tokens whose next one depends on the last two, served by a whole engine, and its exact odds.

What was the token before last comes out of the engine's memory of convolution tails: so it is right behind accepted and
rejected drafts only if the memory is.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from itertools import product
from random import Random
from types import SimpleNamespace

import torch
from torch.nn.functional import one_hot

from minserve.clock import VirtualClock
from minserve.engine import Engine
from minserve.engine_config import EngineConfig
from minserve.events import EventLog
from minserve.model.config import LINEAR, ModelConfig
from minserve.parts import Parts
from minserve.request import Request, SamplingParams

VOCAB = 4
PAIRS = VOCAB**2
CONFIG = ModelConfig(
    vocab_size=VOCAB, hidden_size=2 * PAIRS, num_hidden_layers=1, layer_types=(LINEAR,), num_attention_heads=1,
    num_key_value_heads=1, head_dim=8, linear_num_key_heads=1, linear_num_value_heads=1, linear_key_head_dim=1,
    linear_value_head_dim=VOCAB - 2, intermediate_size=1, mtp_num_hidden_layers=1, max_position_embeddings=64,
)  # fmt: skip
PROMPT = (0, 0, 1, 0, 2, 0, 3, 1, 1, 2, 1, 3, 2, 2, 3, 3, 0, 1)  # every pair is in it, for a drafter that looks up
PARAMS = SamplingParams(max_tokens=4, temperature=0.9, top_k=3, top_p=0.96)
MAX_RUNNING = 1000


class Chain:
    """The model. Its outputs and its head's are one-hot: the last two tokens, and which of the two has made them.

    Arguments:
        p: [VOCAB, VOCAB, VOCAB], scores of the next token by the last two. q: those of the head.
    """

    def __init__(self, p, q):
        self.model = SimpleNamespace(embed_tokens=SimpleNamespace(weight=torch.zeros(1, dtype=torch.float64)))
        self.config, self.mtp = CONFIG, "a head"
        self.scores = torch.cat([p.reshape(PAIRS, VOCAB), q.reshape(PAIRS, VOCAB)])
        self.one_back = torch.zeros(VOCAB, 4, dtype=torch.float64).index_fill_(1, torch.tensor(2), 1.0)

    def __call__(self, step, memory):
        before = memory.convolve(0, one_hot(step.tokens, VOCAB).double(), self.one_back).argmax(1)
        hidden = one_hot(before * VOCAB + step.tokens, 2 * PAIRS).double()
        return SimpleNamespace(hidden=hidden, logits=self.logits(hidden[step.chosen]))

    def logits(self, hidden):
        return hidden @ self.scores

    def draft_hidden(self, step, hidden, memory):
        last = hidden.argmax(1) % VOCAB  # of the token before each of the step's
        return one_hot(PAIRS + last * VOCAB + step.tokens, 2 * PAIRS).double(), None


class ChainScorer:
    """The head's scores as a drafter of their own."""

    def __init__(self, q):
        self.q = q

    def logits(self, contexts):
        before, last = torch.tensor([context[-2:] for context in contexts]).T
        return self.q[before, last]


class Uneven:
    """Drafts none to three tokens, right and wrong ones, as the tokens so far have it."""

    def propose(self, tokens, most):
        draw = Random(sum(VOCAB**i * token for i, token in enumerate(tokens[-4:])))
        return [draw.randrange(VOCAB) for _ in range(min(draw.randrange(4), most))]


class NoText:
    """A decoder that says nothing."""

    def push(self, token_id):
        return ""

    def finish(self):
        return ""


def tables():
    """The scores of the model, and the other ones of its head."""
    generator = torch.Generator().manual_seed(2)
    return torch.randn(2, VOCAB, VOCAB, VOCAB, generator=generator, dtype=torch.float64)


def drawn(draft, num: int, parts: Parts | None = None, params=PARAMS, **config) -> tuple[Counter, EventLog]:
    """How often each output came out of so many requests, each with a seed of its own; and the log."""
    config = {"draft_tokens": 2, "batch_tokens": 40 * MAX_RUNNING, **config}
    config = EngineConfig(
        dtype="float64", page_size=8, num_pages=4 * MAX_RUNNING, num_states=MAX_RUNNING, max_running=MAX_RUNNING,
        prefix_cache=False, draft=draft, adapt_drafts=False, **config,
    )  # fmt: skip
    engine = Engine(Chain(*tables()), CONFIG, config, EventLog(VirtualClock()), NoText, parts)
    requests = [Request(seed, PROMPT, params, seed) for seed in range(num)]
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
    return Counter(tuple(request.output_ids) for request in requests), engine.log


def distribution(scores: Iterable[float], params: SamplingParams) -> list[float]:
    """Temperature, then top_k, then top_p of what that leaves, token by token."""
    weights = [math.exp(score / params.temperature) for score in scores]
    order = sorted(range(len(weights)), key=lambda token: -weights[token])[: params.top_k or None]
    total, kept, mass = sum(weights[token] for token in order), [], 0.0
    for token in order:
        if mass < params.top_p * total:
            kept.append(token)
        mass += weights[token]
    left = sum(weights[token] for token in kept)
    return [weights[token] / left if token in kept else 0.0 for token in range(len(weights))]


def odds(params: SamplingParams = PARAMS) -> dict[tuple[int, ...], float]:
    """The exact probability of every output."""
    p = tables()[0]
    after = {pair: distribution(p[pair].tolist(), params) for pair in product(range(VOCAB), repeat=2)}
    found = {}
    for output in product(range(VOCAB), repeat=params.max_tokens):
        path = PROMPT[-2:] + output
        found[output] = math.prod(after[path[i : i + 2]][path[i + 2]] for i in range(len(output)))
    return found


def p_value(counts: Counter, wanted: dict[tuple[int, ...], float]) -> float:
    """How likely counts as far from these odds are, if the odds are theirs: chi-square. Rare outputs are one cell."""
    num = counts.total()
    if any(not wanted[output] for output in counts):
        return 0.0
    often = [output for output, odd in wanted.items() if odd * num >= 5]
    cells = [(counts[output], wanted[output] * num) for output in often]
    cells.append((num - sum(count for count, _ in cells), num - sum(mean for _, mean in cells)))
    cells = [(count, mean) for count, mean in cells if mean > 1e-6 * num]
    chi_square = sum((count - mean) ** 2 / mean for count, mean in cells)
    half = torch.tensor([(len(cells) - 1) / 2, chi_square / 2], dtype=torch.float64)
    return torch.special.gammaincc(half[0], half[1]).item()
