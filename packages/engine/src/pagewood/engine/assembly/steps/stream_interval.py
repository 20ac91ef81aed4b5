"""Sends the tokens of a request several at a time, so that a stream costs fewer messages."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from pagewood.engine.api import Delta, Outbox, Rows


class IntervalOutbox:
    """Passes on the first answer of a request, then one answer for every `interval` tokens, and the last answer.

    Invariant: together, the answers of a request have the same content in the same order as without it.
    """

    __slots__ = ("_held", "_interval", "_outbox")

    def __init__(self, outbox: Outbox, interval: int) -> None:
        """Send to `outbox`; `interval`: tokens of an answer, >= 1."""
        self._outbox = outbox
        self._interval = interval
        self._held: dict[str, Delta] = {}
        """Answers with fewer tokens, by request."""  # written by: stream_interval

    def send(self, deltas: Sequence[Delta]) -> None:
        """Pass on the answers that are due, and keep the others."""
        due: list[Delta] = []
        for delta in deltas:
            held = self._held.pop(delta.request_id, None)
            if held is not None and held.weights != delta.weights and delta.tokens:
                due.append(held)
            elif held is not None:
                delta = _joined(held, delta)
            if delta.finish is not None or delta.first or len(delta.tokens) >= self._interval:
                due.append(delta)
            else:
                self._held[delta.request_id] = delta
        if due:
            self._outbox.send(due)


def _joined(first: Delta, second: Delta) -> Delta:
    """Return one answer for two consecutive ones; neither is the first of its request."""
    return replace(
        second,
        tokens=first.tokens + second.tokens,
        logprobs=first.logprobs + second.logprobs,
        prompt_logprobs=first.prompt_logprobs + second.prompt_logprobs,
        weights=first.weights,
        experts=Rows.joined((first.experts, second.experts)),
        states=Rows.joined((first.states, second.states)),
    )
