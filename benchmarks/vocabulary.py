"""A tokenizer of any size for a model with random weights, so that grammars can be compiled for it."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a `tokenizer.json` of single bytes and of short words, with and without a space before them."""
    tokens = ["<end>", *_byte_names()]
    letters = "etaoinshrdlcumwfgypbvkjxqz0123456789"
    for size in (2, 3, 4):
        for word in product(letters, repeat=size):
            tokens += ["".join(word), "\u0120" + "".join(word)]
            if len(tokens) >= vocab_size:
                break
    vocab = {token: index for index, token in enumerate(tokens[:vocab_size])}
    end = {"id": 0, "content": "<end>", "special": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    bytes_of = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    model: dict[str, object] = {"type": "BPE", "vocab": vocab, "merges": [], "byte_fallback": False}
    tokenizer: dict[str, object] = {
        "version": "1.0",
        "added_tokens": [end | flags],
        "pre_tokenizer": bytes_of,
        "decoder": bytes_of,
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer | {"model": model}))


def _byte_names() -> list[str]:
    """Return the characters that stand for the 256 bytes in byte-level vocabularies."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    names = {byte: chr(byte) for byte in shown}
    hidden = [byte for byte in range(256) if byte not in names]
    names |= {byte: chr(256 + index) for index, byte in enumerate(hidden)}
    return [names[byte] for byte in range(256)]
