# pyright: basic
# The bindings of `tokenizers` carry no usable annotations.
"""A lower bound of the number of tokens of a text, from its bytes alone: a text that is far too long is not encoded.

Let w(b) be one over the length, in bytes, of the longest token that can cover a byte b. Then the weights of a token's
bytes add up to at most 1, and a text has at least as many tokens as the sum of its weights. This holds if every byte of
the text is covered by a token, and by at most one. It does for byte-level models, and for models with byte fallback,
unless a part of the tokenizer removes text. Each such part is either known here, with a limit on what it removes, or
there is no bound:

- A Unicode normalization form leaves an ASCII character alone if another one follows it. Other bytes become fewer by a
  limited factor, so each weighs one over (that factor times the longest token).
- A token or pre-tokenizer that swallows the whitespace around it: bytes of whitespace weigh nothing.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from pagewood.engine.text.decoder_steps import BYTE_OF_CHARACTER, bytes_of_piece

MAX_SHRINK = {"NFC": 9, "NFD": 3, "NFKC": 12, "NFKD": 4, "Lowercase": 3}
"""The largest factor by which a normalizer may shrink a text in bytes."""

MAX_CHARACTER_BYTES = 4
_CHUNK_BYTES = 1 << 18
_SPACE = "\u2581"
_WHITESPACE = frozenset(byte for code in range(0x3001) if chr(code).isspace() for byte in chr(code).encode())
_REMOVES_WHITESPACE = ("Whitespace", "WhitespaceSplit", "BertPreTokenizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthBound:
    """The least number of tokens that each byte of a text adds."""

    weights: NDArray[np.float64]
    """[256] float64, by byte."""
    changed_weights: NDArray[np.float64] | None
    """[256] float64, for bytes that a normalization form may change; None: there is no such normalizer."""

    def fewest_tokens(self, text: str) -> int:
        """Return a lower bound of the number of tokens of `text`."""
        data = np.frombuffer(text.encode(), np.uint8)
        total = 0.0
        for start in range(0, len(data), _CHUNK_BYTES):
            chunk = data[start : start + _CHUNK_BYTES]
            if self.changed_weights is None:
                total += float(np.bincount(chunk, minlength=256) @ self.weights)
                continue
            kept = chunk < 0x80
            kept[:-1] &= kept[1:]
            kept[-1] = False  # its successor is in the next chunk
            total += float(np.bincount(chunk[kept], minlength=256) @ self.weights)
            total += float(np.bincount(chunk[~kept], minlength=256) @ self.changed_weights)
        return math.ceil(total * (1 - 1e-9))


def length_bound(tokenizer: tokenizers.Tokenizer) -> LengthBound | None:
    """Return the bound of `tokenizer`; None if a part of it may remove text without a known limit."""
    added = list(tokenizer.get_added_tokens_decoder().values())
    changes = _changes(tokenizer, added)
    if changes is None or not _covers_every_byte(tokenizer, is_byte_level=changes.is_byte_level):
        return None
    # The normalized text of an added token may be longer than its text.
    added_lengths = [
        (text, len(text) * (1 if changes.shrink == 1 else 3)) for text in (t.content.encode() for t in added)
    ]
    vocabulary = list(tokenizer.get_vocab(with_added_tokens=True))
    pieces = [bytes_of_piece(piece) if changes.is_byte_level else piece.encode() for piece in vocabulary]
    longest = np.full(256, MAX_CHARACTER_BYTES, np.float64)
    for piece, length in [*((piece, len(piece)) for piece in pieces), *added_lengths]:
        covered = [*piece, 0x20] if _SPACE.encode() in piece else [*piece]
        longest[covered] = np.maximum(longest[covered], length)
    weights = 1 / longest
    slow = np.full(256, 1 / (longest.max() * changes.shrink))
    if changes.is_everywhere:
        weights = slow
    if changes.loses_whitespace:
        weights[list(_WHITESPACE)] = 0
        # A normalizer may turn other characters into whitespace, which is then lost.
        slow = slow if changes.shrink == 1 else np.zeros(256)
        weights = weights if not changes.is_everywhere else slow
    changed = slow if changes.shrink > 1 and not changes.is_everywhere else None
    return LengthBound(weights=weights, changed_weights=changed)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Changes:
    """The changes by a tokenizer to a text before its model sees it."""

    is_byte_level: bool
    """Whether the model sees one character per byte."""
    shrink: int
    """The largest factor by which the normalizers may shrink the text in bytes."""
    is_everywhere: bool
    """Whether they may change any byte; if not, they keep an ASCII character that another one follows."""
    loses_whitespace: bool


def _changes(tokenizer: tokenizers.Tokenizer, added: list[tokenizers.AddedToken]) -> _Changes | None:
    try:
        normalizers = _flat(tokenizer.normalizer, "normalizers")
        pre_tokenizers = _flat(tokenizer.pre_tokenizer, "pretokenizers")
    except Exception:  # a part written in Python has no description
        return None
    is_byte_level = is_everywhere = False
    loses_whitespace = any(token.lstrip or token.rstrip for token in added)
    shrink = 1
    for spec in normalizers:
        match spec:
            case {"type": "NFC" | "NFD" | "NFKC" | "NFKD" as form}:
                shrink *= MAX_SHRINK[form]
            case {"type": "Lowercase"}:
                shrink *= MAX_SHRINK["Lowercase"]
                is_everywhere = True
            case {"type": "Prepend"} | {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}:
                pass  # more bytes, not fewer
            case {"type": "ByteLevel"}:
                is_byte_level = True
            case {"type": "Strip"}:
                loses_whitespace = True
            case _:
                return None
    for spec in pre_tokenizers:
        match spec:
            case {"type": "ByteLevel"}:
                is_byte_level = True
            case {"type": "Split" | "Punctuation", "behavior": "Removed"}:
                return None
            case {"type": "Split" | "Punctuation" | "Digits" | "UnicodeScripts" | "FixedLength" | "Metaspace"}:
                pass
            case {"type": kind} if kind in _REMOVES_WHITESPACE:
                loses_whitespace = True
            case _:
                return None
    return _Changes(
        is_byte_level=is_byte_level, shrink=shrink, is_everywhere=is_everywhere, loses_whitespace=loses_whitespace
    )


def _flat(part: Any, key: str) -> list[dict[str, Any]]:
    def flat(spec: dict[str, Any]) -> list[dict[str, Any]]:
        return [step for inner in spec[key] for step in flat(inner)] if spec["type"] == "Sequence" else [spec]

    return [] if part is None else flat(json.loads(part.__getstate__()))


def _covers_every_byte(tokenizer: tokenizers.Tokenizer, *, is_byte_level: bool) -> bool:
    """Return whether the model drops no character, and joins no run of unknown ones to a single token."""
    model = tokenizer.model
    if not isinstance(model, tokenizers.models.BPE):
        return False
    if is_byte_level:
        has_alphabet = all(model.token_to_id(character) is not None for character in BYTE_OF_CHARACTER)
        return has_alphabet and not model.continuing_subword_prefix and not model.end_of_word_suffix
    if model.byte_fallback and all(model.token_to_id(f"<0x{byte:02X}>") is not None for byte in range(256)):
        return True
    return model.unk_token is not None and not model.fuse_unk
