"""Compile the kernel for GPUs that need not be here, and say what each program takes.

    python tests/deltanet/compile_tail_copy.py        prints one JSON object per target and dtype

It runs in a process of its own, because a process that interprets kernels cannot compile them.
"""

import json
import re
import subprocess
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from minserve.deltanet.tail_copy_triton import MAX_BLOCK, tail_copy_kernel

TARGETS = {"sm_80": ("cuda", 80, 32), "sm_90": ("cuda", 90, 32), "gfx942": ("hip", "gfx942", 64)}
DTYPES = ("fp32", "bf16", "fp16")


def compiled(target: str, dtype: str):
    """The kernel, compiled."""
    names = tail_copy_kernel.arg_names
    types = {"row_starts": "*i64", "state_read": "*i64", "state_write": "*i64", "channels": "i32"}
    constants = {"KEEP": 3, "BLOCK": MAX_BLOCK}
    signature = {name: "constexpr" if name in constants else types.get(name, f"*{dtype}") for name in names}
    source = ASTSource(tail_copy_kernel, signature, constants)
    return triton.compile(source, target=GPUTarget(*TARGETS[target]))


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


if __name__ == "__main__":
    for target in TARGETS:
        for dtype in DTYPES:
            kernel = compiled(target, dtype)
            (binary,) = {"cubin", "hsaco"} & kernel.asm.keys()
            size = {"binary": binary, "binary_bytes": len(kernel.asm[binary])}
            print(json.dumps({"target": target, "dtype": dtype, **size, **usage(kernel)}), flush=True)
