"""The named errors: each says the field, the value, the limit and, where there is one, the knob to turn."""

from __future__ import annotations


class MinserveError(Exception):
    """The root of every error that minserve raises on purpose."""


class InvalidValue(MinserveError, ValueError):
    """A value that cannot be served.

    Arguments:
        field: the argument, config field or request field at fault.
        value: what was given.
        limit: what would have been accepted, in words.
        knob: what to change if the limit is the problem, or None.

    >>> raise InvalidValue("temperature", -1, "a finite number >= 0")
    Traceback (most recent call last):
    minserve.errors.InvalidValue: temperature is -1; it must be a finite number >= 0
    """

    def __init__(self, field: str, value: object, limit: str, knob: str | None = None):
        shown = repr(value)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        super().__init__(f"{field} is {shown}; it must be {limit}" + (f" (change it with {knob})" if knob else ""))
        self.field, self.value, self.limit, self.knob = field, value, limit, knob


class PromptTooLong(InvalidValue):
    """A prompt that does not fit the context."""


class CheckpointError(MinserveError):
    """A checkpoint that cannot be read: the message names the file, and the tensor or field at fault."""


class MissingRequirement(MinserveError, ImportError):
    """Something optional that this machine lacks.

    Arguments:
        what: the missing package or device.
        needed_for: what asked for it.
        install: the command or the change that supplies it.
    """

    def __init__(self, what: str, needed_for: str, install: str):
        super().__init__(f"{needed_for} needs {what}, which is not here; {install}")
        self.what, self.needed_for, self.install = what, needed_for, install
