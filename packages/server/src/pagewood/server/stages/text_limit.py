"""Limits on encoded texts: the tokenizers library takes up to 450 bytes per token until the whole text is encoded."""

from __future__ import annotations

from pagewood.engine.text import Tokenizer

MAX_TEXT = 4 << 20
"""Longest text that is encoded, in characters."""
MAX_TOKENS = 1 << 20
"""Most tokens of a text, unless twice the model's longest text is more."""
PART = 1 << 16
"""Characters whose tokens are counted at a time."""


class TextTooLong(Exception):
    """A text is too long to be encoded."""


class TooManyTokens(TextTooLong):
    """A text has too many tokens."""


def check_text(tokenizer: Tokenizer, text: str, *, max_length: int | None) -> None:
    """Check that a text may be encoded as a whole.

    A long text is counted before it is encoded, in parts whose tokens are dropped. Their number is nearly that of the
    whole text: where a part ends, there may be a few tokens more.

    Args:
        tokenizer: will encode the text.
        text: to encode.
        max_length: longest text of the model, in tokens; None: unknown.

    Raises:
        TextTooLong: it has more than `MAX_TEXT` characters.
        TooManyTokens: it has more tokens than `MAX_TOKENS`, or twice `max_length` if that is more.
        ValueError: it holds a lone surrogate.
    """
    if len(text) > MAX_TEXT:
        raise TextTooLong(f"the text must have at most {MAX_TEXT} characters, got {len(text)}")
    limit = max(MAX_TOKENS, 2 * (max_length or 0))
    if len(text) * 4 <= limit:  # UTF-8 has at most 4 bytes for a character, and most tokens cover a byte at least
        return
    if (least := tokenizer.fewest_tokens(text)) > limit:
        raise TooManyTokens(f"the text must have at most {limit} tokens, got at least {least}")
    if len(text.encode()) <= limit:
        return
    num_tokens = 0
    for start in range(0, len(text), PART):
        part = text[start : start + PART]
        num_tokens += len(tokenizer.encode(part, add_special_tokens=False))
        if num_tokens > limit:
            raise TooManyTokens(
                f"the text must have at most {limit} tokens, got more in its first {start + len(part)} characters"
            )
