"""What the shipped model can do, in figures: compression, copying, recall, drafting, routing, forgetting.

Everything is measured on text that was held out from training, or made up anew.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from tqdm import tqdm

from minserve.clock import RealClock
from minserve.events import EventLog
from minserve.model.hybrid_lm import HybridLM
from minserve.model.losses import TrainMemory
from minserve.model.naive import run_alone
from minserve.model.practice import NAMES, Practice, ids, turn
from minserve.model.step import Step
from minserve.model.tokenizer_files import END_OF_TEXT, IM_END
from minserve.request import Request, SamplingParams

CONTEXT_TOKENS, WINDOW_TOKENS = 2048, 4096
OBSERVED_TOKENS = 2048  # of each text, where less is enough


@dataclass
class WholeText(TrainMemory):
    """The memory of one whole text at once; it also keeps the log decays g that pass through it, by layer.

    Called again for the same MTP layer, it is the cache of a drafting chain: a draft of depth d at place j sees the
    committed entries up to j, and of the deeper entries only those of its own chain.
    """

    row_tokens: int
    num_rows: int = 1
    decays: dict[int, Tensor] = field(default_factory=dict)
    chain: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    mtp_layer: int | None = None

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention; for the MTP layer along its chain. Changes: the chain."""
        if layer != self.mtp_layer:
            return super().attend(layer, q, k, v)
        self.chain.append((k, v))
        length = len(q)
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        mask = torch.cat([causal] + [torch.eye(length, dtype=torch.bool)] * (len(self.chain) - 1), dim=1)
        keys, values = (torch.cat(x).transpose(0, 1)[None] for x in zip(*self.chain, strict=True))
        out = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(0, 1)[None], keys, values, attn_mask=mask, enable_gqa=True
        )
        return out[0].transpose(0, 1)

    def recur(self, layer: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        """The delta rule from a zero state. Changes: decays."""
        self.decays[layer] = g
        return super().recur(layer, q, k, v, g, beta)


def windows(text: str) -> Iterator[tuple[list[int], int]]:
    """Cut a text into (tokens, number of leading tokens that are context only), each byte scored exactly once.

    >>> [(len(tokens), context) for tokens, context in windows("x" * 5000)]
    [(2049, 1), (4096, 2048), (2952, 2048)]
    """
    tokens, new = [END_OF_TEXT, *text.encode()], WINDOW_TOKENS - CONTEXT_TOKENS
    for start in range(1, len(tokens), new):
        first = max(0, start - CONTEXT_TOKENS)
        yield tokens[first : start + new], start - first


def whole_step(tokens: list[int]) -> Step:
    """A step of one whole text, logits everywhere."""
    return Step.one_row(tokens, 0, every_logit=True)


@torch.inference_mode()
def bits_per_byte(model: HybridLM, texts: list[str]) -> tuple[float, int]:
    """Mean -log2 of the probability of each byte, and the number of bytes.

    A byte is predicted from the 2,048 to 4,096 bytes before it, fewer at its document's start.
    """
    bits, num_bytes = 0.0, 0
    for tokens, context in tqdm([w for text in texts for w in windows(text)], desc="bits per byte"):
        logits = model(whole_step(tokens), WholeText(len(tokens))).logits
        targets = torch.tensor(tokens[context:])
        nats = torch.nn.functional.cross_entropy(logits[context - 1 : -1], targets, reduction="sum")
        bits += nats.item() / math.log(2)
        num_bytes += len(targets)
    return bits / num_bytes, num_bytes


@torch.inference_mode()
def observe(model: HybridLM, texts: list[str]) -> dict:
    """Expert load by layer (share of the choices) and half-lives of the DeltaNet heads (tokens, median), on texts."""
    loads, decays = {}, {}
    for text in tqdm(texts, desc="routing and forgetting"):
        memory = WholeText(len(tokens := [END_OF_TEXT, *text.encode()][:OBSERVED_TOKENS]))
        for layer, routing in enumerate(model(whole_step(tokens), memory).routing):
            counts = torch.bincount(routing.expert_ids.flatten(), minlength=model.config.num_experts)
            loads[layer] = loads.get(layer, 0) + counts
        for layer, g in memory.decays.items():
            decays.setdefault(layer, []).append(g)
    half_lives = {layer: (math.log(2) / -torch.cat(gs).median(0).values).tolist() for layer, gs in decays.items()}
    shares = {layer: (counts / counts.sum()).tolist() for layer, counts in loads.items()}
    return {"expert_share": shares, "half_life_tokens": half_lives}


@torch.inference_mode()
def draft_probs(
    model: HybridLM, tokens: list[int], depth: int, temperature: float
) -> tuple[list[Tensor], list[Tensor]]:
    """Target and draft distributions of a text at each depth, aligned: entry j of depth d speaks of token j + d + 1.

    Returns (p, q), each a list over depths 1..depth of [len(tokens) - depth - 1, vocab].
    """
    num = len(tokens) - depth - 1
    memory = WholeText(len(tokens), mtp_layer=model.config.num_hidden_layers)
    output = model(whole_step(tokens), memory)
    hidden, target, draft = output.hidden[:num], [], []
    for d in range(1, depth + 1):
        positions, every = torch.arange(d, d + num), torch.arange(num)
        step = Step(torch.tensor(tokens[d : d + num]), positions, torch.tensor([0, num]), every)
        hidden, _ = model.draft_hidden(step, hidden, memory)
        draft.append((model.logits(hidden) / temperature).softmax(-1))
        target.append((output.logits[d : d + num] / temperature).softmax(-1))
    return target, draft


def acceptance_on_text(model: HybridLM, texts: list[str], depth: int = 3) -> tuple[list[float], float]:
    """How often the likeliest drafts of depths 1..d equal the text, and the first the model's choice."""
    right, same, total = torch.zeros(depth), 0, 0
    for text in tqdm(texts, desc="drafts on text"):
        tokens = [END_OF_TEXT, *text.encode()][:OBSERVED_TOKENS]
        target, draft = draft_probs(model, tokens, depth, temperature=1.0)
        hits = torch.stack([q.argmax(-1) == torch.tensor(tokens[d + 2 : d + 2 + len(q)]) for d, q in enumerate(draft)])
        right += hits.cumprod(0).sum(1)
        same += (target[0].argmax(-1) == draft[0].argmax(-1)).sum().item()
        total += hits.shape[1]
    return (right / total).tolist(), same / total


def acceptance_sampled(model: HybridLM, texts: list[str], temperature: float = 0.8, depth: int = 3) -> list[float]:
    """Chance that drafts of depths 1..d are all accepted when both models sample at `temperature`.

    On text that the model itself sampled, the chance of accepting token x is min(1, q(x) / p(x)) on the way and
    sum(min(p, q)) at the end: their mean product is the probability, without drawing anything.
    """
    sums, total = torch.zeros(depth), 0
    for prompt in tqdm(texts, desc="drafts when sampling"):
        params = SamplingParams(max_tokens=256, temperature=temperature, seed=total, ignore_eos=True)
        request = complete(model, [END_OF_TEXT, *prompt.encode()[:128]], params)
        start = len(request.prompt_ids)
        target, draft = draft_probs(model, request.tokens, depth, temperature)
        reach = torch.ones(len(target[0]))
        for d, (p, q) in enumerate(zip(target, draft, strict=True)):
            sums[d] += (reach * torch.minimum(p, q).sum(-1))[start:].sum()
            token = torch.tensor(request.tokens[d + 2 : d + 2 + len(p)])[:, None]
            reach = reach * (q.gather(1, token) / p.gather(1, token)).clamp(max=1)[:, 0]
        total += len(target[0]) - start
    return (sums / total).tolist()


def complete(model: HybridLM, prompt: list[int], params: SamplingParams, until: int | None = None) -> Request:
    """Run a prompt to its end, or until a token."""
    request = Request(0, prompt, params, seed=params.seed or 0)
    for _, sampled in zip(range(params.max_tokens), run_alone(model, request, EventLog(RealClock())), strict=False):
        if sampled.token_id == until:
            break
    return request


def recall_prompt(practice: Practice, reach: int, chat: bool) -> tuple[list[int], list[int]]:
    """A prompt that names a value, `reach` tokens of other text, and asks for it: (prompt, answer up to its end)."""
    name, value = practice.pick(NAMES), practice.value()
    if not chat:
        return ids(f"{name} = {value}\n") + practice.filler(reach) + ids(f"\n{name} = "), ids(f"{value}\n")
    turns = [("system", ids("You are a helpful assistant. Answer from the notes.")), ("user", ids(f"{name} = {value}")),
             ("assistant", ids("ok")), ("user", ids("Show me some code.")), ("assistant", practice.filler(reach)),
             ("user", ids(f"What is the {name}?"))]  # fmt: skip
    asked = [token for role, content in turns for token in turn(role, content)] + turn("assistant", [])[:-2]
    return asked, ids(f"{name} = {value}") + [IM_END]


def recall_accuracy(
    model: HybridLM, held_out: Int[np.ndarray, " tokens"], reach: int, chat: bool, num: int = 25
) -> float:
    """Share of questions about an early value that greedy decoding answers to the last byte."""
    practice = Practice(held_out, np.random.default_rng([7, reach, chat]))
    right = 0
    for _ in tqdm(range(num), desc=f"recall over {reach}", leave=False):
        prompt, answer = recall_prompt(practice, reach, chat)
        right += complete(model, prompt, SamplingParams(max_tokens=len(answer), ignore_eos=True)).output_ids == answer
    return right / num


def copy_accuracy(model: HybridLM, held_out: Int[np.ndarray, " tokens"], num: int = 50, span: int = 64) -> float:
    """Share of bytes that greedy decoding copies right, of a held-out passage pasted again, after its first 32."""
    practice, right = Practice(held_out, np.random.default_rng(11)), 0
    for _ in tqdm(range(num), desc="copy", leave=False):
        passage = practice.filler(32 + span)
        prompt = passage + ids("\n\n") + practice.filler(200) + ids("\n\n") + passage[:32]
        out = complete(model, prompt, SamplingParams(max_tokens=span, ignore_eos=True)).output_ids
        right += sum(a == b for a, b in zip(out, passage[32:], strict=True))
    return right / (num * span)


def loops(token_ids: list[int], gram: int = 8, times: int = 4) -> bool:
    """Whether some n-gram comes `times` times.

    >>> loops(list(range(8)) * 4), loops(list(range(40)))
    (True, False)
    """
    grams = [tuple(token_ids[i : i + gram]) for i in range(len(token_ids) - gram + 1)]
    return any(grams.count(g) >= times for g in set(grams))


def loop_share(model: HybridLM, texts: list[str], num: int = 100) -> float:
    """Share of held-out prompts whose greedy 128 bytes repeat an 8-gram four times."""
    looping = 0
    for i in tqdm(range(num), desc="loops", leave=False):
        text = texts[i % len(texts)].encode()
        start = (i * 997) % max(1, len(text) - 128)
        looping += loops(
            complete(model, list(text[start : start + 128]), SamplingParams(max_tokens=128, ignore_eos=True)).output_ids
        )
    return looping / num
