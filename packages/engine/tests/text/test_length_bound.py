"""No text has fewer tokens than its bytes say."""

# pyright: basic
from __future__ import annotations

import sys
import unicodedata
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from pagewood.engine.text import Tokenizer
from pagewood.engine.text.length_bound import MAX_SHRINK, length_bound
from scale import scaled

BYTE_PIECES = [f"<0x{byte:02X}>" for byte in range(256)]
LONG_PIECES = ["aaaaaaaa", " " * 8, "▁" * 8, "ó" * 16, "각" * 16, "k" * 16]
"""Made from "o" and an accent, from the three parts of a Hangul syllable, and from "K", if text is normalized."""


def merged(pieces: list[str], text: str) -> list[tuple[str, str]]:
    """Add `text` and its parts to the pieces, and return the merges that build it from its halves."""
    pieces.append(text)
    if len(text) == 1:
        return []
    left, right = text[: len(text) // 2], text[len(text) // 2 :]
    return [*merged(pieces, left), *merged(pieces, right), (left, right)]


def bpe(long: list[str], *, byte_level: bool, **options: Any) -> models.BPE:
    pieces = pre_tokenizers.ByteLevel.alphabet() if byte_level else [*BYTE_PIECES, "<unk>"]
    merges = [merge for text in long for merge in merged(pieces, text)]
    return models.BPE(
        {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}, list(dict.fromkeys(merges)), **options
    )


def as_byte_level(text: str) -> str:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)[0][0]


FORMS = [normalizers.NFC(), normalizers.NFD(), normalizers.NFKC(), normalizers.NFKD()]
NORMALIZER: Any = st.sampled_from(
    [
        *FORMS,
        normalizers.Lowercase(),
        normalizers.Prepend("\u2581"),
        normalizers.Replace(" ", "\u2581"),
        normalizers.Strip(),
    ]
)
PRE_TOKENIZER: Any = st.sampled_from(
    [
        pre_tokenizers.Split(Regex(r"\s+|a+"), "isolated"),
        pre_tokenizers.Split(" ", "merged_with_next"),
        pre_tokenizers.Digits(),
        pre_tokenizers.Metaspace(),
        pre_tokenizers.Whitespace(),
        pre_tokenizers.WhitespaceSplit(),
    ]
)
ADDED: Any = st.builds(
    AddedToken,
    st.sampled_from(["<|end|>", "<e>aaaaaaaaaaaaaaaaaa", "\u00c9\u00c9\u00c9\u00c9", "K\u212a\u0130"]),
    lstrip=st.booleans(),
    rstrip=st.booleans(),
    normalized=st.booleans(),
)
UNITS = [
    "a",
    " ",
    "\n",
    "o\u0301",
    "é",
    "\u1100\u1161\u11a8",
    "\u212a",
    "K",
    "\u2003",
    "\u1f82",
    "\U0001d15f",
    "\ufdfa",
]
PARTS = st.sampled_from([*UNITS, *LONG_PIECES, "<|end|>"]) | st.text(max_size=2)
REPEATED = st.builds(lambda first, unit, num: first + unit * num, PARTS, st.sampled_from(UNITS), st.integers(16, 64))
TEXT = st.lists(PARTS, max_size=40).map("".join) | REPEATED | st.just("<|end|>" + " " * 64)


@given(
    normalizer=st.lists(NORMALIZER, max_size=3),
    pre_tokenizer=st.lists(PRE_TOKENIZER, max_size=2),
    added=st.lists(ADDED, max_size=2),
    byte_level=st.booleans(),
    text=TEXT,
)
@settings(max_examples=scaled(75), deadline=None)
def test_no_text_has_fewer_tokens(
    normalizer: list[Any], pre_tokenizer: list[Any], added: list[AddedToken], byte_level: bool, text: str
) -> None:
    long = [as_byte_level(piece) if byte_level else piece for piece in LONG_PIECES]
    tokenizer = tokenizers.Tokenizer(bpe(long, byte_level=byte_level, byte_fallback=not byte_level))
    tokenizer.normalizer = normalizers.Sequence(normalizer)
    levels = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)] * byte_level
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*pre_tokenizer, *levels])
    tokenizer.add_tokens(added)
    bound = length_bound(tokenizer)
    assert bound is not None
    assert bound.fewest_tokens(text) <= len(tokenizer.encode(text).ids)


def test_the_bound_is_near_where_tokens_are_long() -> None:
    tokenizer = Tokenizer(tokenizers.Tokenizer(bpe(["aaaaaaaa"], byte_level=True)))
    assert tokenizer.fewest_tokens("a" * 80) == 0  # without its pre-tokenizer, the model drops characters
    byte_level = tokenizers.Tokenizer(bpe(["aaaaaaaa", "\u0120" * 4], byte_level=True))
    byte_level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = Tokenizer(byte_level)
    assert tokenizer.fewest_tokens("a" * 80_000) == len(tokenizer.encode("a" * 80_000)) == 10_000
    assert tokenizer.fewest_tokens(" " * 80_000) == len(tokenizer.encode(" " * 80_000)) == 20_000
    byte_level.normalizer = normalizers.NFC()
    assert Tokenizer(byte_level).fewest_tokens("a" * 80_000) >= 9_990
    assert Tokenizer(byte_level).fewest_tokens("") == 0


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("normalizer", normalizers.Replace(Regex(" {2,}"), " ")),
        ("normalizer", normalizers.Replace(" ", "")),
        ("normalizer", normalizers.StripAccents()),
        ("normalizer", normalizers.BertNormalizer()),
        ("normalizer", normalizers.Nmt()),
        ("pre_tokenizer", pre_tokenizers.Split(" ", "removed")),
        ("pre_tokenizer", pre_tokenizers.CharDelimiterSplit("a")),
        ("pre_tokenizer", pre_tokenizers.Punctuation("removed")),
        ("model", models.WordPiece({"[UNK]": 0}, unk_token="[UNK]")),
        ("model", models.WordLevel({"<unk>": 0}, unk_token="<unk>")),
        ("model", models.Unigram([("<unk>", 0.0)], 0)),
        ("model", models.BPE({"<unk>": 0}, [], unk_token="<unk>", fuse_unk=True)),
    ],
)
def test_what_may_remove_any_text_has_no_bound(part: str, value: Any) -> None:
    tokenizer = tokenizers.Tokenizer(bpe([], byte_level=False, byte_fallback=True))
    tokenizer.decoder = decoders.ByteFallback()
    assert length_bound(tokenizer) is not None
    setattr(tokenizer, part, value)
    assert length_bound(tokenizer) is None
    assert Tokenizer(tokenizer).fewest_tokens("a" * 1000) == 0


def test_normalizers_shrink_no_text_more_than_this() -> None:
    characters = [chr(code) for code in range(sys.maxunicode + 1) if not 0xD800 <= code < 0xE000]

    def shrink(form: Any) -> float:
        return max(len(c.encode()) / len(unicodedata.normalize(form, c).encode()) for c in characters)

    def growth(form: Any) -> float:
        return max(len(unicodedata.normalize(form, c).encode()) / len(c.encode()) for c in characters)

    # A composed text has the decomposition of the text that it was made of.
    assert shrink("NFD") <= MAX_SHRINK["NFD"]
    assert shrink("NFKD") <= MAX_SHRINK["NFKD"]
    assert shrink("NFD") * growth("NFD") <= MAX_SHRINK["NFC"]
    assert shrink("NFKD") * growth("NFD") <= MAX_SHRINK["NFKC"]
    assert max(len(c.encode()) / len(c.lower().encode()) for c in characters) <= MAX_SHRINK["Lowercase"]
