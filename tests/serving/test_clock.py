"""The two clocks: real time rises by itself, virtual time only when it is told to."""

import math

import pytest

from minserve.clock import RealClock, VirtualClock
from minserve.errors import InvalidValue


def test_real_clock_starts_at_zero_and_never_goes_back():
    clock = RealClock()
    times = [clock.now() for _ in range(1000)]
    assert times == sorted(times)
    assert times[0] >= 0 and RealClock().now() < clock.now()


def test_virtual_clock_moves_only_when_told():
    clock = VirtualClock(1.5)
    assert clock.now() == clock.now() == 1.5
    assert clock.advance(0.25) == clock.now() == 1.75
    assert clock.advance(0) == 1.75
    assert clock.advance_to(4) == clock.now() == 4.0
    assert clock.advance_to(4.0) == 4.0


@pytest.mark.parametrize("bad", [-0.001, math.nan, math.inf])
def test_virtual_clock_refuses_to_go_back_or_nowhere(bad):
    clock = VirtualClock(2.0)
    with pytest.raises(InvalidValue, match="duration_s"):
        clock.advance(bad)
    with pytest.raises(InvalidValue, match="time_s"):
        clock.advance_to(bad)
    assert clock.now() == 2.0
    if not math.isfinite(bad):
        with pytest.raises(InvalidValue, match="start_s"):
            VirtualClock(bad)
