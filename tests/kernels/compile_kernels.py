"""Compile the kernels for GPUs that need not be here, and say what each program takes.

    python tests/kernels/compile_kernels.py [KERNEL ...] [--head-dims D ...]

It prints one JSON object per kernel, dtype, head size and target; without head sizes, one typical size for each dtype.

It runs in a process of its own, because a process that interprets kernels cannot compile them.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from itertools import product
from pathlib import Path
from typing import NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from minserve.batching import ragged_attention_triton as batching
from minserve.deltanet import conv_tail_triton as convolution
from minserve.deltanet import gated_delta_triton as delta_rule
from minserve.deltanet import tail_copy_triton as deltanet
from minserve.paging import paged_attention_triton as paging
from minserve.radix import shared_prefix_attention_triton as radix
from minserve.speculation import verify_triton as speculation

TARGETS = {"sm_80": ("cuda", 80, 32), "sm_90": ("cuda", 90, 32), "gfx942": ("hip", "gfx942", 64)}
NUMBER_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
# The shipped model's, the published checkpoints', and one that is no power of two.
TYPICAL_HEAD_DIMS = {"fp32": (32,), "bf16": (256,), "fp16": (80,)}


class Compiled(NamedTuple):
    """A kernel and what it is compiled for.

    All arguments are pointers to numbers but those named here: pointers to indices, pointers to numbers of the wide
    dtype, and integers. Constants are the same for all, or a function of a number's bytes and the head size.
    """

    module: object
    indices: str = ""
    wide_numbers: str = ""
    integers: str = ""
    constants: object = None
    options: dict | None = None


def vectors(head_dim: int, **others) -> dict:
    """The constants of an attention kernel."""
    return {"HEAD_DIM": head_dim, "SCALE": head_dim**-0.5, "DIM": max(16, triton.next_power_of_2(head_dim)), **others}


def ragged_tile(number_bytes: int, head_dim: int) -> dict:
    """The sizes that the wrapper of ragged attention chooses."""
    queries, keys, _ = batching._blocks(head_dim, number_bytes)
    return vectors(head_dim, QUERIES=queries, KEYS=keys)


def paged_tile(number_bytes: int, head_dim: int) -> dict:
    """The sizes that the wrapper of paged attention chooses for groups of up to 16 heads."""
    return vectors(head_dim, LANES=paging.SMALLEST_BLOCK, KEYS=paging._block_keys(number_bytes))


def prefix_tile(number_bytes: int, head_dim: int) -> dict:
    """The sizes that the wrapper of shared-prefix attention chooses."""
    sizes = vectors(head_dim, KEYS=radix._block_keys(number_bytes))
    return sizes | {"LANES": radix._lanes(sizes["DIM"], number_bytes)}


def merged_heads(number_bytes: int, head_dim: int) -> dict:
    """The sizes of 16 heads whose parts are merged."""
    return {name: size for name, size in vectors(head_dim, HEADS=16).items() if name != "SCALE"}


def delta_tokens(number_bytes: int, head_dim: int) -> dict:
    """The sizes of rows that go token by token, with keys and values of one size; one state is left behind."""
    keys, columns = delta_rule._token_blocks(head_dim, head_dim)
    return {"KEY_DIM": head_dim, "VALUE_DIM": head_dim, "KEYS": keys, "COLUMNS": columns, "EVERY": False}


def within_chunks(number_bytes: int, head_dim: int) -> dict:
    """The sizes of that part of a chunk which has no values."""
    return {"KEY_DIM": head_dim, "SLICE": delta_rule.SLICE, "CHUNK": 32}


def across_chunks(number_bytes: int, head_dim: int) -> dict:
    """The sizes of rows that go chunk by chunk."""
    columns = delta_rule._columns(head_dim, 32)
    return within_chunks(number_bytes, head_dim) | {"VALUE_DIM": head_dim, "COLUMNS": columns}


KERNELS = {
    "tail_copy_kernel": Compiled(
        deltanet, "row_starts state_read state_write", "", "channels", {"KEEP": 3, "BLOCK": deltanet.MAX_BLOCK}
    ),
    "conv_tail_kernel": Compiled(
        convolution,
        "row_starts token_rows",
        "",
        "num_tokens channels",
        {"KEEP": 3, "TOKENS": convolution.TOKENS, "CHANNELS": convolution.CHANNELS, "EVERY": False},
    ),
    "delta_tokens_kernel": Compiled(
        delta_rule,
        "row_starts",
        "q k g beta state new_state",
        "most_tokens key_heads value_heads",
        delta_tokens,
    ),
    "within_chunks_kernel": Compiled(
        delta_rule,
        "row_starts chunk_rows chunk_starts",
        "q k g beta solved scores",
        "num_rows key_heads value_heads",
        within_chunks,
        {"num_stages": delta_rule.NUM_STAGES},
    ),
    "across_chunks_kernel": Compiled(
        delta_rule,
        "row_starts chunk_starts",
        "q k g state solved scores new_state",
        "most_tokens key_heads value_heads",
        across_chunks,
        {"num_stages": delta_rule.NUM_STAGES, "num_warps": delta_rule.NUM_WARPS},
    ),
    "ragged_attention_kernel": Compiled(
        batching,
        "row_starts tile_rows tile_starts",
        "lse",
        "num_rows heads kv_heads",
        ragged_tile,
        {"num_stages": batching.NUM_STAGES},
    ),
    "paged_attention_kernel": Compiled(
        paging,
        "page_tables row_starts context_lens tile_rows tile_starts",
        "outs lses",
        "num_rows num_tokens max_pages page_size part_tokens heads kv_heads",
        paged_tile,
        {"num_stages": paging.NUM_STAGES},
    ),
    "merge_parts_kernel": Compiled(paging, "", "outs lses lse", "num_parts num_tokens heads", merged_heads),
    "prefix_attention_kernel": Compiled(
        radix,
        "shared_pages",
        "outs lses",
        "num_tokens num_shared page_size part_tokens heads kv_heads",
        prefix_tile,
        {"num_stages": radix.NUM_STAGES},
    ),
    "merge_prefix_kernel": Compiled(radix, "", "tail_lse outs lses lse", "num_parts num_tokens heads", merged_heads),
    "write_pages_kernel": Compiled(paging, "slots", "", "channels", {"BLOCK": paging.MAX_BLOCK}),
    "verify_kernel": Compiled(
        speculation,
        "draft_ids row_starts num_accepted next_ids",
        "accept_u sample_u",
        "vocab",
        {"HAS_Q": True, "BLOCK": speculation.MAX_BLOCK},
        {"num_warps": speculation.NUM_WARPS},
    ),
}


def compiled(name: str, constants: dict, target: str, dtype: str):
    """A kernel, compiled as for tensors that begin where PyTorch lets them begin."""
    known = KERNELS[name]
    kernel = getattr(known.module, name)
    types = dict.fromkeys(known.indices.split(), "*i64") | dict.fromkeys(known.wide_numbers.split(), "*fp32")
    types |= dict.fromkeys(known.integers.split(), "i32") | dict.fromkeys(constants, "constexpr")
    signature = {arg: types.get(arg, f"*{dtype}") for arg in kernel.arg_names}
    pointers = [i for i, type_ in enumerate(signature.values()) if type_[0] == "*"]
    source = ASTSource(kernel, signature, constants, {(i,): [["tt.divisibility", 16]] for i in pointers})
    return triton.compile(source, target=GPUTarget(*TARGETS[target]), options=known.options)


def usage(kernel) -> dict[str, int]:
    """Registers per thread, and what did not fit into them: stack bytes (NVIDIA), spilled registers (AMD)."""
    if "amdgcn" in kernel.asm:
        found = re.findall(r"\.vgpr_(count|spill_count):\s+(\d+)", kernel.asm["amdgcn"])
        return {{"count": "registers", "spill_count": "spilled"}[name]: int(value) for name, value in found}
    (dump,) = list(Path(triton.__file__).parent.glob("backends/nvidia/bin/cuobjdump")) or (None,)
    if dump is None:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(kernel.asm["cubin"])
        said = subprocess.run([dump, "-res-usage", file], capture_output=True, text=True, check=False).stdout
    found = re.findall(r"(REG|STACK):(\d+)", said)
    return {{"REG": "registers", "STACK": "spilled"}[name]: int(value) for name, value in found}


def constants_of(name: str, dtype: str, head_dims) -> list[dict]:
    """What to compile a kernel for."""
    constants = KERNELS[name].constants
    if isinstance(constants, dict):
        return [constants]
    return [constants(NUMBER_BYTES[dtype], head_dim) for head_dim in head_dims or TYPICAL_HEAD_DIMS[dtype]]


def row_of(name: str, constants: dict, target: str, dtype: str) -> dict:
    """One line of the table: what was compiled, and what it takes."""
    kernel = compiled(name, constants, target, dtype)
    (binary,) = {"cubin", "hsaco"} & kernel.asm.keys()
    sizes = {key: size for key, size in constants.items() if key != "SCALE"}
    size = {"binary": binary, "binary_bytes": len(kernel.asm[binary]), "shared_bytes": kernel.metadata.shared}
    return {"kernel": name, "target": target, "dtype": dtype, "sizes": sizes, **size, **usage(kernel)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("kernels", nargs="*")
    parser.add_argument("--head-dims", nargs="*", type=int)
    asked = parser.parse_args()
    for name, dtype in product(asked.kernels or KERNELS, NUMBER_BYTES):
        for constants, target in product(constants_of(name, dtype, asked.head_dims), TARGETS):
            print(json.dumps(row_of(name, constants, target, dtype)), flush=True)
