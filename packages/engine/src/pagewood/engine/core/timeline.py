"""The times of a request that its last answer reports."""

from __future__ import annotations

from collections.abc import Callable

from pagewood.engine.api import RequestTimings

_MOST_TIMES = 256
"""Most chunks, and most preemptions, that are recorded per request: the first ones."""


class Timeline:
    """The times of one request. Invariant: they are readings of the engine's clock, in the order of the calls."""

    __slots__ = ("_admitted_s", "_arrived_s", "_chunks", "_clock", "_first_token_s", "_num_preempted", "_preempted_s",
                 "_queued_s")  # fmt: skip

    def __init__(self, clock: Callable[[], float], arrived_s: float) -> None:
        """Begin with the arrival of the request, at `arrived_s`."""
        self._clock = clock
        self._arrived_s = arrived_s
        self._queued_s: float | None = None  # written by: queued
        self._admitted_s: float | None = None  # written by: chunk
        self._chunks: list[tuple[float, int]] = []  # written by: chunk
        self._preempted_s: list[float] = []  # written by: preempted
        self._num_preempted = 0  # written by: preempted
        self._first_token_s: float | None = None  # written by: answered

    def queued(self) -> None:
        """Note that it was queued."""
        self._queued_s = self._clock()

    def chunk(self, num_tokens: int) -> None:
        """Note that a plan computes tokens of its prompt, or recomputes tokens after a preemption."""
        now_s = self._clock()
        if self._admitted_s is None:
            self._admitted_s = now_s
        if len(self._chunks) < _MOST_TIMES:
            self._chunks.append((now_s, num_tokens))

    def preempted(self) -> None:
        """Note that it was preempted."""
        self._num_preempted += 1
        if len(self._preempted_s) < _MOST_TIMES:
            self._preempted_s.append(self._clock())

    def answered(self) -> None:
        """Note an answer with tokens; only the first one counts."""
        if self._first_token_s is None:
            self._first_token_s = self._clock()

    def ended(self) -> RequestTimings:
        """Return the times of the request, which ends now."""
        return RequestTimings(
            arrived_s=self._arrived_s,
            queued_s=self._queued_s,
            admitted_s=self._admitted_s,
            chunks=tuple(self._chunks),
            num_preempted=self._num_preempted,
            preempted_s=tuple(self._preempted_s),
            first_token_s=self._first_token_s,
            finished_s=self._clock(),
        )
