"""How long a call takes on a GPU, and how fast that GPU copies: the yardstick beside which its kernels are held."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

FLUSH_NUMBERS, NUM_FLUSHES = 2**27, 8
COPY_BYTES = 2**30
NUM_WARM_UPS, NUM_REPEATS = 3, 15


class Timer:
    """Times calls on one device.

    Arguments:
        device: a CUDA device; on any other one, times are those of a wall clock and mean little.
        num_repeats, num_warm_ups: calls of which the median is taken, and calls before them.
    """

    def __init__(self, device: torch.device, num_repeats: int = NUM_REPEATS, num_warm_ups: int = NUM_WARM_UPS):
        self.device, self.num_repeats, self.num_warm_ups = device, num_repeats, num_warm_ups
        self._on_gpu = device.type == "cuda"
        self._flushing = torch.zeros(FLUSH_NUMBERS if self._on_gpu else 1, device=device)

    def gpu_s(self, call: Callable[[], object]) -> float:
        """Seconds that the GPU spends on a call which waits for nothing: its launches, and nothing of the CPU's.

        Before each call a large memory is read: that empties the cache and leaves nothing in it to be written back, and
        it keeps the GPU busy for so long that all of the call is queued when the GPU comes to it.
        """
        if not self._on_gpu:
            return self.call_s(call)
        times_s = []
        for number in range(self.num_warm_ups + self.num_repeats):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in "ab")
            for _ in range(NUM_FLUSHES):
                self._flushing.sum()
            start.record()
            call()
            stop.record()
            torch.cuda.synchronize(self.device)
            if number >= self.num_warm_ups:
                times_s.append(start.elapsed_time(stop) / 1000)
        return statistics.median(times_s)

    def call_s(self, call: Callable[[], object], num_repeats: int | None = None) -> float:
        """Seconds until a caller has the result: what the CPU spends on launching, and the wait for the GPU."""
        times_s = []
        for number in range(self.num_warm_ups + (num_repeats or self.num_repeats)):
            began_s = time.perf_counter()
            call()
            self._wait()
            if number >= self.num_warm_ups:
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
