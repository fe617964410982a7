"""The plain loop: one request at a time, contiguous caches sized for the longest case, nothing shared.

This is what `generate()` in a loop is. It is right, it is short, and everything in this library is measured against it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from minserve.deltanet.conv_tail import conv_tail
from minserve.deltanet.gated_delta import gated_delta_chunked, gated_delta_recurrent
from minserve.errors import InvalidValue
from minserve.events import EventKind, EventLog
from minserve.model.config import LINEAR, ModelConfig
from minserve.model.hybrid_lm import HybridLM
from minserve.model.step import Step
from minserve.request import Request
from minserve.sampling import Sampled, sample, score_prompt, usable_rows


class NaiveMemory:
    """The memory of one sequence: a slab of keys and values per attention layer, a tail and a state per DeltaNet layer.

    Arguments:
        config: the model's.
        max_tokens: how long the sequence may get; the slabs are this long from the start.
        dtype, device: the model's. States are float32, or float64 with a float64 model.
    """

    def __init__(
        self,
        config: ModelConfig,
        max_tokens: int,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ):
        slab = (max_tokens, config.num_key_value_heads, config.head_dim)
        state = (1, config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim)
        tail = (1, config.linear_conv_kernel_dim - 1, config.conv_channels)
        wide = torch.promote_types(dtype, torch.float32)
        layers = range(config.num_hidden_layers + config.mtp_num_hidden_layers)
        linear = [i for i in layers if i < config.num_hidden_layers and config.layer_types[i] == LINEAR]
        self.keys = {i: torch.zeros(slab, dtype=dtype, device=device) for i in layers if i not in linear}
        self.values = {i: torch.zeros(slab, dtype=dtype, device=device) for i in layers if i not in linear}
        self.lengths = dict.fromkeys(self.keys, 0)
        self.tails = {i: torch.zeros(tail, dtype=dtype, device=device) for i in linear}
        self.states = {i: torch.zeros(state, dtype=wide, device=device) for i in linear}

    def attend(
        self,
        layer: int,
        q: Float[Tensor, "tokens heads head_dim"],
        k: Float[Tensor, "tokens kv_heads head_dim"],
        v: Float[Tensor, "tokens kv_heads head_dim"],
    ) -> Float[Tensor, "tokens heads head_dim"]:
        """Append the new keys and values, and attend to all so far. Changes: this layer's slabs and length."""
        start, stop = self.lengths[layer], self.lengths[layer] + len(q)
        self.keys[layer][start:stop], self.values[layer][start:stop] = k, v
        self.lengths[layer] = stop
        # Token i of the chunk stands at start + i, so the triangle is aligned to the bottom right.
        mask = None if len(q) == 1 else q.new_ones(len(q), stop, dtype=torch.bool).tril(start)
        rows = (x.transpose(0, 1)[None] for x in (q, self.keys[layer][:stop], self.values[layer][:stop]))
        return F.scaled_dot_product_attention(*rows, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)

    def convolve(
        self, layer: int, x: Float[Tensor, "tokens channels"], weight: Float[Tensor, "channels kernel"]
    ) -> Float[Tensor, "tokens channels"]:
        """Convolve on from the tail. Changes: this layer's tail."""
        out, self.tails[layer] = conv_tail(x[None], weight, self.tails[layer])
        return out[0]

    def recur(
        self,
        layer: int,
        q: Float[Tensor, "tokens key_heads key_dim"],
        k: Float[Tensor, "tokens key_heads key_dim"],
        v: Float[Tensor, "tokens value_heads value_dim"],
        g: Float[Tensor, "tokens value_heads"],
        beta: Float[Tensor, "tokens value_heads"],
    ) -> Float[Tensor, "tokens value_heads value_dim"]:
        """Go on from the state, token by token or in chunks. Changes: this layer's state."""
        rule = gated_delta_recurrent if len(v) == 1 else gated_delta_chunked
        out, self.states[layer] = rule(q[None], k[None], v[None], g[None], beta[None], self.states[layer])
        return out[0]


@torch.inference_mode()
def run_alone(model: HybridLM, request: Request, log: EventLog, batch_tokens: int = 512) -> Iterator[Sampled]:
    """Run one request by itself and yield its tokens as they are chosen; the caller decides when to stop.

    Arguments:
        model: any checkpoint.
        request: waiting, nothing computed.
        log: every slice and step is recorded here.
        batch_tokens: prompt tokens per step at most.
    Changes: the request (tokens, counts, prompt_logprobs) and the log.
    """
    weight = model.model.embed_tokens.weight
    max_tokens = len(request.prompt_ids) + request.params.max_tokens
    memory = NaiveMemory(model.config, max_tokens, weight.dtype, weight.device)
    while True:
        start = request.num_computed
        ids = request.tokens[start : start + batch_tokens]
        scored = request.params.prompt_logprobs is not None and start < len(request.prompt_ids)
        began_s = log.clock.now()
        logits = model(Step.one_row(ids, start, every_logit=scored, device=weight.device), memory).logits
        stop = start + len(ids)
        phase = "prefill" if start < len(request.prompt_ids) else "decode"
        log.record(EventKind.SLICE, request.id, start=start, stop=stop, phase=phase, step=len(log))
        log.record(EventKind.STEP, step=len(log) - 1, start_s=began_s, duration_s=log.clock.now() - began_s,
                   num_rows=1, num_tokens=len(ids), num_padded=0)  # fmt: skip
        if scored:
            if not usable_rows(logits).all():
                raise InvalidValue("logits", "NaN, +inf or all masked", "numbers, to score the prompt by")
            score_prompt(request, logits, start)
        if stop < request.num_committed:
            request.commit(stop)
            continue
        if request.params.max_tokens == 0:
            request.commit(stop)
            return
        sampled = sample(logits[-1:], [request])[0]
        request.commit(stop, [sampled.token_id])
        yield sampled
