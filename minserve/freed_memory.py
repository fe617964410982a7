"""Let the C library keep the memory that a step frees, for the next step to use.

A step on a CPU makes and drops hundreds of tensors of a few megabytes. glibc hands blocks of that size back to the
system, which clears them page by page when they are asked for again, in the next layer and in the next step. On a
GPU torch's own allocator keeps what is freed; on a CPU it leaves that to the C library.
"""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_KEPT_BYTES, _LARGEST_EVERYWHERE = 2**30, 2**25


def keep_freed_memory() -> bool:
    """Tell the allocator of this process to keep up to 1 GiB of freed memory; whether it could be told.

    Other C libraries than glibc have no such setting, and then nothing is done. Changes: the process's allocator.
    """
    try:
        set_option = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    # The one that an older glibc refuses comes first: once either is set, none of the two adapts by itself any more.
    is_mapped = any(set_option(_MMAP_THRESHOLD, size) == 1 for size in (_KEPT_BYTES, _LARGEST_EVERYWHERE))
    return is_mapped and set_option(_TRIM_THRESHOLD, _KEPT_BYTES) == 1
