"""The bytes of single tokens, joined, are the text of all of them in the middle of a text."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from pagewood.engine.text import Tokenizer
from pagewood.engine.text.incremental import WholeDecoder
from scale import scaled


@given(data=st.data())
@settings(max_examples=scaled(50), deadline=None)
def test_joined_bytes_are_the_text(byte_level_tokenizer: Tokenizer, data: st.DataObject) -> None:
    """For a byte-level tokenizer there is no exception: no beginning, no end, no invalid text."""
    tokenizer = byte_level_tokenizer
    tokens = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=20))
    joined = b"".join([tokenizer.token_bytes(token) for token in tokens])
    assert joined.decode(errors="replace") == tokenizer.decode(tokens, skip_special_tokens=False)


@given(text=st.text(max_size=20))
@settings(max_examples=scaled(50), deadline=None)
def test_bytes_of_a_text_are_its_utf8(byte_level_tokenizer: Tokenizer, text: str) -> None:
    tokens = byte_level_tokenizer.encode(text, add_special_tokens=False).tolist()
    assert b"".join([byte_level_tokenizer.token_bytes(token) for token in tokens]) == text.encode()


@given(data=st.data())
@settings(max_examples=scaled(50), deadline=None)
def test_every_kind_of_decoder(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """Valid text between two other tokens: the part of the text that the tokens in between have added."""
    texts = {token: tokenizer.decode([token]) for token in range(tokenizer.vocab_size)}
    before, after = [token for token, text in texts.items() if text.isascii() and text.isalpha()][:2]
    ids = st.integers(0, tokenizer.vocab_size - 1).filter(lambda token: token not in (before, after))
    tokens = data.draw(st.lists(ids, min_size=1, max_size=6, unique=True))
    head = tokenizer.decode([before])
    tail = tokenizer.decode([before, after]).removeprefix(head)
    whole = tokenizer.decode([before, *tokens, after], skip_special_tokens=False)
    if isinstance(tokenizer.incremental_decoder(), WholeDecoder):
        return  # a decoder that works on the text as a whole: the bytes of a token are those of it alone
    library = tokenizer._tokenizer  # pyright: ignore[reportPrivateUsage]
    byte_pieces = {piece for token in tokens if (piece := str(library.id_to_token(token))).startswith("<0x")}
    if len(byte_pieces) > 1 and byte_pieces & {"<0x20>", "<0x30>"}:
        return  # a step after ByteFallback may strip a space of a byte alone, and not of a run of bytes
    found = [tokenizer.token_bytes(token) for token in tokens]
    if byte_pieces and b"" in found:
        return  # a token without text ends a run of bytes: the decoder does not join what it separates
    try:
        text = b"".join(found).decode()
    except UnicodeDecodeError:
        return
    assert head + text + tail == whole


def test_a_piece_in_the_middle_keeps_its_space(make_chained: Any) -> None:
    cases: list[tuple[Any, str, bytes]] = [
        (decoders.Metaspace(), "▁the", b" the"),
        (decoders.WordPiece(), "##re", b"re"),
        (decoders.WordPiece(), "the", b" the"),
        (decoders.BPEDecoder(), "end</w>", b"end "),
        (decoders.CTC(), "<pad>", b""),
        (decoders.Strip(" ", 1, 0), "  fox ", b" fox "),
        (decoders.ByteLevel(), "Ã", b"\xc3"),
        (decoders.ByteLevel(), "Ġfox", b" fox"),
        (decoders.ByteFallback(), "<0xFF>", b"\xff"),
        (decoders.ByteFallback(), "<0xzz>", b"<0xzz>"),
    ]
    for decoder, piece, expected in cases:
        tokenizer = Tokenizer(make_chained(decoder))
        token = make_chained().token_to_id(piece)
        assert tokenizer.token_bytes(token) == expected, (decoder, piece)


def test_special_tokens_have_their_content_and_unknown_ones_nothing(byte_level_tokenizer: Tokenizer) -> None:
    (end,) = byte_level_tokenizer.encode("<|end|>").tolist()
    assert byte_level_tokenizer.token_bytes(end) == b"<|end|>"
    assert byte_level_tokenizer.token_bytes(end, skip_special_tokens=True) == b""
    assert byte_level_tokenizer.token_bytes(10**6) == b""
