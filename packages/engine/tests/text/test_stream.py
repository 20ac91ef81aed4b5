"""The text that is shown equals the decoded text up to a stop string."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from pagewood.engine.text import StopStrings, TextStream, Tokenizer
from scale import scaled


@given(data=st.data(), stop=st.lists(st.sampled_from(["the", "he q", "\ufffd", "é", "a", "fox"]), max_size=3))
@settings(max_examples=scaled(50), deadline=None)
def test_shown_text_is_the_decoded_text_up_to_a_stop(
    tokenizer: Tokenizer, data: st.DataObject, stop: list[str]
) -> None:
    tokens = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    stream = TextStream(tokenizer, stop=stop)
    shown = "".join([stream.push([token]) for token in tokens]) + stream.finish()
    whole = StopStrings(stop)
    assert shown == whole.push(tokenizer.decode(tokens)) + whole.flush()
    assert stream.stopped_by == whole.matched


def test_a_stop_string_across_tokens_is_never_shown(byte_level_tokenizer: Tokenizer) -> None:
    tokens = [int(token) for token in byte_level_tokenizer.encode("Say 世界 STOP and more")]
    stream = TextStream(byte_level_tokenizer, stop=["界 STOP"])
    parts = [stream.push([token]) for token in tokens]
    assert "".join(parts) + stream.finish() == "Say 世"
    assert stream.stopped_by == "界 STOP"


def test_special_tokens_are_shown_on_request(byte_level_tokenizer: Tokenizer) -> None:
    tokens = [int(token) for token in byte_level_tokenizer.encode("a<|end|>b")]
    assert TextStream(byte_level_tokenizer).push(tokens) == "ab"
    assert TextStream(byte_level_tokenizer, skip_special_tokens=False).push(tokens) == "a<|end|>b"
