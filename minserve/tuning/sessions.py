"""Chats: conversations whose every turn sends all turns before it, so that prompts share long prefixes.

    turn 0   system | user 0                                     <- the system prompt is shared by all sessions
    turn 1   system | user 0 | assistant 0 | user 1              <- turn 0 is shared within the session
    turn 2   system | user 0 | assistant 0 | user 1 | assistant 1 | user 2

The load is open loop: it is drawn before anything runs, so what the assistant "said" is a piece of text as long as the
output that the turn wants, not what the model will say.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from minserve.errors import InvalidValue
from minserve.model.tokenizer import Tokenizer, chat_prompt
from minserve.tuning.workload import Arrival, Workload, lognormal_lengths, poisson_times

_REPLY = '''\
def area(width, height):
    """Return the area of a rectangle."""
    return width * height


def border(width, height):
    """Return the length of its border."""
    return 2 * (width + height)'''

DEFAULT_SYSTEM = "You are a careful Python programmer. Answer with code, and say what it does in one line."


@dataclass(frozen=True)
class ChatShape:
    """What chats look like.

    Arguments:
        system: the system prompt, the same for all sessions.
        mean_turns: turns per session, drawn geometrically, at least 1.
        think_s: mean time from one turn to the next, drawn exponentially.
        user_chars, reply_chars: (median, 95th percentile) of what is typed and what is answered.
        max_prompt_tokens: a session ends before its prompt would exceed this.
    """

    system: str = DEFAULT_SYSTEM
    mean_turns: float = 3.0
    think_s: float = 20.0
    user_chars: tuple[float, float] = (80, 400)
    reply_chars: tuple[float, float] = (120, 500)
    max_prompt_tokens: int = 4096

    def __post_init__(self):
        for field in ("mean_turns", "max_prompt_tokens"):
            if not getattr(self, field) >= 1:
                raise InvalidValue(field, getattr(self, field), "at least 1")
        if not self.think_s > 0:
            raise InvalidValue("think_s", self.think_s, "above 0 seconds")


def book_session() -> tuple[dict[str, str], ...]:
    """The conversation that runs through the book: something is said early, much follows, and then it is asked for.

    What the assistant said is fixed, so that every turn's prompt is the same whatever a model answers.

    >>> session = book_session()
    >>> session[1]["content"], session[-1]["content"]
    ('port = 8127', 'port = ?')
    """
    turns = (
        ("system", "You are a careful assistant. You remember what the user tells you."),
        ("user", "port = 8127"),
        ("assistant", "ok, port = 8127"),
        ("user", "Show me some code."),
        ("assistant", _REPLY),
        ("user", "port = ?"),
    )
    return tuple({"role": role, "content": content} for role, content in turns)


def chat_sessions(
    num_sessions: int,
    session_rate: float,
    text: str,
    rng: np.random.Generator,
    shape: ChatShape | None = None,
    tokenizer: Tokenizer | None = None,
) -> Workload:
    """Chats as a workload: sessions begin as a Poisson process, turns follow at thinking pace.

    Arguments:
        session_rate: sessions that begin per second.
        text: what users and assistant say is cut from it; not empty.
        tokenizer: one with the chat marks; the byte tokenizer unless given.

    >>> from minserve.tuning.workload import standard_library_text
    >>> chats = chat_sessions(3, 1.0, standard_library_text(), np.random.default_rng(0))
    >>> turns = [arrival.prompt for arrival in chats if arrival.session == 0]
    >>> all(later[: len(earlier)] == earlier for earlier, later in zip(turns, turns[1:]))
    True
    """
    if not text:
        raise InvalidValue("text", text, "not empty")
    shape = shape or ChatShape()
    arrivals = []
    for session, begins_s in enumerate(poisson_times(num_sessions, session_rate, rng)):
        arrivals += _session(session, float(begins_s), text, rng, shape, tokenizer)
    arrivals.sort(key=lambda arrival: arrival.time_s)
    return Workload("chats", tuple(arrivals))


def _session(session: int, time_s: float, text: str, rng, shape: ChatShape, tokenizer) -> list[Arrival]:
    """The turns of one session."""
    messages = [{"role": "system", "content": shape.system}]
    turns: list[Arrival] = []
    for turn in range(rng.geometric(1 / shape.mean_turns)):
        asked, answered = (int(lognormal_lengths(1, *size, rng)[0]) for size in (shape.user_chars, shape.reply_chars))
        messages.append({"role": "user", "content": _piece(text, asked, rng)})
        prompt = tuple(chat_prompt(messages, tokenizer))
        if len(prompt) > shape.max_prompt_tokens:
            break
        turns.append(Arrival(time_s, len(prompt), answered, prompt, session, turn))
        messages.append({"role": "assistant", "content": _piece(text, answered, rng)})
        time_s += float(rng.exponential(shape.think_s))
    return turns


def _piece(text: str, num_chars: int, rng: np.random.Generator) -> str:
    """A piece of text from a random place, shorter if the text is."""
    start = int(rng.integers(max(1, len(text) - num_chars + 1)))
    return text[start : start + num_chars]
