"""Streamed decoding equals decoding at once, for every kind of decoder and any ids."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders

from pagewood.engine.text import Tokenizer, TokenizerPanic
from scale import scaled


@given(data=st.data(), skip=st.booleans())
@settings(max_examples=scaled(50), deadline=None)
def test_joined_text_equals_decoding_at_once(tokenizer: Tokenizer, data: st.DataObject, skip: bool) -> None:
    # Any id, and often the few that interact: spaces at the start, single bytes, special tokens.
    notable = [token for token in range(tokenizer.vocab_size) if tokenizer.decode([token]) in ("", " ", "the", "fox")]
    ids = st.integers(0, tokenizer.vocab_size + 2) | st.sampled_from(notable)
    steps = data.draw(st.lists(st.lists(ids, max_size=3), max_size=20))
    decoder = tokenizer.incremental_decoder(skip_special_tokens=skip)
    parts = [decoder.push(step) for step in steps]
    parts.append(decoder.flush())
    tokens = [token for step in steps for token in step]
    assert "".join(parts) == tokenizer.decode(tokens, skip_special_tokens=skip)


CHARACTERS = st.sampled_from(["▁", " ", "a", "é"])
STRINGS = st.sampled_from(["▁", " ", "a", "ab", "aba", "##", "<0x", "|", "", "�"])
REPLACE: Any = st.builds(decoders.Replace, STRINGS | st.sampled_from([Regex("a+"), Regex("^ "), Regex(" $")]), STRINGS)
STEP: Any = st.one_of(
    REPLACE,
    st.builds(decoders.Strip, CHARACTERS, st.integers(0, 2), st.integers(0, 2)),
    st.builds(decoders.Metaspace, replacement=CHARACTERS, prepend_scheme=st.sampled_from(["always", "never", "first"])),
    st.builds(decoders.WordPiece, prefix=st.sampled_from(["##", ""]), cleanup=st.booleans()),
    st.builds(decoders.CTC, pad_token=st.sampled_from(["<pad>", "a"]), cleanup=st.booleans()),
    st.builds(decoders.BPEDecoder, suffix=st.sampled_from(["</w>", "a", ""])),
    st.builds(decoders.ByteFallback),
    st.builds(decoders.ByteLevel),
    st.builds(decoders.Fuse),
)


@given(
    chain=st.lists(STEP, min_size=1, max_size=5),
    batches=st.lists(st.lists(st.integers(0, 55), max_size=3), max_size=12),
    skip=st.booleans(),
)
@settings(max_examples=scaled(100), deadline=None)
def test_any_chain_of_steps_equals_decoding_at_once(
    make_chained: Any, chain: list[Any], batches: list[list[int]], skip: bool
) -> None:
    tokenizer = Tokenizer(make_chained(*chain))
    decoder = tokenizer.incremental_decoder(skip_special_tokens=skip)
    tokens = [token for batch in batches for token in batch]
    try:
        whole = tokenizer.decode(tokens, skip_special_tokens=skip)
    except TokenizerPanic:
        return
    shown = ""
    for batch in batches:
        shown += decoder.push(batch)
        assert whole.startswith(shown)
    assert shown + decoder.flush() == whole


@pytest.mark.parametrize("name", ["piece", "text"])
def test_a_step_that_panics_raises_an_ordinary_error(make_chained: Any, name: str) -> None:
    # This version of the library slices [1:0] when it strips a space from both ends of a piece that is one space.
    strip = decoders.Strip(" ", 1, 1)
    tokenizer = Tokenizer(make_chained(strip) if name == "piece" else make_chained(decoders.Fuse(), strip))
    space = next(i for i in range(tokenizer.vocab_size) if make_chained().id_to_token(i) == " ")
    with pytest.raises(TokenizerPanic, match=re.escape("panicked")):
        tokenizer.decode([space])
    if name == "piece":
        with pytest.raises(TokenizerPanic):
            tokenizer.incremental_decoder().push([space])
    assert tokenizer.incremental_decoder().push([space + 1]).strip() == "fox"  # the tokenizer can still be used


@given(text=st.text(max_size=30))
@settings(max_examples=scaled(50), deadline=None)
def test_a_character_appears_whole_with_its_last_byte(byte_level_tokenizer: Tokenizer, text: str) -> None:
    decoder = byte_level_tokenizer.incremental_decoder(skip_special_tokens=False)
    shown = ""
    tokens = [int(token) for token in byte_level_tokenizer.encode(text)]
    for n, token in enumerate(tokens, start=1):
        shown += decoder.push([token])
        # At most one incomplete character is held back.
        text_so_far = byte_level_tokenizer.decode(tokens[:n], skip_special_tokens=False)
        assert shown == text_so_far.rstrip("\ufffd") or "\ufffd" in text
    assert shown == text
    assert decoder.flush() == ""


def test_invalid_bytes_do_not_wait_for_the_end(byte_level_tokenizer: Tokenizer) -> None:
    # A decoder with a growing window would hold all of these, and decode them again for each new byte.
    byte_0x80 = next(i for i in range(300) if byte_level_tokenizer.decode([i]) == "\ufffd")
    decoder = byte_level_tokenizer.incremental_decoder()
    num_shown = sum(len(decoder.push([byte_0x80])) for _ in range(1000))
    assert num_shown >= 999


def test_an_incomplete_character_at_the_end_becomes_a_replacement(byte_level_tokenizer: Tokenizer) -> None:
    tokens = [int(token) for token in byte_level_tokenizer.encode("\U0001d518")]
    assert len(tokens) == 4
    decoder = byte_level_tokenizer.incremental_decoder()
    assert decoder.push(tokens[:3]) == ""
    assert decoder.flush() == byte_level_tokenizer.decode(tokens[:3]) == "\ufffd"
