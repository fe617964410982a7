"""How long a counted step takes on a machine: a roofline with an overhead, for machines that no reader owns.

    step time = overhead + max(bytes / (bandwidth x efficiency), FLOPs / rate)

Williams, Waterman, Patterson, "Roofline" (2009) for the larger of the two; the overhead (launching kernels, waiting for
neighbours) is added, because nothing hides it. Whichever term is largest names the regime. The ridge point is the
number of FLOPs per byte at which the two times are equal at the machine's peaks.

The result is a bound: every byte moves once, at a steady share of the peak, and arithmetic at its dense peak. Several
devices act as one with their sum; what they say to each other costs nothing here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.resources import files

from minserve.errors import InvalidValue
from minserve.model.counting import StepCount


@dataclass(frozen=True)
class Machine:
    """One device, or several acting as one.

    Arguments:
        name: what to call it.
        memory_bytes: bytes of its memory.
        bandwidth_bytes_per_s: peak between memory and processor.
        flops_per_s: dense peak by number format ("bfloat16", "fp8", "fp4").
        overhead_s: seconds that each step takes besides, >= 0.
        efficiency: share of the bandwidth's peak that is reached, in (0, 1].
        link_bytes_per_s: between devices, one direction; None where there is none.
        num_devices: how many devices the figures above add up.
    """

    name: str
    memory_bytes: float
    bandwidth_bytes_per_s: float
    flops_per_s: Mapping[str, float]
    overhead_s: float = 0.0
    efficiency: float = 0.8
    link_bytes_per_s: float | None = None
    num_devices: int = 1

    def __post_init__(self):
        for field in ("memory_bytes", "bandwidth_bytes_per_s", "num_devices"):
            _require(field, getattr(self, field), getattr(self, field) > 0, "above 0")
        _require("efficiency", self.efficiency, 0 < self.efficiency <= 1, "in (0, 1]")
        _require("overhead_s", self.overhead_s, self.overhead_s >= 0, "at least 0 seconds")
        _require("flops_per_s", dict(self.flops_per_s), all(v > 0 for v in self.flops_per_s.values()), "above 0 each")
        object.__setattr__(self, "flops_per_s", dict(self.flops_per_s))

    def rate(self, number_format: str) -> float:
        """Peak FLOPs per second in a number format.

        Raises:
            InvalidValue: the machine has no such rate; the message lists what it has.
        """
        formats = tuple(self.flops_per_s)
        _require("number_format", number_format, number_format in formats, f"one of {formats} on {self.name}")
        return self.flops_per_s[number_format]

    def ridge(self, number_format: str = "bfloat16") -> float:
        """FLOPs per byte, at the peaks, above which arithmetic takes longer than hauling bytes.

        >>> round(machine("h200").ridge("fp8"))
        412
        """
        return self.rate(number_format) / self.bandwidth_bytes_per_s

    def times(self, num_devices: int) -> Machine:
        """Several of these as one: memory, bandwidth and rates add up, the overhead of a step stays.

        >>> machine("b300").times(16).memory_bytes / 1e12
        4.608
        """
        _require("num_devices", num_devices, num_devices >= 1, "at least 1")
        return replace(
            self,
            name=f"{num_devices} x {self.name}",
            memory_bytes=self.memory_bytes * num_devices,
            bandwidth_bytes_per_s=self.bandwidth_bytes_per_s * num_devices,
            flops_per_s={name: rate * num_devices for name, rate in self.flops_per_s.items()},
            num_devices=self.num_devices * num_devices,
        )


@dataclass(frozen=True)
class StepTime:
    """How long a step takes, in seconds: what it would take for bytes alone, for arithmetic alone, and overhead."""

    overhead_s: float
    bytes_s: float
    arithmetic_s: float

    @property
    def total_s(self) -> float:
        """The overhead and the larger of the other two."""
        return self.overhead_s + max(self.bytes_s, self.arithmetic_s)

    @property
    def regime(self) -> str:
        """The largest of the three: "overhead", "bytes" or "arithmetic"."""
        times = {"bytes": self.bytes_s, "arithmetic": self.arithmetic_s, "overhead": self.overhead_s}
        return max(times, key=times.get)


def step_time(
    count: StepCount, machine: Machine, number_format: str = "bfloat16", expert_format: str | None = None
) -> StepTime:
    """How long a counted step takes on a machine.

    Arguments:
        count: from `minserve.model.counting.count_step`.
        number_format: the format that the arithmetic runs in, a key of `machine.flops_per_s`.
        expert_format: the same for the routed experts; `number_format` unless given.

    Raises:
        InvalidValue: the machine has no rate for a format.

    >>> from minserve.model.counting import FP8_EXPERTS, count_step
    >>> from minserve.model.model_figures import named_config
    >>> step = count_step(named_config("qwen3.8-2.4t-a95b"), [(8191, 8192)], weight_bytes=FP8_EXPERTS)
    >>> time = step_time(step, machine("b300").times(16), expert_format="fp8")
    >>> f"{1e3 * time.total_s:.1f} ms, bound by {time.regime}"
    '1.4 ms, bound by bytes'
    """
    expert_flops = count.flops.experts
    arithmetic_s = (count.flops.total - expert_flops) / machine.rate(number_format)
    arithmetic_s += expert_flops / machine.rate(expert_format or number_format)
    bytes_s = count.bytes.total / (machine.bandwidth_bytes_per_s * machine.efficiency)
    return StepTime(machine.overhead_s, bytes_s, arithmetic_s)


def machine(name: str, overhead_s: float = 0.0, efficiency: float = 0.8) -> Machine:
    """One GPU from the dated hardware table; `.times(n)` makes several of it.

    Raises:
        InvalidValue: no such name; the message lists the known ones.

    >>> machine("h100").bandwidth_bytes_per_s / 1e12
    3.35
    """
    table = _hardware()["machines"]
    _require("name", name, name in table, "one of " + ", ".join(table))
    row = {key: value for key, value in table[name].items() if key != "note"}
    return Machine(name=name, overhead_s=overhead_s, efficiency=efficiency, **row)


def machine_names() -> tuple[str, ...]:
    """The names that `machine` knows."""
    return tuple(_hardware()["machines"])


def link_bytes_per_s(name: str) -> float:
    """Bytes per second, in one direction, of a link between machines or to the host.

    Raises:
        InvalidValue: no such name; the message lists the known ones.

    >>> link_bytes_per_s("infiniband-400") / 1e9
    50.0
    """
    table = _hardware()["links_bytes_per_s"]
    _require("name", name, name in table, "one of " + ", ".join(table))
    return table[name]


def hardware_source() -> str:
    """Where the hardware figures were read, and when."""
    content = _hardware()
    return f"{content['source']}, read on {content['read_on']}"


def nodes_needed(tokens_per_day: float, tokens_per_s_per_node: float) -> float:
    """Machines that a day's tokens keep busy, if they arrive evenly.

    >>> round(nodes_needed(608e9, 73.7e3), 1)
    95.5
    """
    return tokens_per_day / 86_400 / tokens_per_s_per_node


def _hardware() -> dict:
    """The dated table of machines and links."""
    return json.loads((files("minserve") / "data" / "hardware.json").read_text(encoding="utf-8"))


def _require(field: str, value: object, fine: bool, limit: str) -> None:
    """Raise InvalidValue unless `fine`."""
    if not fine:
        raise InvalidValue(field, value, limit)
