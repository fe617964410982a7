"""How to run a model: every knob of the engine, and the sizes of the caches that follow from them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from minserve.batching.batcher import POLICIES
from minserve.errors import InvalidValue
from minserve.model.config import ModelConfig
from minserve.model.footprint import conv_tail_bytes, kv_bytes_per_token, state_bytes
from minserve.paging.page_table import pages_needed
from minserve.speculation.drafters import Drafter, Scorer
from minserve.step_costs import CostTable

DTYPES = ("float32", "float64", "bfloat16", "float16")
IMPLS = ("torch", "triton")
DRAFTS = ("none", "mtp", "ngram")
_COUNTS = ("max_context", "batch_tokens", "page_size", "num_pages", "cache_bytes", "num_states", "max_running",
           "snapshot_every", "share_reads_from", "draft_tokens")  # fmt: skip
MOST_STATES = 16  # per request that may run: more snapshots than that are not made room for unasked
_OPTIONAL = ("max_context", "num_pages", "num_states")


@dataclass(frozen=True)
class EngineConfig:
    """How to run the model.

    Fields:
        dtype: "float32", "float64" (the reference mode), "bfloat16" or "float16".
        device: where, in torch's words.
        impl: "torch", or "triton" for the kernels.
        max_context: tokens of prompt and output together, at most; None takes the model's own limit.
        batch_tokens: tokens per step, at most, of decoding requests and of prompts together.
        max_running: requests let in at the same time, at most.
        page_size: tokens per page of the KV cache.
        num_pages: pages of the KV cache; None takes what `cache_bytes` leaves beside the states.
        num_states: slots for recurrent states, of running requests and of snapshots for others; None takes what fits
            into half of `cache_bytes`, beside those that a step needs: one more for each request, and for each draft
            as far as requests leave room. No more requests run than there are slots, and they go before snapshots: with
            as many slots as requests that run, nothing of a model with states is kept for others.
        cache_bytes: memory for pages and states together; of no effect where both numbers are given.
        prefix_cache: whether requests with the same beginning and the same SamplingParams.cache_salt share it.
        snapshot_every: tokens between two states of a request that are kept for others to start from.
        share_reads_from: rows that begin with the same pages read these once, together, where that saves so many
            positions in a step; below, the second pass costs more than it saves.
        policy: who is let in next: "fcfs", the first; "priority", the one with the highest SamplingParams.priority; or
            "longest_prefix", the one that can reuse the most tokens.
        draft: who guesses tokens ahead: "none"; "mtp", the model's own head; "ngram", what followed the last tokens
            before; or an object that has `propose` or `logits`, see `minserve.speculation.drafters`.
        draft_tokens: drafts of a request in one step, at most.
        adapt_drafts: choose how many are worth their price before each step, from none to draft_tokens; False always
            asks for draft_tokens. Where none pays, none is made for a while, and requests that decode meanwhile are not
            drafted for by "mtp" any more. Requests with a seed of their own that sample always ask for all. They get
            them as far as there is room in the step and the caches, so with drafts a seed fixes the tokens only where
            nobody takes that room; how likely which tokens are never changes.
        step_costs: what steps and drafts cost, where that is not to be measured on the engine's clock; see
            `minserve.step_costs.CostTable`.
        seed: requests that bring no seed draw theirs from this one.
        check: check every invariant after each step; for tests, it takes time.

    >>> EngineConfig(dtype="float8")
    Traceback (most recent call last):
    minserve.errors.InvalidValue: dtype is 'float8'; it must be one of float32, float64, bfloat16, float16
    """

    dtype: str = "float32"
    device: str = "cpu"
    impl: str = "torch"
    max_context: int | None = None
    batch_tokens: int = 512
    max_running: int = 64
    page_size: int = 16
    num_pages: int | None = None
    num_states: int | None = None
    cache_bytes: int = 256 * 2**20
    prefix_cache: bool = True
    snapshot_every: int = 256
    share_reads_from: int = 4096
    policy: str = "fcfs"
    draft: str | Drafter | Scorer = "none"
    draft_tokens: int = 3
    adapt_drafts: bool = True
    step_costs: CostTable | None = None
    seed: int = 0
    check: bool = False

    def __post_init__(self):
        for name, allowed in (("dtype", DTYPES), ("impl", IMPLS), ("policy", POLICIES)):
            if getattr(self, name) not in allowed:
                raise InvalidValue(name, getattr(self, name), "one of " + ", ".join(allowed))
        for name in _COUNTS:
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InvalidValue(name, value, "an int >= 1")
        is_other = isinstance(self.draft, (type, torch.nn.Module)) or not isinstance(self.draft, Drafter | Scorer)
        if not (isinstance(self.draft, str) and self.draft in DRAFTS) and is_other:
            limit = "one of " + ", ".join(DRAFTS) + ", or an object with a method propose or logits"
            raise InvalidValue("draft", self.draft, limit, "minserve.draft_model.DraftModel makes a drafter of a model")
        most = getattr(self.draft, "max_drafts", self.draft_tokens)
        if self.draft_tokens > most:
            raise InvalidValue("draft_tokens", self.draft_tokens, f"at most {most}, the drafter's max_drafts")
        for name in ("prefix_cache", "adapt_drafts", "check"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidValue(name, getattr(self, name), "True or False")
        if not isinstance(self.seed, int) or not 0 <= self.seed < 2**64:
            raise InvalidValue("seed", self.seed, "an int from 0 to 2**64 - 1")


@dataclass(frozen=True)
class CacheSizes:
    """How large the caches are.

    Fields: `num_pages` of `page_size` tokens, `page_bytes` each; `num_states` slots for requests and snapshots,
    `num_rows` more for the rows of the step that runs, and `num_draft_slots` for the states after their drafts,
    `state_bytes` each. Bytes are over all layers.
    """

    num_pages: int
    page_size: int
    page_bytes: int
    num_states: int
    num_rows: int
    state_bytes: int
    num_draft_slots: int = 0

    @property
    def num_slots(self) -> int:
        """All state slots."""
        return self.num_states + self.num_rows + self.num_draft_slots

    @property
    def total_bytes(self) -> int:
        """Memory of both caches."""
        return self.num_pages * self.page_bytes + self.num_slots * self.state_bytes

    def __str__(self) -> str:
        return (
            f"{self.num_pages} pages of {self.page_size} tokens ({self.num_pages * self.page_bytes / 2**20:.1f} MiB), "
            f"{self.num_states} + {self.num_slots - self.num_states} states "
            f"({self.num_slots * self.state_bytes / 2**20:.1f} MiB)"
        )


def size_caches(config: EngineConfig, model: ModelConfig) -> CacheSizes:
    """Divide the memory between pages and states.

    Arguments:
        config: the engine's.
        model: the model's.
    Errors: InvalidValue when `cache_bytes` does not hold one state pair and one page.
    """
    dtype = getattr(torch, config.dtype)
    size, wide = dtype.itemsize, torch.promote_types(dtype, torch.float32).itemsize
    page_bytes = int(kv_bytes_per_token(model, size, with_mtp=config.draft == "mtp") * config.page_size)
    per_state = int(state_bytes(model, wide, size)) if conv_tail_bytes(model) else 0
    if per_state and config.draft == "mtp":
        per_state += model.hidden_size * size  # with each state the model's last output
    drafts = 0 if config.draft == "none" else config.draft_tokens
    num_states = config.num_states
    num_draft_slots = drafts * min(config.max_running, num_states or config.max_running, config.batch_tokens)
    if num_states is None:
        fitting = config.cache_bytes // 2 // per_state if per_state else (2 + drafts) * config.max_running
        num_rows = min(config.max_running, -(-fitting // 2))  # a row of a step needs a second slot
        # With fewer slots for drafts fewer are made: requests go first, snapshots share what is left.
        num_draft_slots = min(num_draft_slots, (fitting - 2 * num_rows) // 2 if per_state else num_draft_slots)
        num_draft_slots = max(0, num_draft_slots)
        snapshots_too = config.prefix_cache and per_state
        most = config.max_running * (MOST_STATES if snapshots_too else 1)
        num_states = min(fitting - num_rows - num_draft_slots, most)
    num_rows = min(config.max_running, num_states, config.batch_tokens)
    num_pages = config.num_pages
    if num_pages is None:
        left = config.cache_bytes - (num_states + num_rows + num_draft_slots) * per_state
        longest = pages_needed(config.max_context or model.max_position_embeddings, config.page_size)
        num_pages = min(
            left // page_bytes if page_bytes else longest, longest * max(1, min(num_states, config.max_running))
        )
    if num_states < 1 or num_pages < 1:
        page_bytes = page_bytes if config.num_pages is None else 0
        least = (num_states + num_rows + num_draft_slots) * per_state + page_bytes
        if config.num_states is None:  # then states take half at most
            least = 2 * max(2 * per_state, page_bytes)
        limit = f"at least {least}, for {config.num_states or 1} states and one page"
        raise InvalidValue("cache_bytes", config.cache_bytes, limit, "EngineConfig.cache_bytes or num_states")
    return CacheSizes(num_pages, config.page_size, page_bytes, num_states, num_rows, per_state, num_draft_slots)
