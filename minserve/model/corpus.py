"""The text that the shipped model learns from: what every Python already has on its disk.

The standard library's sources, and the language reference inside `pydoc_data.topics`. Which files are held out is
decided by a hash of their name, so it does not depend on the machine; held-out text that repeats trained text is cut.
"""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from minserve.model.tokenizer_files import END_OF_TEXT

HELD_OUT_SHARE = 25  # one document in 25
MIN_REPEAT_CHARS = 40  # a shorter block of a held-out file may repeat trained text: "else:" is no leak


@dataclass(frozen=True)
class Corpus:
    """Documents as token arrays: `library` and `tests` to train on, `held_out` to measure on (name -> text)."""

    library: np.ndarray
    tests: np.ndarray
    held_out: dict[str, str]


def is_held_out(name: str) -> bool:
    """Whether a document of this name is kept from training.

    >>> sum(is_held_out(f"module_{i}.py") for i in range(1000)) in range(20, 60)
    True
    """
    return hashlib.sha256(name.encode()).digest()[0] % HELD_OUT_SHARE == 0


def library_documents() -> dict[str, str]:
    """Every document of the running Python, by name: its modules, tests included, and the language reference."""
    root = Path(sysconfig.get_path("stdlib"))
    documents = {}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if name.startswith(("site-packages/", "dist-packages/", "pydoc_data/")):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue  # a few test files hold broken text on purpose
        if text.strip() and "decoding_table = (" not in text:  # the code pages are tables of characters, not text
            documents[name] = text
    from pydoc_data.topics import topics

    documents |= {f"topics/{key}.rst": text for key, text in sorted(topics.items())}
    return documents


def is_test(name: str) -> bool:
    """Whether a document belongs to the library's own tests, which differ in style and are trained on less."""
    return any(part in ("test", "tests", "idle_test") for part in name.split("/"))


def blocks(text: str) -> list[str]:
    """The parts of a text between blank lines."""
    return text.split("\n\n")


def load_corpus() -> Corpus:
    """Read, split and clean the corpus of the running Python; takes a few seconds."""
    documents = library_documents()
    trained = {name: text for name, text in documents.items() if not is_held_out(name)}
    seen = {block.strip() for text in trained.values() for block in blocks(text) if len(block) >= MIN_REPEAT_CHARS}
    held_out = {}
    for name, text in documents.items():
        if is_held_out(name) and not is_test(name):
            kept = [block for block in blocks(text) if block.strip() not in seen]
            held_out[name] = "\n\n".join(kept)
    held_out = {name: text for name, text in held_out.items() if len(text) >= 256}
    return Corpus(
        library=_tokens([text for name, text in trained.items() if not is_test(name)]),
        tests=_tokens([text for name, text in trained.items() if is_test(name)]),
        held_out=held_out,
    )


def _tokens(texts: list[str]) -> np.ndarray:
    """Join documents into one array of bytes, an end token after each."""
    parts = []
    for text in tqdm(texts, desc="corpus", leave=False):
        parts += [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint16), np.array([END_OF_TEXT], np.uint16)]
    return np.concatenate(parts) if parts else np.zeros(0, np.uint16)
