"""Which versions of the weights have computed the tokens of an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

FIRST_VERSION = "default"
"""What the weights are called that an engine began with, where a name is needed."""


class WeightSpan(NamedTuple):
    """Consecutive tokens of an answer that the same weights have computed."""

    version: str
    start: int
    """The first of them; the first token of an answer is 0."""
    end: int
    """The first one behind them."""


def add_span(spans: list[WeightSpan], version: str, num_tokens: int) -> None:
    """Add tokens to those of an answer; `version` is empty for the weights that the engine began with."""
    if not num_tokens:
        return
    if spans and spans[-1].version == version:
        spans[-1] = spans[-1]._replace(end=spans[-1].end + num_tokens)
    else:
        start = spans[-1].end if spans else 0
        spans.append(WeightSpan(version, start, start + num_tokens))


def spans_shown(spans: Sequence[WeightSpan], *, always: bool = False) -> tuple[WeightSpan, ...]:
    """Return the spans of an answer as users see them; without `always`, nothing if the weights were never updated."""
    if not always and all(not span.version for span in spans):
        return ()
    return tuple(span._replace(version=span.version or FIRST_VERSION) for span in spans)
