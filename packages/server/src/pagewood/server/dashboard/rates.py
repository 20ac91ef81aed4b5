"""Rates and percentiles of the last minute, from the steps of snapshots."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from pagewood.engine.observe.view import EngineView, StepView

Floats = NDArray[np.float64]

WINDOW_S = 60.0
RATE_WINDOW_S = 10.0
RATE_EVERY_S = 0.9


class Percentiles(msgspec.Struct, frozen=True):
    """Percentiles of times, in seconds."""

    p50: float
    p90: float
    p99: float


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's recent work. Rates are for the last 10 seconds, percentiles for the last minute."""

    output_tokens: float
    """Tokens decoded per second."""
    prompt_tokens: float
    """Prompt tokens computed per second."""
    steps: float
    """Per second."""
    admitted: float
    """Requests admitted per second."""
    busy: float
    """Share of the time in which a step was computed."""
    cached_share: float | None
    """Share of the prompt tokens of admitted requests that was cached; None: no request was admitted."""
    first_token: Percentiles | None
    """From arrival in the engine to the first token; None: there was none."""
    between_tokens: Percentiles | None
    """Between two tokens of a request that decodes."""
    step: Percentiles | None
    """The time of one step."""


class RateWindow:
    """Collects steps. Invariant: holds those of the last `WINDOW_S` on the engine's clock."""

    __slots__ = ("_began_s", "_first_tokens", "_rated_s", "_rates", "_steps")

    def __init__(self) -> None:
        self._began_s: float | None = None
        """When it began to collect, on the engine's clock."""  # written by: add
        self._steps: deque[StepView] = deque()  # written by: add
        self._first_tokens: deque[tuple[float, float]] = deque()
        """For each first token, the time of its view, and the seconds since its request arrived."""  # written by: add
        self._rates: Rates | None = None  # written by: rates
        self._rated_s = 0.0  # written by: rates

    def add(self, view: EngineView) -> None:
        """Add the steps of a view."""
        if self._began_s is None:
            self._began_s = view.now_s
        self._steps.extend(view.steps)
        self._first_tokens.extend((view.now_s, after_s) for after_s in view.first_tokens_s)
        oldest_s = view.now_s - WINDOW_S
        while self._steps and self._steps[0].began_s < oldest_s:
            self._steps.popleft()
        while self._first_tokens and self._first_tokens[0][0] < oldest_s:
            self._first_tokens.popleft()

    def rates(self, now_s: float) -> Rates:
        """Return the rates at a time on the engine's clock; after a while they are computed once a second."""
        began_s = now_s if self._began_s is None else self._began_s
        if self._rates is None or now_s - self._rated_s >= RATE_EVERY_S or now_s - began_s < 2 * RATE_EVERY_S:
            self._rates, self._rated_s = self._computed(now_s), now_s
        return self._rates

    def _computed(self, now_s: float) -> Rates:
        began_s = now_s if self._began_s is None else self._began_s
        span_s = min(max(now_s - began_s, 0.25), RATE_WINDOW_S)
        last: list[StepView] = []
        for step in reversed(self._steps):
            if step.began_s < now_s - span_s:
                break
            last.append(step)
        num_cached = sum(step.num_cached_tokens for step in last)
        num_prompt = sum(step.num_prompt_tokens for step in last)
        took_s = [step.took_s for step in self._steps]
        return Rates(
            output_tokens=round(sum(step.num_decode_tokens for step in last) / span_s, 2),
            prompt_tokens=round(num_prompt / span_s, 2),
            steps=round(len(last) / span_s, 2),
            admitted=round(sum(step.num_admitted for step in last) / span_s, 2),
            busy=round(min(1.0, sum(step.took_s for step in last) / span_s), 3),
            cached_share=round(num_cached / (num_cached + num_prompt), 4) if num_cached + num_prompt else None,
            first_token=percentiles([after_s for _, after_s in self._first_tokens]),
            between_tokens=percentiles(took_s, weights=[step.num_decodes for step in self._steps]),
            step=percentiles(took_s),
        )


def percentiles(values: Sequence[float], *, weights: Sequence[int] | None = None) -> Percentiles | None:
    """Return the smallest values that 50, 90 and 99 % of the weight do not exceed; None without any weight."""
    if not values:
        return None
    numbers: Floats = np.asarray(values, np.float64)
    order: NDArray[np.intp] = np.argsort(numbers)
    each: Floats = np.ones(len(values)) if weights is None else np.asarray(weights, np.float64)[order]
    below: Floats = np.cumsum(each)
    if not below[-1]:
        return None
    places = [int(np.searchsorted(below, share * float(below[-1]))) for share in (0.5, 0.9, 0.99)]
    return Percentiles(*(round(float(numbers[order[place]]), 6) for place in places))
