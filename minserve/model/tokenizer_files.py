"""The byte vocabulary as the files that other engines read: tokenizer.json and tokenizer_config.json.

A tokenizer.json spells each byte as one printable character; the table is GPT-2's (Radford et al. 2019,
`bytes_to_unicode`). The byte vocabulary is a byte-level BPE whose list of merges is empty, and its ids are the bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

BYTE_VOCAB_SIZE = 264
END_OF_TEXT, IM_START, IM_END = 256, 257, 258
SPECIAL_TOKENS = (("<|endoftext|>", END_OF_TEXT), ("<|im_start|>", IM_START), ("<|im_end|>", IM_END))
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_to_char() -> list[str]:
    """The printable character that stands for each byte in a tokenizer.json.

    >>> byte_to_char()[ord("a")], byte_to_char()[ord(" ")]
    ('a', 'Ġ')
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]


def byte_tokenizer_files() -> dict[str, str]:
    """What a checkpoint of the byte vocabulary ships beside its weights: file name to text, for `write_checkpoint`."""
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # else transformers picks the family's own, which normalises text
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    return {"tokenizer.json": byte_tokenizer_json(), "tokenizer_config.json": json.dumps(settings, indent=1) + "\n"}


def byte_tokenizer_json() -> str:
    """The tokenizer.json of the byte vocabulary: a byte-level BPE without merges, which transformers reads as it is."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": spelling, **flags} for spelling, i in SPECIAL_TOKENS],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {char: byte for byte, char in enumerate(byte_to_char())},
            "merges": [],
        },
    }
    return json.dumps(content, ensure_ascii=False, indent=1)


def is_byte_vocabulary(content: Mapping) -> bool:
    """Whether the content of a tokenizer.json is what `byte_tokenizer_json` writes, so that no package need read it.

    >>> is_byte_vocabulary(json.loads(byte_tokenizer_json()))
    True
    """
    model, added = content.get("model"), content.get("added_tokens") or []
    if not isinstance(model, Mapping) or not all(isinstance(token, Mapping) for token in added):
        return False
    vocab_is_bytes = model.get("vocab") == {char: byte for byte, char in enumerate(byte_to_char())}
    specials = tuple((token.get("content"), token.get("id")) for token in added)
    return vocab_is_bytes and not model.get("merges") and specials == SPECIAL_TOKENS
