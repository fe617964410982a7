"""The engine's third stage: the model, the pools that it reads and writes, and one step of it."""

from __future__ import annotations

from collections.abc import Sequence

from minserve.batching.batcher import Slice
from minserve.draft_rows import DraftRow
from minserve.engine_config import CacheSizes, EngineConfig
from minserve.hybrid.cache_memory import CacheMemory
from minserve.hybrid.hybrid_cache import HybridCache
from minserve.hybrid.packing import pack
from minserve.hybrid.ticket import Ticket
from minserve.model.config import ModelConfig
from minserve.model.hybrid_lm import HybridLM, ModelOutput
from minserve.model.implementations import choose_implementation
from minserve.mtp_drafts import MTPDrafts
from minserve.parts import Parts


class ModelRunner:
    """Runs the model on the slices of a plan.

    Arguments:
        model: any checkpoint; None plays time alone.
        model_config: the model's shape.
        config: the engine's knobs.
        sizes: of the caches.
        parts: what a reader has replaced.
    Attributes:
        memory: the pools; None without a model.
        verify: keeps drafts, see `minserve.speculation.verify`.
    """

    def __init__(
        self, model: HybridLM | None, model_config: ModelConfig, config: EngineConfig, sizes: CacheSizes, parts: Parts
    ):
        implementation = parts.put_into(choose_implementation(config.impl))
        self._model, self._has_head = model, model is not None and config.draft == "mtp"
        self.verify, self.memory, self._device = implementation.verify, None, "cpu"
        if model is not None:
            weight = model.model.embed_tokens.weight
            self.memory = CacheMemory(
                model_config,
                sizes,
                implementation,
                config.share_reads_from,
                weight.dtype,
                weight.device,
                self._has_head,
            )
            self._device = config.device

    def copy_page(self, source: int, target: int) -> None:
        """Copy a page's contents, if there are any. Changes: the target page."""
        if self.memory is not None:
            self.memory.copy_page(source, target)

    def draft_head(self, cache: HybridCache) -> MTPDrafts | None:
        """What runs the model's own draft head on these pools, where that is who drafts."""
        return MTPDrafts(self._model, self.memory, cache) if self._has_head else None

    def run(
        self, slices: Sequence[Slice], drafts: Sequence[DraftRow], ticket: Ticket, cache: HybridCache
    ) -> ModelOutput | None:
        """The model's output for the slices, in their order; None without a model. Changes: the pools."""
        step, places = pack(slices, ticket, cache, self._device, {row.request.id: row.ids for row in drafts})
        if self._model is None:
            return None
        memory = self.memory.at(step.row_starts, places)
        output = self._model(step, memory)
        if self._has_head:
            memory.keep_hidden(output.hidden)
        return output
