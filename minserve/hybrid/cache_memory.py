"""The tensors of the two caches, and what a step's layers see of them.

Pools belong to layers; pages and slots have the same number in every layer, so one page table and a few slots per row
serve the whole model. A step reads slots and writes others, and appends to pages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from minserve.deltanet.state_pool import EMPTY
from minserve.engine_config import CacheSizes
from minserve.model.config import LINEAR, ModelConfig
from minserve.model.implementations import Implementation


def without_first(
    out: Float[Tensor, "tokens heads head_dim"], lse: Float[Tensor, "tokens heads"]
) -> Float[Tensor, "tokens heads head_dim"]:
    """Take the first position out of an attention whose key and value there are zeros.

    Zeros score 0, so the position has put e^0 = 1 into the sum under the softmax, and nothing above it: the sum is
    e^lse where e^lse - 1 is wanted.
    """
    share = -torch.expm1(-lse)  # 1 - e^-lse
    return out / share.clamp(min=torch.finfo(share.dtype).tiny).to(out.dtype)[..., None]


@dataclass(frozen=True)
class RowParts:
    """The parts of some rows that the DeltaNet layers run together, so that the states after them can be kept.

    Fields: `rows` which; `tokens` where in the packing their tokens are; `row_starts` where each part begins in these,
    and the end; `state_write` the slot of the state after each; `every_state`, whether a state is kept after each of
    its tokens: then there is a slot for each.
    """

    rows: Int[Tensor, " part_rows"]
    tokens: Int[Tensor, " part_tokens"]
    row_starts: Int[Tensor, " part_rows_plus_1"]
    state_write: Int[Tensor, " part_states"]
    every_state: bool = False


@dataclass(frozen=True)
class SharedPages:
    """Rows whose tables begin with the same pages: `rows` which, in order; `num_pages` how many."""

    rows: Int[Tensor, " sharing_rows"]
    num_pages: int


@dataclass(frozen=True)
class Places:
    """Where the rows of a step keep what they remember.

    Fields: `page_tables` the pages of each row, -1 beyond its last; `context_lens` its tokens after this step;
    `state_read` the slot that it continues from, -1 at its beginning; `state_write` the slot that gets its last state;
    `slots` where in the pages each packed token goes; `shared` which rows begin with the same pages;
    `parts` what the DeltaNet layers run one after the other, where states inside rows are to be kept; else nothing.
    """

    page_tables: Int[Tensor, "rows max_pages"]
    context_lens: Int[Tensor, " rows"]
    state_read: Int[Tensor, " rows"]
    state_write: Int[Tensor, " rows"]
    slots: Int[Tensor, " tokens"]
    shared: SharedPages | None = None
    parts: tuple[RowParts, ...] = ()


class CacheMemory:
    """Pools of pages and of states, one of each kind per layer that needs it.

    Arguments:
        config: the model's.
        sizes: of every attention layer's pool of pages, and of every DeltaNet layer's pool of slots.
        implementation: the functions that work on them.
        share_reads_from: positions that must be saved for rows to read the pages that they share together.
        dtype, device: the model's. States are float32, or float64 with a float64 model.
        with_head: keep what the draft head needs, too: its keys and values, and the model's last output per slot.
    Attributes:
        hidden: with the head, by slot, h of the last token that the state in it has seen; else None.
        head_layer: with the head, the number of its layer; else None.
    """

    def __init__(
        self, config: ModelConfig, sizes: CacheSizes, implementation: Implementation, share_reads_from: int = 4096,
        dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu", with_head: bool = False,
    ):  # fmt: skip
        self.config, self.implementation, self.page_size = config, implementation, sizes.page_size
        self.share_reads_from = share_reads_from
        wide = torch.promote_types(dtype, torch.float32)
        linear = [i for i, kind in enumerate(config.layer_types) if kind == LINEAR]
        pages = (sizes.num_pages, sizes.page_size, config.num_key_value_heads, config.head_dim)
        tails = (sizes.num_slots, config.linear_conv_kernel_dim - 1, config.conv_channels)
        heads = (config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim)
        states = (sizes.num_slots, *heads)
        attention = [i for i in range(config.num_hidden_layers + with_head) if i not in linear]
        self.head_layer = config.num_hidden_layers if with_head else None
        self.hidden = None
        if with_head:
            self.hidden = torch.zeros(sizes.num_slots, config.hidden_size, dtype=dtype, device=device)

        def pool(layers: list[int], shape: tuple[int, ...], of: torch.dtype) -> dict[int, Tensor]:
            return {i: torch.zeros(shape, dtype=of, device=device) for i in layers}

        self.k_pages, self.v_pages = pool(attention, pages, dtype), pool(attention, pages, dtype)
        self.tails, self.states = pool(linear, tails, dtype), pool(linear, states, wide)

    def at(self, row_starts: Int[Tensor, " rows_plus_1"], places: Places) -> StepMemory:
        """The memory of one step's rows."""
        return StepMemory(self, row_starts, places)

    def copy_page(self, source: int, target: int) -> None:
        """Copy a page's keys and values, in every layer. Changes: the target page."""
        for pool in (*self.k_pages.values(), *self.v_pages.values()):
            pool[target] = pool[source]


