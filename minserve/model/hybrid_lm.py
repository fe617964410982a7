"""The hybrid language model: embed, run the layers, norm, and logits where a token is chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from minserve.errors import InvalidValue
from minserve.model.checkpoint import read_config, read_tensors
from minserve.model.config import ModelConfig
from minserve.model.implementations import choose_implementation
from minserve.model.joined_projections import join_projections
from minserve.model.layers import DecoderLayer, RMSNorm, Routing, rotary_table
from minserve.model.memory import Memory
from minserve.model.mtp import MTPHead
from minserve.model.step import Step


class ModelOutput(NamedTuple):
    """What one step of the model gives: hidden states of every token, logits of the chosen ones, routing by layer."""

    hidden: Float[Tensor, "tokens hidden"]
    logits: Float[Tensor, "chosen vocab"]
    routing: tuple[Routing | None, ...]


class Trunk(nn.Module):
    """Embedding, decoder layers and the final norm, under the name that checkpoints give them."""

    def __init__(self, config: ModelConfig, impl: str):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, i, kind, impl) for i, kind in enumerate(config.layer_types))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class _NoInitialValues(TorchFunctionMode):
    """Leaves out the drawing of initial weights, which a checkpoint will replace.

    On the meta device torch would import its compiler for it: a second, when a model is first loaded.
    """

    def __torch_function__(self, func: Callable, types: Sequence[type], args: tuple = (), kwargs: dict | None = None):
        """Call func, unless it draws initial values; then return its tensor as it is."""
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


class HybridLM(nn.Module):
    """A Qwen3.5-family text decoder; it computes and remembers nothing.

    Its parameters bear the names of the published checkpoints, so `state_dict()` is a checkpoint.
    `impl` names the implementation of the layers: see `minserve.model.implementations`.
    """

    def __init__(self, config: ModelConfig, impl: str = "torch"):
        super().__init__()
        choose_implementation(impl)
        self.config = config
        self.model = Trunk(config, impl)
        self.lm_head = (
            None if config.tie_word_embeddings else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        )
        self.mtp = MTPHead(config, impl) if config.mtp_num_hidden_layers else None

    @classmethod
    def from_checkpoint(
        cls,
        path: str | Path,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        impl: str = "torch",
    ) -> HybridLM:
        """Read a checkpoint folder; the errors are those of minserve.model.checkpoint."""
        config = read_config(path)
        with torch.device("meta"), _NoInitialValues():
            model = cls(config, impl)
        shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        tensors, _ = read_tensors(path, config, shapes, dtype=dtype, device=device)
        model.load_state_dict(tensors, assign=True)
        model.requires_grad_(False).eval()
        join_projections(model)
        return model

    def forward(self, step: Step, memory: Memory) -> ModelOutput:
        """Run one step: every token of it through every layer, `memory` supplying what came before."""
        x = self.model.embed_tokens(step.tokens)
        rotation = rotary_table(step.positions, self.config, x.dtype)
        routing = []
        for layer in self.model.layers:
            x, chosen = layer(x, rotation, memory)
            routing.append(chosen)
        hidden = self.model.norm(x)
        return ModelOutput(hidden, self.logits(hidden[step.chosen]), tuple(routing))

    def logits(self, hidden: Float[Tensor, "tokens hidden"]) -> Float[Tensor, "tokens vocab"]:
        """Score every vocabulary entry as the next token, from hidden states after the final norm."""
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        return nn.functional.linear(hidden, head.weight)

    def draft_hidden(
        self, step: Step, hidden: Float[Tensor, "tokens hidden"], memory: Memory
    ) -> tuple[Float[Tensor, "tokens hidden"], Routing | None]:
        """Run the MTP head: `hidden` is h of the token before each of the step's tokens; see MTPHead."""
        if self.mtp is None:
            raise InvalidValue("mtp_num_hidden_layers", 0, "1, a model with an MTP head, to draft")
        return self.mtp(self.model.embed_tokens(step.tokens), hidden, step.positions, memory)
