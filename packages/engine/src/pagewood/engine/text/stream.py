"""Turns the tokens of one request into the text that its client sees."""

from __future__ import annotations

from collections.abc import Sequence

from pagewood.engine.text.read_stops import ReadStops
from pagewood.engine.text.stop_regex import stops_of
from pagewood.engine.text.tokenizer import Tokenizer


class TextStream:
    """The text of one growing sequence of tokens, up to the first match of a stop string or a stop expression.

    Invariant: the joined results of `push` and `finish` equal `tokenizer.decode` of all tokens, cut before the first
    match. The cost of a token does not depend on the number of tokens before it.

    Args:
        tokenizer: decodes.
        stop: strings at which the text ends.
        stop_regex: expressions at whose matches the text ends.
        skip_special_tokens: whether special tokens are not shown.
        keep: special tokens that are shown in any case.
        hidden: tokens that are not shown in any case, such as a stop token that is a word.
        stops: finds the end in place of `stop` and `stop_regex`.

    Raises:
        ValueError: a stop string is empty, or a stop expression cannot be found in a stream (see `StopExpressions`).
    """

    __slots__ = ("_decoder", "_hidden", "_stops")

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        stop_regex: Sequence[str] = (),
        skip_special_tokens: bool = True,
        keep: frozenset[str] = frozenset(),
        hidden: frozenset[int] = frozenset(),
        stops: ReadStops | None = None,
    ) -> None:
        self._decoder = tokenizer.incremental_decoder(skip_special_tokens=skip_special_tokens, keep=keep)
        self._hidden = hidden
        self._stops = stops_of(stop, stop_regex) if stops is None else stops

    @property
    def stopped_by(self) -> str | None:
        """The stop string or the match of an expression that ended the text; or None. Later tokens are ignored."""
        return self._stops.matched

    def push(self, tokens: Sequence[int]) -> str:
        """Return the new text: complete characters that cannot belong to a match."""
        if self._hidden:
            tokens = [token for token in tokens if token not in self._hidden]
        return self._stops.push(self._decoder.push(tokens))

    def finish(self) -> str:
        """Return the rest of the text; the sequence has ended."""
        return self._stops.push(self._decoder.flush()) + self._stops.flush()
