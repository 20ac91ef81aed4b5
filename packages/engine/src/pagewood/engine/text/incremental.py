# pyright: basic
# The bindings of `tokenizers` carry no usable annotations.
"""Ids to text, a few at a time: what was handed out never changes, and in the end equals decoding everything at once.

The usual way is to decode a window of ids twice and compare. It needs the text to settle: one invalid byte and the
window grows, or a character is replaced that was not broken. The decoders that nearly all models have are simple enough
to be followed exactly, each token once: byte-level (GPT-2, Llama 3, Qwen) and SentencePiece with byte fallback
(Llama 2, Mistral, Gemma). Everything else gets the window.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import tokenizers

from pagewood.engine.text.vocabulary import Vocabulary

REPLACEMENT = "\ufffd"


class IncrementalDecoder(Protocol):
    """Decodes the tokens of one sequence. Invariant: all that it returned is a prefix of the whole decoded text."""

    def push(self, tokens: Sequence[int]) -> str:
        """Return the text that is final once `tokens` are known."""
        ...

    def flush(self) -> str:
        """Return the rest; the sequence is at its end."""
        ...


def incremental_decoder(
    tokenizer: tokenizers.Tokenizer, *, skip_special_tokens: bool
) -> Callable[[], IncrementalDecoder]:
    """Return what makes decoders for this tokenizer; all of them share one vocabulary."""
    vocabulary = Vocabulary(tokenizer, skip_special_tokens=skip_special_tokens)
    if _steps(tokenizer) == [{"type": "ByteLevel"}]:
        byte_vocabulary = ByteVocabulary(vocabulary)
        return lambda: ByteLevelDecoder(byte_vocabulary)
    chain = PieceChain.of(_steps(tokenizer))
    if chain is not None:
        return lambda: PieceDecoder(vocabulary, chain)
    return lambda: WindowDecoder(tokenizer, vocabulary)


def _steps(tokenizer: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    """Return the flattened steps of the tokenizer's decoder, each with the settings that change what it decodes."""
    if tokenizer.decoder is None:
        return []
    spec = json.loads(tokenizer.decoder.__getstate__())
    steps = spec["decoders"] if spec["type"] == "Sequence" else [spec]
    return [{"type": "ByteLevel"} if step["type"] == "ByteLevel" else step for step in steps]


