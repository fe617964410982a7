"""Small engines on a virtual clock: without a model, with a scripted one, and with a small random one in float64."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import torch

from minserve.clock import VirtualClock
from minserve.engine import Engine
from minserve.engine_config import EngineConfig
from minserve.events import EventKind, EventLog
from minserve.metrics import request_metrics
from minserve.model.config import FULL, LINEAR, ModelConfig
from minserve.model.hybrid_lm import HybridLM
from minserve.model.naive import run_alone
from minserve.request import Request, SamplingParams, Status

CONFIG = ModelConfig(
    vocab_size=26, hidden_size=16, num_hidden_layers=2, layer_types=(LINEAR, FULL), num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=4,
    linear_value_head_dim=3, intermediate_size=12, max_position_embeddings=64, eos_token_ids=(25,),
)  # fmt: skip
ATTENTION_ONLY = replace(CONFIG, layer_types=(FULL, FULL))
STEP_S = 1.0


class Letters:
    """A decoder: token 0 is a, and so on."""

    def push(self, token_id):
        return chr(ord("a") + token_id)

    def finish(self):
        return ""


def small_model(config=CONFIG):
    """Random weights, but every head keeps some 0.9 of its state a token: no gate hides a token applied twice."""
    generator = torch.Generator().manual_seed(5)
    model = HybridLM(config).to(torch.float64).requires_grad_(False).eval()
    for name, weight in model.named_parameters():
        weight.copy_(0.5 * torch.randn(weight.shape, generator=generator, dtype=torch.float64))
        if name.endswith("A_log"):
            weight.sub_(2.0)
    return model


def with_head(config):
    """The small model with a draft head; in both the last token has most of the say, so the head is right at times."""
    model = small_model(replace(config, mtp_num_hidden_layers=1))
    model.model.embed_tokens.weight.mul_(4)
    model.mtp.fc.weight.mul_(0.3)[:, : config.hidden_size].add_(4 * torch.eye(config.hidden_size, dtype=torch.float64))
    return model


class Scripted:
    """A model whose next token follows from the token before and its position; see `scripted_tokens`.

    Arguments:
        during: called in every forward with the number of the call and the step; what it raises, the model raises.
        logits: called with the step and the logits, to return others; they are 100 for the next token and 0 elsewhere.
    """

    def __init__(self, during=lambda number, step: None, logits=lambda step, logits: logits, dtype=torch.float64):
        self.model = SimpleNamespace(embed_tokens=SimpleNamespace(weight=torch.zeros(1, dtype=dtype)))
        self.during, self.change, self.num_calls = during, logits, 0

    def __call__(self, step, memory):
        number, self.num_calls = self.num_calls, self.num_calls + 1
        self.during(number, step)
        next_token = (3 * step.tokens + step.positions)[step.chosen] % 25
        logits = 100.0 * torch.nn.functional.one_hot(next_token, CONFIG.vocab_size).to(torch.float64)
        return SimpleNamespace(logits=self.change(step, logits), hidden=None)


class Hooked:
    """A model that calls `during` with the number of the forward first; what that raises, the model raises."""

    def __init__(self, model, during):
        self.inner, self.model, self.during, self.num_calls = model, model.model, during, 0

    def __call__(self, step, memory):
        number, self.num_calls = self.num_calls, self.num_calls + 1
        self.during(number)
        return self.inner(step, memory)

    def __getattr__(self, name):
        """The draft head and what belongs to it."""
        return getattr(self.inner, name)


class Guesses:
    """A drafter that has some idea now and then, and is right now and then, as the tokens so far say.

    Arguments:
        next_token: of a list of tokens, what comes next.
    """

    def __init__(self, next_token):
        self.next_token = next_token

    def propose(self, tokens, most):
        """Some of what comes next, or a part of it spoiled."""
        number, known = 7 * sum(tokens) + 5 * len(tokens), list(tokens)
        for _ in range(min(most, (4, 0, 1, 4, 2)[number % 5])):
            known.append(self.next_token(known))
        spoiled = len(tokens) + (9, 0, 9, 1)[number % 4]
        return [(token + (at == spoiled)) % 25 for at, token in enumerate(known)][len(tokens) :]


def scripted_next(tokens):
    """What a scripted model says after some tokens."""
    return (3 * tokens[-1] + len(tokens) - 1) % 25


def scripted_tokens(request):
    """What a scripted model gives to a request, whatever happens around it."""
    tokens = list(request.prompt_ids)
    for _ in range(request.params.max_tokens):
        tokens.append(scripted_next(tokens))
    return tokens[len(request.prompt_ids) :]


def make_engine(model=None, parts=None, cost=None, model_config=CONFIG, **config):
    """An engine with few pages of four tokens; every invariant is checked after each step."""
    own = {"dtype": "float64", "page_size": 4, "num_pages": 32, "batch_tokens": 8, "max_running": 6, "check": True}
    cost = cost or (lambda rows: STEP_S)
    config = EngineConfig(**{**own, **config})
    return Engine(model, model_config, config, EventLog(VirtualClock()), Letters, parts, cost)


def ask(name, prompt, max_tokens=4, **params):
    """A request; a prompt given as a number has so many tokens."""
    prompt = [(7 * i + 3 * prompt) % 25 for i in range(prompt)] if isinstance(prompt, int) else prompt
    index = params.pop("index", 0)
    return Request(name, prompt, SamplingParams(**{"max_tokens": max_tokens, "seed": 1, "ignore_eos": True, **params}),
                   index=index)  # fmt: skip


def family(name, prompt, num, max_tokens=4, **params):
    """A request and its riders."""
    return [ask(f"{name}{i}", prompt, max_tokens, index=i, n=num, **params) for i in range(num)]


def run_all(engine, progress=None, max_steps=500):
    """Step until all is done, and one step more for the last reports; all progress so far."""
    progress = [] if progress is None else progress
    for _ in range(max_steps):
        progress += engine.step()
        if not engine.has_work:
            return progress + engine.step()
    raise AssertionError(f"after {max_steps} steps {engine.batcher.running} run and {engine.batcher.waiting} wait")


def check_idle(engine):
    """Fail unless nobody is left, and every page and slot is free, or kept for others and in nobody's way. CONS."""
    cache, keeps = engine.cache, engine.config.prefix_cache
    assert not engine.has_work and engine.step() == []
    assert not engine.batcher.has_work and not cache.tables and not cache.slot_of and not cache.holders
    assert cache.num_takeable == engine.sizes.num_pages and cache.tree.num_protected == 0
    assert keeps or cache.allocator.num_free == engine.sizes.num_pages
    kept = cache.snapshots.slots if cache.snapshots is not None and keeps else []
    assert sorted(cache.states.held) == sorted(kept) and len(kept) <= engine.sizes.num_states
    assert len(kept) == sum(node in cache.snapshots for node in cache.tree.nodes() if kept)
    engine.check()


