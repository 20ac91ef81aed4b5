"""Gives what the engine computes of a prompt with its first answer to its other answers: log probabilities and rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec

from pagewood.engine.api import Rows
from pagewood.server.messages import wire

_Kind = Literal["experts", "states"]
_KINDS: tuple[_Kind, ...] = ("experts", "states")


@dataclass(frozen=True, slots=True)
class _OfPrompt:
    """What other answers get in the first of their messages."""

    entries: tuple[wire.TokenEntry, ...] | None
    rows: Mapping[_Kind, Rows | None]
    """Rows of the positions before the last one of the prompt, which all answers compute."""

    @classmethod
    def of(cls, answer: wire.Answer) -> _OfPrompt:
        """Return what the first message of the first answer has."""
        entries = None if answer.logprobs is None else answer.logprobs.prompt
        return cls(entries, {kind: _before_output(getattr(answer, kind), answer) for kind in _KINDS})


class PromptSharing:
    """Completes the messages of one HTTP request.

    Invariant: every answer has what is known of its prompt in the first of its messages that `take` returns. Messages
    of other answers wait until those of the first answer have begun.

    Args:
        num_answers: to each prompt.
    """

    __slots__ = ("_begun", "_held", "_known", "_num_answers")

    def __init__(self, num_answers: int) -> None:
        self._num_answers = num_answers
        self._known: dict[int, _OfPrompt] = {}  # written by: take. By the index of the prompt
        self._held: dict[int, list[tuple[int, wire.Answer]]] = {}  # written by: take. By the index of the prompt
        self._begun: set[int] = set()  # written by: _complete

    def take(self, index: int, answer: wire.Answer) -> list[tuple[int, wire.Answer]]:
        """Return the messages that can be sent now that `answer`, of request `index`, has come."""
        prompt, place = divmod(index, self._num_answers)
        if place == 0 and prompt not in self._known:
            self._known[prompt] = _OfPrompt.of(answer)
            return [(index, answer), *[(i, self._complete(i, one)) for i, one in self._held.pop(prompt, [])]]
        if prompt not in self._known:
            self._held.setdefault(prompt, []).append((index, answer))
            return []
        return [(index, answer if place == 0 else self._complete(index, answer))]

    def _complete(self, index: int, answer: wire.Answer) -> wire.Answer:
        if index in self._begun:
            return answer
        self._begun.add(index)
        known = self._known[index // self._num_answers]
        if known.entries is not None:
            tokens = () if answer.logprobs is None else answer.logprobs.tokens
            answer = msgspec.structs.replace(answer, logprobs=wire.Logprobs(tokens, known.entries))
        for kind, rows in known.rows.items():
            own: Rows | None = getattr(answer, kind)
            if own is not None and _before_output(own, answer) is None:
                answer = msgspec.structs.replace(answer, **{kind: Rows.joined([rows, own])})
        return answer


def _before_output(rows: Rows | None, answer: wire.Answer) -> Rows | None:
    """Return the rows before the last position of the prompt, of a message with all rows so far; None: there are none.

    The last token of an answer has no row, and the last one of the prompt has.
    """
    return None if rows is None else rows.without_last(answer.num_output_tokens)
