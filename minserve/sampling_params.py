"""How one request's tokens are chosen and where they end; every bad value is named here, before a step sees it.

A value that only fails where it is used ends a whole batch, or the server: so everything that can be known from the
request alone is checked on construction, and what depends on the model by `check_vocab`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real

from minserve.errors import InvalidValue

MAX_STOP_STRINGS = 32
MAX_OUTPUTS = 128  # of one prompt
MAX_TOKEN_RULES = 1024  # entries of logit_bias, and of stop_token_ids
NUM_SEEDS = 2**64

# field, lowest, highest, may be None (which means off)
_INT_FIELDS = (
    ("max_tokens", 0, None, False),
    ("top_k", 0, None, False),
    ("n", 1, MAX_OUTPUTS, False),
    ("seed", 0, NUM_SEEDS - 1, True),
    ("logprobs", 0, None, True),
    ("prompt_logprobs", 0, None, True),
    ("priority", None, None, False),
)
# field, lowest, highest; the repetition and bias bounds keep every logit finite in float32
_REAL_FIELDS = (
    ("temperature", 0.0, None),
    ("min_p", 0.0, 1.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("repetition_penalty", 0.01, 100.0),
)
_BIAS_LIMIT = 1e6


def _limit(kind: str, low: float | None, high: float | None, off: bool = False) -> str:
    """The accepted range in words."""
    words = {(False, False): "", (True, False): f" >= {low}", (True, True): f" from {low} to {high}"}
    return f"{kind}{words[low is not None, high is not None]}" + (", or None" if off else "")


def _int(name: str, value: object, low: int | None = None, high: int | None = None, off: bool = False) -> int:
    """`value` as an int inside the range; a bool is no int."""
    good = isinstance(value, Integral) and not isinstance(value, bool)
    if not good or (low is not None and value < low) or (high is not None and value > high):
        raise InvalidValue(name, value, _limit("an int", low, high, off))
    return int(value)


def _real(name: str, value: object, low: float | None = None, high: float | None = None) -> float:
    """`value` as a finite float inside the range; a bool is no number."""
    try:
        number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    except OverflowError:  # an int that no float reaches
        number = math.inf
    if not math.isfinite(number) or (low is not None and number < low) or (high is not None and number > high):
        raise InvalidValue(name, value, _limit("a finite number", low, high))
    return number


def as_ids(name: str, values: object, end: int | None = None) -> tuple[int, ...]:
    """`values` (a list, tuple, array or one-dimensional tensor) as token ids, below `end` where that is known."""
    values = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(values, (str, bytes)) or not isinstance(values, Sequence):
        raise InvalidValue(name, values, "a list of token ids")
    if all(type(value) is int and value >= 0 for value in values) and (end is None or max(values, default=0) < end):
        return tuple(values)  # a long prompt passes here; the slow way below names the first bad id
    return tuple(_int(f"{name}[{i}]", v, 0, None if end is None else end - 1) for i, v in enumerate(values))


@dataclass(frozen=True)
class SamplingParams:
    """How one request's tokens are chosen and where they end.

    Every value is checked here; what depends on the model is checked by `check_vocab`.

    Arguments:
        max_tokens: output tokens at most. 0 is allowed together with prompt_logprobs only: the prompt is scored
            and nothing is generated.
        temperature: divides the logits; 0 (and anything below 1e-5) takes the likeliest token.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: then keep the likeliest ones until their share reaches this, in (0, 1].
        min_p: then keep those at least this fraction as likely as the likeliest, in [0, 1].
        seed: draws depend on it and on the token's position alone, 0 to 2**64 - 1; None lets the engine draw one.
            Output i of `n` is drawn as a request with seed + i.
        stop: a string or strings that end the output, and are not part of its text; at most 32.
        stop_token_ids: ids that end the output, besides the model's end tokens; kept in token_ids, not in text.
        n: outputs wanted for the one prompt, 1 to 128.
        logprobs: report the chosen token and this many likeliest, per output token; None reports nothing.
        prompt_logprobs: the same for the prompt.
        logit_bias: {token id: number added to its logit, -1e6 to 1e6}; at most 1024 entries.
        presence_penalty: taken off the logit of every token already in the output, -2 to 2.
        frequency_penalty: taken off once per time it is there, -2 to 2.
        repetition_penalty: divides the positive and multiplies the negative logits of tokens in the prompt or the
            output, 0.01 to 100; 1 is off.
        ignore_eos: do not end at the model's end tokens.
        priority: under the priority policy, higher runs first.
        cache_salt: only requests with the same salt share cached prefixes; None is a salt of its own.
    Errors: InvalidValue (a ValueError) naming field, value and range.

    >>> SamplingParams(stop="\\n\\n").stop
    ('\\n\\n',)
    >>> SamplingParams(top_p=0)
    Traceback (most recent call last):
    minserve.errors.InvalidValue: top_p is 0.0; it must be a finite number above 0, at most 1
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    ignore_eos: bool = False
    priority: int = 0
    cache_salt: str | None = None

    def __post_init__(self):
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        for name, low, high, off in _INT_FIELDS:
            value = getattr(self, name)
            if not (off and value is None):
                put(name, _int(name, value, low, high, off))
        for name, low, high in _REAL_FIELDS:
            put(name, _real(name, getattr(self, name), low, high))
        put("top_p", _real("top_p", self.top_p))
        if not 0 < self.top_p <= 1:
            raise InvalidValue("top_p", self.top_p, "a finite number above 0, at most 1")
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise InvalidValue("max_tokens", 0, "an int >= 1 (0 only with prompt_logprobs)")
        if not isinstance(self.ignore_eos, bool):
            raise InvalidValue("ignore_eos", self.ignore_eos, "True or False")
        if self.cache_salt is not None and not (isinstance(self.cache_salt, str) and self.cache_salt):
            raise InvalidValue("cache_salt", self.cache_salt, "a non-empty string, or None")
        put("stop", _stop_strings(self.stop))
        put("stop_token_ids", _at_most("stop_token_ids", as_ids("stop_token_ids", self.stop_token_ids)))
        put("logit_bias", _biases(self.logit_bias))

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken: dividing by so small a temperature leaves it alone anyway."""
        return self.temperature < 1e-5

    @property
    def changes_logits(self) -> bool:
        """Whether `sampling.apply_penalties` would do anything."""
        penalties = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1
        return bool(penalties or self.logit_bias)

    def check_vocab(self, vocab_size: int) -> None:
        """Check what depends on the model: every id below `vocab_size`, at most that many logprobs.

        >>> SamplingParams(stop_token_ids=[264]).check_vocab(264)
        Traceback (most recent call last):
        minserve.errors.InvalidValue: stop_token_ids[0] is 264; it must be an int from 0 to 263
        """
        as_ids("stop_token_ids", self.stop_token_ids, vocab_size)
        for token in self.logit_bias:
            _int("logit_bias id", token, 0, vocab_size - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _int(name, getattr(self, name), 0, vocab_size, off=True)


def _stop_strings(stop: object) -> tuple[str, ...]:
    """The stop strings as a tuple, each a non-empty string."""
    if not isinstance(stop, (str, list, tuple)):
        raise InvalidValue("stop", stop, "a string or a list of strings")
    strings = (stop,) if isinstance(stop, str) else tuple(stop)
    if len(strings) > MAX_STOP_STRINGS:
        raise InvalidValue("stop", f"{len(strings)} strings", f"at most {MAX_STOP_STRINGS} strings")
    for i, string in enumerate(strings):
        if not isinstance(string, str) or not string:
            raise InvalidValue(f"stop[{i}]", string, "a non-empty string")
    return strings


def _biases(bias: object) -> dict[int, float]:
    """The biases as a copy with plain keys and values, which the caller can no longer change."""
    if not isinstance(bias, Mapping):
        raise InvalidValue("logit_bias", bias, "a dict of {token id: number}")
    _at_most("logit_bias", bias)
    return {
        _int("logit_bias id", token, 0): _real(f"logit_bias[{token}]", value, -_BIAS_LIMIT, _BIAS_LIMIT)
        for token, value in bias.items()
    }


def _at_most(name: str, values):
    """`values`, if they are few enough: they are looked up for every token."""
    if len(values) > MAX_TOKEN_RULES:
        raise InvalidValue(name, f"{len(values)} entries", f"at most {MAX_TOKEN_RULES} entries")
    return values