class StepMemory:
    """What the layers are handed in one step: see `minserve.model.memory.Memory`.

    Arguments:
        memory: the pools.
        row_starts: where each row begins in the packing, and the end.
        places: where the rows keep what they remember.
    """

    def __init__(self, memory: CacheMemory, row_starts: Int[Tensor, " rows_plus_1"], places: Places):
        self._pools, self._row_starts, self._places = memory, row_starts, places
        self._run = memory.implementation
        self._groups = self._group_rows(memory)
        # Outputs come part by part; this brings them back into the packing's order.
        self._order = torch.cat([part.tokens for part in places.parts]).argsort() if len(places.parts) > 1 else None

    def attend(
        self,
        layer: int,
        q: Float[Tensor, "tokens heads head_dim"],
        k: Float[Tensor, "tokens kv_heads head_dim"],
        v: Float[Tensor, "tokens kv_heads head_dim"],
    ) -> Float[Tensor, "tokens heads head_dim"]:
        """Append the new keys and values to the rows' pages, and attend. Changes: this layer's pages."""
        k_pages, v_pages, places = self._pools.k_pages[layer], self._pools.v_pages[layer], self._places
        self._run.write_pages(k, v, k_pages, v_pages, places.slots)
        rows = (places.page_tables, self._row_starts, places.context_lens)
        if layer == self._pools.head_layer:
            return without_first(*self._run.paged_attention(q, k_pages, v_pages, *rows))
        if self._groups is None:
            return self._run.paged_attention(q, k_pages, v_pages, *rows)[0]
        (together, sharing), (apart, others) = self._groups
        out = torch.empty_like(q)
        out[together] = self._run.shared_prefix_attention(
            q[together], k_pages, v_pages, *sharing, places.shared.num_pages, self._run.paged_attention
        )[0]
        if len(apart):
            out[apart] = self._run.paged_attention(q[apart], k_pages, v_pages, *others)[0]
        return out

    def _group_rows(self, memory: CacheMemory) -> tuple | None:
        """Those who read shared pages together, and the others: for each, where their tokens are, and their rows.

        None where reading together would not save enough.
        """
        shared, lens = self._places.shared, self._places.context_lens
        if shared is None or (len(shared.rows) - 1) * shared.num_pages * memory.page_size < memory.share_reads_from:
            return None
        counts = self._row_starts.diff()
        is_sharing = torch.zeros(len(lens), dtype=torch.bool, device=lens.device).index_fill(0, shared.rows, True)
        groups = []
        for chosen in (is_sharing, ~is_sharing):
            tokens = chosen.repeat_interleave(counts).nonzero().flatten()
            starts = torch.cat([counts.new_zeros(1), counts[chosen].cumsum(0)])
            groups.append((tokens, (self._places.page_tables[chosen], starts, lens[chosen])))
        return tuple(groups)

    def convolve(
        self, layer: int, x: Float[Tensor, "tokens channels"], weight: Float[Tensor, "channels kernel"]
    ) -> Float[Tensor, "tokens channels"]:
        """Convolve each row on from its tail. Changes: this layer's written slots."""
        tails = self._pools.tails[layer]

        def run(tail: Tensor, row_starts: Tensor, x: Tensor, every_state: bool = False) -> tuple[Tensor, Tensor]:
            return self._run.conv_tail_ragged(x, weight, tail, row_starts, every_tail=every_state)

        return self._run_rows(run, tails, x)

    def recur(
        self,
        layer: int,
        q: Float[Tensor, "tokens key_heads key_dim"],
        k: Float[Tensor, "tokens key_heads key_dim"],
        v: Float[Tensor, "tokens value_heads value_dim"],
        g: Float[Tensor, "tokens value_heads"],
        beta: Float[Tensor, "tokens value_heads"],
    ) -> Float[Tensor, "tokens value_heads value_dim"]:
        """Run the gated delta rule on each row from its state. Changes: this layer's written slots."""
        states = self._pools.states[layer]

        def run(state: Tensor, row_starts: Tensor, *tokens: Tensor, **every: bool) -> tuple[Tensor, Tensor]:
            return self._run.gated_delta_ragged(*tokens, state, row_starts, **every)

        return self._run_rows(run, states, q, k, v, g, beta)

    def keep_hidden(self, hidden: Float[Tensor, "tokens hidden"]) -> None:
        """Keep the model's output behind every state that is kept, for the draft head. Changes: the pool's outputs."""
        pool, last = self._pools.hidden, self._row_starts[1:] - 1
        if not self._places.parts:
            pool.index_copy_(0, self._places.state_write, hidden[last])
        for part in self._places.parts:
            at = part.tokens if part.every_state else part.tokens[part.row_starts[1:] - 1]
            pool.index_copy_(0, part.state_write, hidden[at])

    def _run_rows(self, run: Callable, pool: Float[Tensor, "slots ..."], *tokens: Tensor) -> Tensor:
        """Run every row from its state, in parts where the states between them are kept. Changes: the pool's slots."""
        before = self._of_rows(pool)
        if not self._places.parts:
            out, new = run(before, self._row_starts, *tokens)
            pool.index_copy_(0, self._places.state_write, new)
            return out
        outs, is_all = [], len(self._places.parts) == 1  # then its tokens and rows are all, in order
        for part in self._places.parts:
            mine = tokens if is_all else [x[part.tokens] for x in tokens]
            states = before if is_all else before[part.rows]
            out, new = run(states, part.row_starts, *mine, **({"every_state": True} if part.every_state else {}))
            if not part.every_state:
                before.index_copy_(0, part.rows, new)
            pool.index_copy_(0, part.state_write, new)
            outs.append(out)
        return outs[0] if is_all else torch.cat(outs)[self._order]

    @cached_property
    def _read(self) -> Int[Tensor, " rows"]:
        """The slots that the rows continue from; any, for a row that begins. The draft head asks for none."""
        return self._places.state_read.clamp(min=0)

    @cached_property
    def _begins(self) -> Int[Tensor, " begun"]:
        """The rows that begin."""
        return (self._places.state_read == EMPTY).nonzero().flatten()

    def _of_rows(self, pool: Float[Tensor, "slots ..."]) -> Float[Tensor, "rows ..."]:
        """The states that the rows continue from: zeros for a row that begins, whatever its slot number holds."""
        rows = pool.index_select(0, self._read)
        if len(self._begins):
            rows[self._begins] = 0
        return rows
