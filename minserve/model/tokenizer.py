"""Text to token ids and back: bytes for the shipped model, tokenizer.json for real ones.

Both tokenizers here are byte-level: every token stands for a string of bytes, and text is the UTF-8
reading of the joined bytes. So a token may end in the middle of a character, and decoding token by
token would print replacement marks. `incremental()` holds an unfinished character back until its last
byte arrives; its pieces joined are exactly what decoding the whole list at once gives.

Special tokens (`<|im_end|>`) mark turns and ends. Text of a user that happens to contain their spelling
must not become them, so `encode` reads them as plain text unless it is told otherwise.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from minserve.errors import CheckpointError, InvalidValue, MissingRequirement
from minserve.model.checkpoint_files import read_json
from minserve.model.tokenizer_files import BYTE_VOCAB_SIZE, SPECIAL_TOKENS, byte_to_char, is_byte_vocabulary

CHAT_ROLES = ("system", "user", "assistant")


class IncrementalDecoder:
    """Turns token ids into text as they arrive, never half a character.

    >>> decoder = ByteTokenizer().incremental()
    >>> [decoder.push(byte) for byte in "né".encode()], decoder.finish()
    (['n', '', 'é'], '')
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True):
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The text that this token completes: possibly none, possibly with replacement marks for invalid bytes."""
        return self._utf8.decode(self._tokenizer.token_bytes(token_id, self._skip_special))

    def finish(self) -> str:
        """What is left of an unfinished character, as replacement marks; empty when asked again."""
        rest = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return rest


class Tokenizer:
    """What the two tokenizers share: special tokens, decoding, and the chat format.

    Attributes:
        special_ids: {spelling: id} of the special tokens.
        vocab_size: number of ids, special ones included.
    """

    special_ids: Mapping[str, int]
    vocab_size: int

    def encode(self, text: str, allow_special: bool = False) -> list[int]:
        """The token ids of `text`.

        Arguments:
            text: any text that UTF-8 can write (no lone surrogates).
            allow_special: read spellings of special tokens as those tokens. Leave it False for text from outside.
        """
        if not isinstance(text, str):
            raise InvalidValue("text", text, "a str")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidValue("text", text, "text without lone surrogates") from error
        if not (allow_special and self.special_ids):
            return self._encode_plain(text)
        longest_first = sorted(self.special_ids, key=len, reverse=True)
        parts = re.split("(" + "|".join(map(re.escape, longest_first)) + ")", text)
        ids = ([self.special_ids[part]] if part in self.special_ids else self._encode_plain(part) for part in parts)
        return [token_id for part_ids in ids for token_id in part_ids]

    def decode(self, token_ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of `token_ids`; invalid UTF-8 becomes replacement marks.

        Arguments:
            token_ids: ids in 0..vocab_size - 1. Ids that the vocabulary leaves unused give no text.
            skip_special: leave special tokens out instead of spelling them.
        """
        return b"".join(self.token_bytes(i, skip_special) for i in token_ids).decode("utf-8", "replace")

    def incremental(self, skip_special: bool = True) -> IncrementalDecoder:
        """A decoder for one stream of tokens."""
        return IncrementalDecoder(self, skip_special)

    def token_bytes(self, token_id: int, skip_special: bool = True) -> bytes:
        """The bytes that one token stands for."""
        raise NotImplementedError

    def _encode_plain(self, text: str) -> list[int]:
        """The ids of text in which nothing is special."""
        raise NotImplementedError


class ByteTokenizer(Tokenizer):
    """One token per byte, and three special tokens: the shipped model's vocabulary.

    >>> tokenizer = ByteTokenizer()
    >>> tokenizer.encode("hi<|im_end|>", allow_special=True)
    [104, 105, 258]
    >>> tokenizer.decode(tokenizer.encode("<|im_end|>"))
    '<|im_end|>'
    """

    def __init__(self) -> None:
        self.special_ids = dict(SPECIAL_TOKENS)
        self.vocab_size = BYTE_VOCAB_SIZE
        self._bytes = [bytes([byte]) for byte in range(256)] + [spelling.encode() for spelling, _ in SPECIAL_TOKENS]

    def token_bytes(self, token_id: int, skip_special: bool = True) -> bytes:
        """The byte itself, the spelling of a special token, or nothing for the unused ids 259..263."""
        if not 0 <= token_id < self.vocab_size:
            raise InvalidValue("token_ids", token_id, f"in 0..{self.vocab_size - 1}")
        unseen = token_id >= 256 and (skip_special or token_id >= len(self._bytes))
        return b"" if unseen else self._bytes[token_id]

    def _encode_plain(self, text: str) -> list[int]:
        return list(text.encode())


