"""What the faults of speculation did, as parts and functions to put in, and the models and texts to see them on."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from types import SimpleNamespace

import torch
from scripted_chain import NoText
from small_engine import Scripted

from minserve.clock import VirtualClock
from minserve.engine import Engine
from minserve.engine_config import EngineConfig
from minserve.events import EventKind, EventLog
from minserve.hybrid.ticket import Ticket
from minserve.model.config import FULL, ModelConfig
from minserve.model.corpus import is_held_out
from minserve.model.evaluate import draft_probs
from minserve.model.naive import NaiveMemory
from minserve.model.step import Step
from minserve.radix.node import num_common


def counted(engine, kind, field) -> list[int]:
    """A field of every event of a kind, in order."""
    return [event.data[field] for event in engine.log if event.kind is kind]


def acceptance(engine) -> float:
    """Drafts accepted, of all that were verified."""
    accepted, drafted = (sum(counted(engine, EventKind.DRAFTS, field)) for field in ("accepted", "drafted"))
    return accepted / drafted


# --- a model that always says the same


class Constant(Scripted):
    """Gives every token these probabilities, whatever came before."""

    def __init__(self, probs):
        scores = torch.tensor(probs, dtype=torch.float64).log()
        super().__init__(logits=lambda step, logits: scores.expand(len(step.chosen), -1))


class ConstantScorer:
    """A drafter that does."""

    def __init__(self, probs):
        self.scores = torch.tensor(probs, dtype=torch.float64).log()

    def logits(self, contexts):
        return self.scores.expand(len(contexts), -1)


def constant_engine(probs, draft, draft_tokens=1, most=1000, parts=None) -> Engine:
    """An engine around it, for up to so many short requests at once."""
    config = ModelConfig(
        vocab_size=len(probs), hidden_size=1, num_hidden_layers=1, layer_types=(FULL,), num_attention_heads=1,
        num_key_value_heads=1, head_dim=8, intermediate_size=1, max_position_embeddings=512,
    )  # fmt: skip
    knobs = EngineConfig(
        dtype="float64", num_pages=32 * most, num_states=most, max_running=most, batch_tokens=8 * most,
        prefix_cache=False, draft=draft, draft_tokens=draft_tokens, adapt_drafts=False,
    )  # fmt: skip
    return Engine(Constant(probs), config, knobs, EventLog(VirtualClock()), NoText, parts)


# --- faults


def cut_by_length_first(tokens, max_tokens, stops):  # fault E1
    """What of a run is kept, and why it ends, where the limit is looked at before the stops."""
    if len(tokens) >= max_tokens:
        return tokens[:max_tokens], "length"
    for i, token in enumerate(tokens):
        if token in stops:
            return tokens[: i + 1], "stop"
    return tokens, None


class KnowsTheAnswer:
    """Drafts what a request will say, as many tokens as a pattern has it at this length; some of them spoilt.

    Arguments:
        answers: prompt and output of every request.
        pattern: how many drafts behind so many tokens, over and over.
        spoilt: a draft at a position that this divides is wrong; none where it is 0.
    """

    def __init__(self, answers, pattern, spoilt=0):
        self.answers, self.pattern, self.spoilt = answers, pattern, spoilt

    def num_wanted(self, num_tokens) -> int:
        return self.pattern[num_tokens % len(self.pattern)]

    def propose(self, tokens, most):
        start = len(tokens)
        answer = next(
            (answer for answer in self.answers if answer[:start] == [*tokens]), []
        )  # none where it went wrong
        drafts = answer[start : start + min(most, self.num_wanted(start))]
        return [(token + (self.spoilt > 0 and (start + i) % self.spoilt == 0)) % 256 for i, token in enumerate(drafts)]


def read_the_first_column_after_a_plain_step(monkeypatch, engine, drafter):  # fault E4
    """Where the next step drafts nothing, it reads the state after the first token of this one, not the last kept."""
    settle = Ticket.settle

    def settle_wrongly(ticket, request):
        first = ticket.state_write[request.id][0]
        settled = settle(ticket, request)
        if not drafter.num_wanted(request.num_committed):
            for pool in (*engine.memory.states.values(), *engine.memory.tails.values()):
                pool[settled.slot] = pool[first]
        return settled

    monkeypatch.setattr(Ticket, "settle", settle_wrongly)


class OwnCache:
    """A draft model that keeps the keys and values of one text, attention layers alone.

    Arguments:
        covers_the_last_draft: it runs its last draft, if that is kept, before the token that follows; else fault E12.
    """

    def __init__(self, model, covers_the_last_draft=True):
        self.model, self.covers = model, covers_the_last_draft
        self.memory = NaiveMemory(model.config, 256, torch.float64)
        self.tokens, self.positions = [], []  # those it takes for covered, and those that have an entry

    @torch.inference_mode()
    def logits(self, contexts):
        (context,) = contexts
        same = min(num_common(self.tokens, context), len(context) - 1)
        self.positions = [position for position in self.positions if position < same]
        start = same if self.covers or not same else len(context) - 1
        new = [*range(start, len(context))]
        for layer in self.memory.lengths:
            self.memory.lengths[layer] = len(self.positions)
        step = Step.one_row(list(context[start:]), start)
        self.positions += new
        self.tokens = list(context)
        return self.model(step, self.memory).logits


def drop_the_bonus(p, drafts, q, accept_u, sample_u, verify_one):  # fault E13
    """Where all drafts are kept, the last of them takes the place of the token that follows."""
    tokens = verify_one(p, drafts, q, accept_u, sample_u)
    return drafts if drafts and len(tokens) == len(drafts) + 1 else tokens


# --- held-out text, and what the shipped head drafts there


def held_out_prompts(num: int, num_tokens: int) -> list[list[int]]:
    """The beginnings of library modules that the shipped model has not seen."""
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = (path.read_bytes() for path in modules if is_held_out(path.name))
    prompts = [[*text[:num_tokens]] for text in texts if len(text) > 10 * num_tokens]
    assert len(prompts) >= num
    return prompts[:num]


def tokens_by_step(model, tokens: list[int], num_prompt: int, depth: int) -> list[int]:
    """How many tokens each step of a greedy request gives after its first one, worked out from the whole text.

    Where a draft is kept it is the text's own token, so the head's choices over the text are the drafts up to the first
    that is lost.
    """
    _, q = draft_probs(model, [*tokens, *[0] * depth], depth, 1.0)
    drafts = [of_depth.argmax(-1).tolist() for of_depth in q]  # entry j of depth d: token j + d + 1
    counts, at = [], num_prompt + 1
    while at < len(tokens):
        most, kept = min(depth, len(tokens) - at - 1), 0
        while kept < most and drafts[kept][at - 2] == tokens[at + kept]:
            kept += 1
        counts.append(kept + 1)
        at += kept + 1
    return counts


def before_the_norm(hidden, norm):  # fault E18
    """Undo a norm but for the size, which the head's own norm takes out anyway."""
    return hidden / (1 + norm.weight)


def with_trunk_output_before_its_norm(model):
    """A change of the model's outputs for `Wrapped`."""

    def change(output):
        hidden = before_the_norm(output.hidden, model.model.norm)
        return SimpleNamespace(hidden=hidden, logits=output.logits, routing=output.routing)

    return change
