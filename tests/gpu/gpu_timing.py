"""How long a call takes on a GPU, and how fast that GPU copies: the yardstick beside which its kernels are held."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

FLUSH_BYTES, NUM_FLUSHES = 512 * 2**20, 4
COPY_BYTES = 2**30
NUM_WARM_UPS, NUM_REPEATS = 3, 15


class Timer:
    """Times calls on one device.

    Arguments:
        device: a CUDA device; on any other one, times are those of a wall clock and mean little.
        num_repeats: calls of which the median is taken.
    """

    def __init__(self, device: torch.device, num_repeats: int = NUM_REPEATS):
        self.device, self.num_repeats = device, num_repeats
        self._on_gpu = device.type == "cuda"
        self._flushed = torch.empty(FLUSH_BYTES if self._on_gpu else 1, dtype=torch.uint8, device=device)

    def gpu_s(self, call: Callable[[], object]) -> float:
        """Seconds that the GPU spends on a call which waits for nothing: its launches, and nothing of the CPU's.

        Before each call a large memory is filled: that empties the cache, and it keeps the GPU busy for so long that
        all of the call is queued when the GPU comes to it.
        """
        if not self._on_gpu:
            return self.call_s(call)
        times_s = []
        for number in range(NUM_WARM_UPS + self.num_repeats):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in "ab")
            for _ in range(NUM_FLUSHES):
                self._flushed.zero_()
            start.record()
            call()
            stop.record()
            torch.cuda.synchronize(self.device)
            if number >= NUM_WARM_UPS:
                times_s.append(start.elapsed_time(stop) / 1000)
        return statistics.median(times_s)

    def call_s(self, call: Callable[[], object], num_repeats: int | None = None) -> float:
        """Seconds until a caller has the result: what the CPU spends on launching, and the wait for the GPU."""
        times_s = []
        call()
        self._wait()
        for _ in range(num_repeats or self.num_repeats):
            began_s = time.perf_counter()
            call()
            self._wait()
            times_s.append(time.perf_counter() - began_s)
        return statistics.median(times_s)

    def copy_bytes_per_s(self, num_bytes: int = COPY_BYTES) -> float:
        """Bytes per second, read and written ones together, of a plain copy from memory to memory."""
        source = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2 * num_bytes / self.gpu_s(lambda: target.copy_(source))

    def _wait(self) -> None:
        """Wait until the GPU has nothing left to do."""
        if self._on_gpu:
            torch.cuda.synchronize(self.device)
