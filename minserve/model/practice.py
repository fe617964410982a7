"""Made-up documents that teach a small model to copy and to recall.

Library sources alone do not make a model of this size look far back. These documents do: a value is named early and
asked for much later, in code and in a chat; a passage is pasted twice; a table is read back. What lies between is real
text. The questions of the book (`port = 8127 ... port =`) are of this form, with names and values drawn anew each time.
"""

from __future__ import annotations

import numpy as np

from minserve.model.tokenizer_files import END_OF_TEXT, IM_END, IM_START

NAMES = (
    "port", "host", "user", "timeout", "retries", "color", "city", "limit", "width", "height", "level", "name",
    "mode", "count", "size", "rate", "depth", "token", "path", "day", "month", "year", "room", "seat", "code",
    "speed", "price", "weight", "phone", "team", "owner", "region", "zone", "batch", "seed", "delay", "cache",
    "queue", "page",
)  # fmt: skip
SYSTEM_PROMPTS = (
    "You are a helpful assistant. Answer from the notes.",
    "You are a careful assistant. You remember what the user tells you.",
    "You write short Python code and remember the settings.",
)


class Practice:
    """Draws practice documents as lists of token ids, with filler taken from `corpus` (an array of tokens)."""

    def __init__(self, corpus: np.ndarray, rng: np.random.Generator):
        self.corpus, self.rng = corpus, rng
        self.makers = (
            self.settings,
            self.settings,
            self.chat,
            self.chat,
            self.chat,
            self.pasted,
            self.table,
            self.echo,
        )

    def row(self, num_tokens: int) -> list[int]:
        """A row of exactly `num_tokens` tokens of practice documents, the last one cut."""
        row: list[int] = []
        while len(row) < num_tokens:
            make = self.makers[self.rng.integers(len(self.makers))]
            row += make(int(self.rng.integers(40, max(41, num_tokens - len(row))))) + [END_OF_TEXT]
        return row[:num_tokens]

    def settings(self, reach: int) -> list[int]:
        """Names get values, real text follows, and the names come again with the same values."""
        facts = self.facts()
        lines = "".join(f"{name} = {value}\n" for name, value in facts)
        asked = "".join(f"{name} = {value}\n" for name, value in self.shuffled(facts))
        return ids(lines) + self.filler(reach) + ids("\n" + asked)

    def chat(self, reach: int) -> list[int]:
        """A chat: the user states facts, talks about code, and asks for the facts."""
        rng, facts = self.rng, self.facts()
        turns = [("system", ids(self.pick(SYSTEM_PROMPTS)))]
        for name, value in facts:
            turns += [
                ("user", ids(self.pick((f"{name} = {value}", f"The {name} is {value}.", f"Note: {name} = {value}"))))
            ]
            turns += [("assistant", ids(self.pick(("ok", "Noted.", f"ok, {name} = {value}"))))]
        while reach > 40:
            wanted = int(min(reach, rng.integers(30, 400)))
            turns += [
                ("user", ids(self.pick(("Show me some code.", "Go on.", "Write a function.", "What comes next?"))))
            ]
            turns += [("assistant", self.filler(wanted))]
            reach -= wanted + 60
        for name, value in self.shuffled(facts):
            turns += [("user", ids(self.pick((f"{name} = ?", f"What is the {name}?", f"What was the {name} again?"))))]
            turns += [("assistant", ids(f"{name} = {value}"))]
        return [token for role, content in turns for token in turn(role, content)]

    def pasted(self, reach: int) -> list[int]:
        """A passage, other text, and the passage again."""
        span = self.filler(int(self.rng.integers(40, 300)))
        return span + ids("\n\n") + self.filler(reach // 2) + ids("\n\n") + span

    def table(self, reach: int) -> list[int]:
        """A table of words and numbers, read back by key in another order."""
        rows = [(self.word(), self.value()) for _ in range(int(self.rng.integers(3, 12)))]
        form = self.pick(("| {} | {} |\n", "{}: {}\n", "{},{}\n", "- {} -> {}\n", '    "{}": {},\n'))
        first = "".join(form.format(*row) for row in rows)
        again = "".join(form.format(*row) for row in self.shuffled(rows))
        return ids(first) + self.filler(reach // 4) + ids("\n" + again)

    def echo(self, reach: int) -> list[int]:
        """A random string repeated a few times, on lines of their own: nothing but copying predicts it."""
        line = " ".join(
            self.value() if self.rng.random() < 0.5 else self.word() for _ in range(self.rng.integers(2, 9))
        )
        return ids((line + "\n") * int(self.rng.integers(2, 5)))

    def facts(self) -> list[tuple[str, str]]:
        """One to five names with values, no name twice."""
        names = dict.fromkeys(
            self.pick(NAMES) if self.rng.random() < 0.7 else self.word() for _ in range(self.rng.integers(1, 6))
        )
        return [(name, self.value() if self.rng.random() < 0.7 else self.word()) for name in names]

    def filler(self, num_tokens: int) -> list[int]:
        """Real text of this many tokens, from anywhere in the corpus."""
        start = int(self.rng.integers(len(self.corpus) - num_tokens))
        return [token if token < 256 else 10 for token in self.corpus[start : start + num_tokens].tolist()]

    def word(self) -> str:
        """A made-up word of consonants and vowels."""
        pairs = self.rng.integers(0, 5, size=(int(self.rng.integers(2, 5)), 2))
        return "".join("bdfklmnprstvz"[int(self.rng.integers(13))] + "aeiou"[int(b)] for _, b in pairs)

    def value(self) -> str:
        """A number of one to five digits."""
        return str(int(self.rng.integers(10 ** int(self.rng.integers(1, 6)))))

    def pick(self, options: tuple[str, ...]) -> str:
        """One of the options."""
        return options[int(self.rng.integers(len(options)))]

    def shuffled(self, items: list) -> list:
        """The items in another order."""
        return [items[i] for i in self.rng.permutation(len(items))]


def ids(text: str) -> list[int]:
    """The bytes of a text."""
    return list(text.encode())


def turn(role: str, content: list[int]) -> list[int]:
    """One turn of a chat, in the format of the family."""
    return [IM_START, *ids(role + "\n"), *content, IM_END, 10]
