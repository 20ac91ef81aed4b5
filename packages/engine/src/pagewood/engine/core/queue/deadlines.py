"""Refuses requests on arrival that cannot end by their deadline."""

from __future__ import annotations

from math import inf
from typing import Protocol

import numpy as np

from pagewood.engine.api import Refusal
from pagewood.engine.core.memory.divided_kv import AnyKV
from pagewood.engine.core.queue.state import EngineState
from pagewood.engine.core.request import Request


class Forecast(Protocol):
    """Estimates when requests end, by what steps have taken so far."""

    def lateness(
        self, request: Request, now_s: float, *, num_tokens_ahead: int, num_decode: int, num_kv: int
    ) -> str | None:
        """Return why a request will miss its deadline, or None if it can meet it, or nothing is known yet.

        Args:
            request: waits, with a deadline.
            now_s: time on the engine's clock.
            num_tokens_ahead: prompt tokens that will be computed before its own.
            num_decode: requests that decode.
            num_kv: tokens of KV that these read in a step.
        """
        ...


class Deadlines:
    """Compares arriving requests with the work before them. Invariant: a decision depends on state and clock only.

    Prompts in progress come before an arriving request. So do waiting requests of a higher priority, and those of the
    same priority (where the order is by deadlines: only if their deadline is no later).
    """

    __slots__ = ("_ahead", "_forecast", "_is_by_deadline", "_kv", "_state")

    def __init__(self, state: EngineState, kv: AnyKV, forecast: Forecast, *, is_by_deadline: bool) -> None:
        """Refuse by `forecast`; `is_by_deadline`: whether waiting requests are admitted by their deadlines."""
        self._state = state
        self._kv = kv
        self._forecast = forecast
        self._is_by_deadline = is_by_deadline
        self._ahead: _Ahead | None = None
        """The work of this batch of commands; None: it has not been counted yet."""  # written by: deadlines

    def begin(self) -> None:
        """Begin a batch of commands: the work is counted again when it is needed."""
        self._ahead = None

    def refusal(self, request: Request, now_s: float) -> Refusal | None:
        """Return why a request that has just arrived is refused; None: it is not."""
        if request.deadline_s == inf:
            return None
        if self._ahead is None:
            self._ahead = _Ahead(self._state)
        request.num_matched = self._kv.peek(request)
        reason = self._forecast.lateness(
            request,
            now_s,
            num_tokens_ahead=self._ahead.num_tokens_before(request, is_by_deadline=self._is_by_deadline),
            num_decode=self._ahead.num_decode,
            num_kv=self._ahead.num_kv,
        )
        return None if reason is None else Refusal(message=reason, param="deadline", code="deadline_infeasible")

    def accepted(self, request: Request) -> None:
        """Count a request of this batch that will wait."""
        if self._ahead is not None:
            self._ahead.add(request)


class _Ahead:
    """What an engine has to do: prompts by priority and deadline, and what decodes."""

    __slots__ = ("_deadline_s", "_num", "_num_tokens", "_priority", "num_decode", "num_in_progress", "num_kv")

    def __init__(self, state: EngineState) -> None:
        capacity = max(64, len(state.by_id))
        self._num = 0
        self._priority = np.empty(capacity, np.float64)
        self._deadline_s = np.empty(capacity, np.float64)
        self._num_tokens = np.empty(capacity, np.int64)
        self.num_in_progress = self.num_decode = self.num_kv = 0
        for request in state.by_id.values():
            if request.row < 0:
                self.add(request)
            elif request.num_launched < request.num_prompt:
                self.num_in_progress += request.num_prompt - request.num_launched
            else:
                self.num_decode += 1
                self.num_kv += request.num_launched

    def add(self, request: Request) -> None:
        """Count a waiting request."""
        if self._num == len(self._priority):
            for name in ("_priority", "_deadline_s", "_num_tokens"):
                setattr(self, name, np.resize(getattr(self, name), 2 * self._num))
        place, self._num = self._num, self._num + 1
        self._priority[place] = request.priority
        self._deadline_s[place] = request.deadline_s
        self._num_tokens[place] = request.num_known - request.num_matched

    def num_tokens_before(self, request: Request, *, is_by_deadline: bool) -> int:
        """Return the prompt tokens that are computed before those of an arriving request."""
        priority = self._priority[: self._num]
        is_before = priority >= request.priority
        if is_by_deadline:
            is_before &= (priority > request.priority) | (self._deadline_s[: self._num] <= request.deadline_s)
        return self.num_in_progress + int(self._num_tokens[: self._num][is_before].sum())