def _byte_of_character() -> dict[str, int]:
    """Return the byte that each character of a byte-level piece stands for.

    Printable Latin-1 stands for itself; the other bytes, in ascending order, are the characters from U+0100 on.

    Source: GPT-2's encoder (Radford et al., 2019).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


class ByteVocabulary:
    """The bytes that each byte-level token stands for, filled on demand."""

    __slots__ = ("_byte_of_character", "_bytes", "_vocabulary")

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._byte_of_character = _byte_of_character()
        self._bytes: dict[int, bytes] = {}  # written by: of

    def of(self, token: int) -> bytes:
        """Return the bytes of `token`; a piece with a character outside the code stands for itself in UTF-8."""
        try:
            return self._bytes[token]
        except KeyError:
            pass
        piece = self._vocabulary.piece(token) or ""
        try:
            encoded = bytes([self._byte_of_character[character] for character in piece])
        except KeyError:
            encoded = piece.encode()
        self._bytes[token] = encoded
        return encoded


class ByteLevelDecoder:
    """Tokens are bytes; the text is their UTF-8 reading, with U+FFFD for each maximal invalid part."""

    __slots__ = ("_utf8", "_vocabulary")

    def __init__(self, vocabulary: ByteVocabulary) -> None:
        self._vocabulary = vocabulary
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, tokens: Sequence[int]) -> str:
        """Return the characters that these bytes complete."""
        return self._utf8.decode(b"".join([self._vocabulary.of(token) for token in tokens]))

    def flush(self) -> str:
        """Return U+FFFD for a character that was never completed."""
        return self._utf8.decode(b"", final=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceChain:
    """A decoder that is a chain of: replacements per piece, byte fallback, fuse, a strip at the start."""

    replacements: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False
    strip: str = ""
    """Character that is taken from the start of the text, at most `num_strip` times."""
    num_strip: int = 0

    @staticmethod
    def of(steps: list[dict[str, Any]]) -> PieceChain | None:
        """Return the chain that these steps are, or None where they are something else."""
        order = ("Replace", "ByteFallback", "Fuse", "Strip")
        kinds = [step["type"] for step in steps]
        once = [kind for kind in kinds if kind != "Replace"]
        if not set(kinds) <= set(order) or kinds != sorted(kinds, key=order.index) or len(once) != len(set(once)):
            return None
        if "Fuse" not in kinds:
            return None  # without it, Strip works on each piece
        replacements: list[tuple[str, str]] = []
        strip, num_strip = "", 0
        for step in steps:
            match step:
                case {"type": "Replace", "pattern": {"String": pattern}, "content": content}:
                    replacements.append((pattern, content))
                case {"type": "Strip", "content": strip, "start": num_strip, "stop": 0}:
                    pass
                case {"type": "ByteFallback" | "Fuse"}:
                    pass
                case _:
                    return None
        return PieceChain(
            replacements=tuple(replacements),
            byte_fallback="ByteFallback" in kinds,
            strip=strip,
            num_strip=num_strip,
        )


class PieceDecoder:
    """Tokens are pieces of text, or single bytes (`<0xE2>`).

    A run of byte tokens is valid UTF-8 as a whole, or becomes one U+FFFD per byte: so it is held until it ends.
    """

    __slots__ = ("_chain", "_num_strip", "_run", "_vocabulary")

    def __init__(self, vocabulary: Vocabulary, chain: PieceChain) -> None:
        self._vocabulary = vocabulary
        self._chain = chain
        self._run = bytearray()  # written by: push, _end_run
        self._num_strip = chain.num_strip  # written by: _strip

    def push(self, tokens: Sequence[int]) -> str:
        """Return the text up to the last token that is not a byte of an open run."""
        text: list[str] = []
        for token in tokens:
            piece = self._vocabulary.piece(token)
            if piece is None:
                continue
            for pattern, content in self._chain.replacements:
                piece = piece.replace(pattern, content)
            byte = _byte_of_piece(piece) if self._chain.byte_fallback else None
            if byte is not None:
                self._run.append(byte)
            else:
                text += (self._end_run(), piece)
        return self._strip("".join(text))

    def flush(self) -> str:
        """Return the last run of bytes."""
        return self._strip(self._end_run())

    def _end_run(self) -> str:
        if not self._run:
            return ""
        try:
            text = self._run.decode()
        except UnicodeDecodeError:
            text = REPLACEMENT * len(self._run)
        self._run.clear()
        return text

    def _strip(self, text: str) -> str:
        while text and self._num_strip:
            if not text.startswith(self._chain.strip):
                self._num_strip = 0
                break
            text = text[1:]
            self._num_strip -= 1
        return text


def _byte_of_piece(piece: str) -> int | None:
    """Return the byte that a piece such as `<0x0A>` stands for."""
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        try:
            return int(piece[3:5], 16)
        except ValueError:
            return None
    return None


class WindowDecoder:
    """Decodes what is new behind one token of context; text that ends in U+FFFD waits, for a few tokens.

    Exact for decoders that look at a token and the one before it, which all the remaining ones do.
    """

    MAX_HELD = 8

    __slots__ = ("_context", "_held", "_tokenizer", "_vocabulary")

    def __init__(self, tokenizer: tokenizers.Tokenizer, vocabulary: Vocabulary) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._context: list[int] = []  # written by: _take
        self._held: list[int] = []  # written by: push, _take

    def push(self, tokens: Sequence[int]) -> str:
        """Return the text of the held tokens and these, or nothing while their last character may be incomplete."""
        self._held += [token for token in tokens if self._vocabulary.piece(token) is not None]
        text = self._new_text()
        if text.endswith(REPLACEMENT) and len(self._held) < self.MAX_HELD:
            return ""
        return self._take(text)

    def flush(self) -> str:
        """Return the text of the held tokens."""
        return self._take(self._new_text())

    def _new_text(self) -> str:
        # The vocabulary has already left out what is to be skipped.
        before = self._tokenizer.decode(self._context, skip_special_tokens=False)
        return self._tokenizer.decode(self._context + self._held, skip_special_tokens=False)[len(before) :]

    def _take(self, text: str) -> str:
        self._context = self._held[-1:] or self._context
        self._held = []
        return text
