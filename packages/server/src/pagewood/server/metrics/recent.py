"""Rates of the last seconds, for gauges that other servers compute themselves."""

from __future__ import annotations

from collections import deque

WINDOW_S = 10.0
_EVERY_S = 0.5


class Recent:
    """The recent growth rates of sums. Invariant: samples are at least `_EVERY_S` apart."""

    __slots__ = ("_samples",)

    def __init__(self) -> None:
        self._samples: deque[tuple[float, tuple[float, ...]]] = deque()  # written by: note

    def note(self, now_s: float, sums: tuple[float, ...]) -> None:
        """Record the present sums; a smaller sum restarts the window, because the engine was replaced."""
        samples = self._samples
        if samples and now_s - samples[-1][0] < _EVERY_S:
            return
        if samples and any(new < old for new, old in zip(sums, samples[-1][1], strict=True)):
            samples.clear()
        samples.append((now_s, sums))
        while len(samples) > 2 and now_s - samples[1][0] > WINDOW_S:
            samples.popleft()

    def growth(self, now_s: float) -> tuple[float, tuple[float, ...]]:
        """Return the seconds from the oldest to the newest sample, and the growth of the sums; 0 seconds: unknown."""
        if len(self._samples) < 2 or now_s - self._samples[-1][0] > WINDOW_S:
            return 0.0, ()
        (first_s, first), (last_s, last) = self._samples[0], self._samples[-1]
        return last_s - first_s, tuple(new - old for new, old in zip(last, first, strict=True))