def check_story(engine, requests, progress):
    """Fail unless progress, log and requests tell one story, with one end for each request and nothing after it."""
    metrics = request_metrics(engine.log)  # complains about a life lived in the wrong order
    ends = Counter(event.request_id for event in engine.log if event.kind is EventKind.FINISHED)
    assert ends == {request.id: 1 for request in requests}
    for request in requests:
        mine = [one for one in progress if one.request is request]
        assert [one.finish_reason for one in mine if one.finish_reason] == [request.finish_reason]
        assert mine[-1].finish_reason is not None
        assert [token for one in mine for token in one.token_ids] == request.output_ids
        assert request.status is Status.FINISHED and metrics[request.id].finish_reason == request.finish_reason
        assert metrics[request.id].completion_tokens == len(request.output_ids)


def outputs(requests):
    """The output tokens by request."""
    return {request.id: request.output_ids for request in requests}


def alone(model, request, every_logprob=True):
    """The same request by itself in the plain loop: its tokens and their log-probabilities. REF."""
    twin = Request(request.id, request.prompt_ids, request.params, request.seed, request.index)
    sampled = []
    if request.params.max_tokens:
        for one in run_alone(model, twin, EventLog(VirtualClock())):
            sampled.append(one)
            if len(sampled) == request.params.max_tokens:
                break
    return [one.token_id for one in sampled], [one.logprobs for one in sampled]


def poison_free(engine):
    """Put NaN into every page and state slot that nobody holds."""
    memory, allocator, states = engine.memory, engine.cache.allocator, engine.cache.states
    pages = [page for page in range(allocator.num_pages) if not allocator.ref_count(page)]
    slots = [slot for slot in range(states.num_slots) if slot not in states.held]
    by_page, by_slot = (memory.k_pages, memory.v_pages), (memory.tails, memory.states, {"hidden": memory.hidden})
    for pools, free in ((by_page, pages), (by_slot, slots)):
        for layers in pools:
            for pool in layers.values():
                if pool is not None:
                    pool[free] = torch.nan


def computed(log):
    """What was computed for good, by event number: (request id, start, stop), drafts that were turned down left out."""
    spans, last = {}, {}
    for number, event in enumerate(log):
        if event.kind is EventKind.SLICE:
            spans[number] = (event.request_id, event.data["start"], event.data["stop"])
            last[event.request_id] = number
        elif event.kind is EventKind.DRAFTS:
            request_id, start, stop = spans[last[event.request_id]]
            stop -= event.data["drafted"] - event.data["accepted"]
            spans[last[event.request_id]] = (request_id, start, stop)
    return spans
