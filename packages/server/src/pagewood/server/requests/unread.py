"""The answers that a client has not read yet. A slow reader costs little more memory than its text."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import msgspec

from pagewood.server.messages import wire

MERGE_FROM = 64
"""Number of waiting answers from which on later ones are merged. A reader that keeps up gets each answer by itself."""
PIECE_CHARS = 4096
"""Approximate longest text of a merged answer: appending to a longer one would copy too much."""
MAX_ITEMS = 4096
"""Items that may wait; answers that cannot be merged, such as those with log probabilities, are an item each."""


Item = tuple[int, wire.Answer] | Exception


@dataclass(slots=True, eq=False)
class _Growing:
    """An answer that later ones of the same request may be merged into."""

    index: int
    answer: wire.Answer  # written by: append


class Unread:
    """A queue of answers, each with the index of its request, in which pieces of text of one request are merged.

    Invariant: in their order, the texts of a request make the text that was appended. Requests do not wait for each
    other: a merged answer has the place of its first piece.
    """

    __slots__ = ("_growing", "_items")

    def __init__(self) -> None:
        self._items: deque[Item | _Growing] = deque()
        self._growing: dict[int, _Growing] = {}  # written by: append, popleft
        """The newest of those in `_items`, by the index of its request."""

    def __len__(self) -> int:
        return len(self._items)

    @property
    def is_overfull(self) -> bool:
        """Whether the waiting answers exceed the limit."""
        return len(self._items) > MAX_ITEMS

    def append(self, item: tuple[int, wire.Answer] | Exception) -> None:
        """Append an item, as a part of the last one of its request if there are many and both are text."""
        if len(self._items) < MERGE_FROM or not isinstance(item, tuple):
            self._items.append(item)
            return
        index, answer = item
        growing = self._growing.get(index)
        merged = None if growing is None else _merged(growing.answer, answer)
        if growing is not None and merged is not None:
            growing.answer = merged
            return
        self._growing[index] = _Growing(index, answer)
        self._items.append(self._growing[index])

    def popleft(self) -> Item:
        """Remove and return the oldest item; there is one."""
        item = self._items.popleft()
        if not isinstance(item, _Growing):
            return item
        if self._growing[item.index] is item:
            del self._growing[item.index]
        return item.index, item.answer


def _merged(first: wire.Answer, second: wire.Answer) -> wire.Answer | None:
    """Return one answer for two of the same request; None: they are not just pieces of one section of its text."""
    if not (_is_text(first) and _is_text(second)):
        return None
    parts = None
    if first.parts is not None or second.parts is not None:
        if not first.parts or not second.parts:
            return None
        (one,), (other,) = first.parts, second.parts
        if one.kind != other.kind or len(one.text) >= PIECE_CHARS:
            return None
        parts = (one._replace(text=one.text + other.text),)
    elif len(first.text) >= PIECE_CHARS:
        return None
    return msgspec.structs.replace(
        second,
        text=first.text + second.text,
        parts=parts,
        num_prompt_tokens=max(first.num_prompt_tokens, second.num_prompt_tokens),
        num_cached_tokens=max(first.num_cached_tokens, second.num_cached_tokens),
        num_drafted_tokens=max(first.num_drafted_tokens, second.num_drafted_tokens),
        num_accepted_tokens=max(first.num_accepted_tokens, second.num_accepted_tokens),
    )


def _is_text(answer: wire.Answer) -> bool:
    """Return whether an answer is nothing but a piece of text, of one section if it was read."""
    parts = answer.parts
    return (
        answer.finish is None
        and answer.logprobs is None
        and answer.explanation is None
        and not answer.tokens
        and not answer.vector
        and answer.experts is None
        and answer.states is None
        and (parts is None or (len(parts) == 1 and parts[0].kind in ("content", "reasoning")))
    )
