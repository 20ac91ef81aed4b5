"""Gives the log probabilities of a prompt, which the engine computes with its first answer, to its other answers."""

from __future__ import annotations

import msgspec

from pagewood.server.messages import wire


class PromptSharing:
    """Completes the messages of one HTTP request.

    Invariant: every answer has the entries of its prompt in the first of its messages that `take` returns. Messages of
    other answers wait until those of the first answer have begun.

    Args:
        num_answers: to each prompt.
    """

    __slots__ = ("_begun", "_entries", "_held", "_num_answers")

    def __init__(self, num_answers: int) -> None:
        self._num_answers = num_answers
        self._entries: dict[
            int, tuple[wire.TokenEntry, ...] | None
        ] = {}  # written by: take. By the index of the prompt
        self._held: dict[int, list[tuple[int, wire.Answer]]] = {}  # written by: take. By the index of the prompt
        self._begun: set[int] = set()  # written by: _complete

    def take(self, index: int, answer: wire.Answer) -> list[tuple[int, wire.Answer]]:
        """Return the messages that can be sent now that `answer`, of request `index`, has come."""
        prompt, place = divmod(index, self._num_answers)
        if place == 0 and prompt not in self._entries:
            self._entries[prompt] = None if answer.logprobs is None else answer.logprobs.prompt
            return [(index, answer), *[(i, self._complete(i, one)) for i, one in self._held.pop(prompt, [])]]
        if prompt not in self._entries:
            self._held.setdefault(prompt, []).append((index, answer))
            return []
        return [(index, answer if place == 0 else self._complete(index, answer))]

    def _complete(self, index: int, answer: wire.Answer) -> wire.Answer:
        entries = self._entries[index // self._num_answers]
        if index in self._begun or entries is None:
            return answer
        self._begun.add(index)
        tokens = () if answer.logprobs is None else answer.logprobs.tokens
        return msgspec.structs.replace(answer, logprobs=wire.Logprobs(tokens, entries))
