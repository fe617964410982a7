"""What public APIs charge, from a dated table: prices change, so they are data and never prose."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True)
class Price:
    """One price list, in US dollars per million tokens.

    `cached` is charged for input tokens found in the provider's cache, `input` for the others; `as_of` is the month.
    """

    api: str
    as_of: str
    input: float
    cached: float
    output: float
    note: str | None = None
    source: str | None = None

    @property
    def cached_share(self) -> float:
        """What a cached input token costs, as a share of an uncached one."""
        return self.cached / self.input

    def dollars(self, input_tokens: int, cached_tokens: int, output_tokens: int) -> float:
        """The price of a request, `cached_tokens` being the part of `input_tokens` that hit.

        >>> round(prices()[0].dollars(1_000_000, 500_000, 0), 3)
        1.125
        """
        uncached = input_tokens - cached_tokens
        return (uncached * self.input + cached_tokens * self.cached + output_tokens * self.output) / 1e6


def prices() -> tuple[Price, ...]:
    """The price lists of the data file, newest first.

    >>> [(price.api, f"{price.cached_share:.1%}") for price in prices()]
    [('qwen3.8-max', '12.5%'), ('deepseek-flash', '2.0%'), ('deepseek-v4-pro', '3.3%'), ('deepseek-r1', '25.5%')]
    """
    content = json.loads((files("minserve") / "data" / "prices.json").read_text(encoding="utf-8"))
    return tuple(Price(**row) for row in content["prices"])