class JsonTokenizer(Tokenizer):
    """A byte-level tokenizer.json, read by the `tokenizers` package (extra `hf`).

    Arguments:
        path: the tokenizer.json.

    Raises:
        MissingRequirement: the `tokenizers` package is absent.
        CheckpointError: the file cannot be read, or is not byte-level (the whole Qwen family is).
    """

    def __init__(self, path: str | Path):
        try:
            import tokenizers
        except ImportError as error:
            raise MissingRequirement(
                "the package tokenizers", f"reading {path}", "pip install 'minserve[hf]'"
            ) from error
        content = read_json(Path(path))
        if '"ByteLevel"' not in json.dumps(content.get("decoder")):
            raise CheckpointError(f"{path}: only byte-level tokenizers are read, and this one's decoder is another")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises bare Exception
            raise CheckpointError(f"{path}: not a tokenizer that the tokenizers package reads: {error}") from error
        self._tokenizer.encode_special_tokens = True  # spellings stay plain text; `encode` finds the special ones
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_ids = {token.content: i for i, token in added.items() if token.special}
        self._added_bytes = {i: token.content.encode() for i, token in added.items()}
        self._special = frozenset(self.special_ids.values())
        self._byte_of = {char: byte for byte, char in enumerate(byte_to_char())}
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())

    def token_bytes(self, token_id: int, skip_special: bool = True) -> bytes:
        """The token's bytes; nothing for an id without a token (a model's embedding may have more rows)."""
        if token_id < 0:
            raise InvalidValue("token_ids", token_id, "at least 0")
        if token_id in self._added_bytes:
            return b"" if skip_special and token_id in self._special else self._added_bytes[token_id]
        token = self._tokenizer.id_to_token(token_id)
        return b"" if token is None else bytes(self._byte_of[char] for char in token)

    def _encode_plain(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a checkpoint directory: bytes where tokenizer.json is the byte vocabulary, else JsonTokenizer.

    Which tokens end a text is the model's affair: `ModelConfig.eos_token_ids`.

    Raises:
        CheckpointError: no tokenizer.json, or one that cannot be read.
        MissingRequirement: the vocabulary is not the byte one and the `tokenizers` package is absent.
    """
    file = Path(path) / "tokenizer.json"
    if is_byte_vocabulary(read_json(file)):
        return ByteTokenizer()
    return JsonTokenizer(file)


def chat_prompt(messages: Sequence[Mapping[str, str]], tokenizer: Tokenizer | None = None) -> list[int]:
    """The ids of a conversation in ChatML, ending where the assistant begins to speak.

    Only the format's own marks become special tokens; content that spells them stays text.

    Arguments:
        messages: {"role": ..., "content": ...} each, role one of system, user, assistant.
        tokenizer: one that knows <|im_start|> and <|im_end|>; the byte tokenizer unless given.

    >>> ByteTokenizer().decode(chat_prompt([{"role": "user", "content": "hi"}]), skip_special=False)
    '<|im_start|>user\\nhi<|im_end|>\\n<|im_start|>assistant\\n'
    """
    tokenizer = tokenizer or ByteTokenizer()
    marks = tokenizer.special_ids.get("<|im_start|>"), tokenizer.special_ids.get("<|im_end|>")
    if None in marks:
        raise InvalidValue("tokenizer", sorted(tokenizer.special_ids), "one with <|im_start|> and <|im_end|>")
    start, end = marks
    ids: list[int] = []
    for message in messages:
        role, content = message.get("role"), message.get("content")
        if role not in CHAT_ROLES:
            raise InvalidValue("role", role, "one of " + ", ".join(CHAT_ROLES))
        ids += [start, *tokenizer.encode(f"{role}\n"), *tokenizer.encode(content), end, *tokenizer.encode("\n")]
    return [*ids, start, *tokenizer.encode("assistant\n")]
