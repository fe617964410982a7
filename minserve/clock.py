"""Time as something that is passed in: a real clock to serve by, a virtual one to simulate by.

The engine, the log and the load generator ask their clock and nothing else. So the same batcher and the same cache run
in the simulator, where a thousand seconds of load take one, and where two runs give the same times to the last bit.
"""

from __future__ import annotations

import math
import time
from typing import Protocol

from minserve.errors import InvalidValue


class Clock(Protocol):
    """What everything that needs the time is given."""

    def now(self) -> float:
        """The time in seconds since this clock's zero; it never goes back."""
        ...


class RealClock:
    """Seconds of wall time since this clock was made, from the machine's monotonic counter."""

    def __init__(self) -> None:
        self._zero_s = time.perf_counter()

    def now(self) -> float:
        """The seconds since this clock was made, >= 0."""
        return time.perf_counter() - self._zero_s


class VirtualClock:
    """A clock that moves only when it is told to, so that a simulated step costs what the cost model says.

    Arguments:
        start_s: what it shows at first, in seconds, finite.

    >>> clock = VirtualClock()
    >>> clock.advance(0.25)
    0.25
    >>> clock.advance_to(2)
    2.0
    >>> clock.advance_to(1)
    Traceback (most recent call last):
    minserve.errors.InvalidValue: time_s is 1; it must be a finite time at or after 2.0 s
    """

    def __init__(self, start_s: float = 0.0) -> None:
        if not math.isfinite(start_s):
            raise InvalidValue("start_s", start_s, "a finite time in seconds")
        self._now_s = float(start_s)

    def now(self) -> float:
        """The time in seconds that the clock was last moved to."""
        return self._now_s

    def advance(self, duration_s: float) -> float:
        """Move on by a duration in seconds, finite and >= 0, and return the new time. Changes: this clock."""
        if not (math.isfinite(duration_s) and duration_s >= 0):
            raise InvalidValue("duration_s", duration_s, "a finite number of seconds >= 0")
        self._now_s += duration_s
        return self._now_s

    def advance_to(self, time_s: float) -> float:
        """Move on to a time in seconds, not before now, and return it. Changes: this clock."""
        if not (math.isfinite(time_s) and time_s >= self._now_s):
            raise InvalidValue("time_s", time_s, f"a finite time at or after {self._now_s} s")
        self._now_s = float(time_s)
        return self._now_s
