"""Durations of steps, measured while the engine runs: for prompts cut to a target, and for deadlines."""

from __future__ import annotations

from typing import Protocol

from pagewood.engine.api import EngineConfig
from pagewood.engine.core.request import Request
from pagewood.schedpolicy import DynamicChunk, Feasibility, Load, StepModel, StepSample

_FEWEST_PREFILL_TOKENS = 16
"""Least prompt tokens of a step that has a target, so that prompts make progress."""


class MeasuredChunk(DynamicChunk):
    """`core.steps.pacing.Chunking` by schedpolicy's model of steps, which is empty until it is fitted."""

    __slots__ = ("_initial",)

    def __init__(self, config: EngineConfig, page_size: int) -> None:
        """Measure the steps of an engine; `tokens` returns the prompt tokens that fit into `config.target_step_s`."""
        target_s = config.target_step_s or 1.0
        self._initial = StepModel(base_s=0.0, prefill_s=target_s / config.max_chunk_tokens, decode_s=0.0, kv_s=0.0)
        super().__init__(
            self._initial,
            target_s=target_s,
            max_tokens=max(config.max_chunk_tokens, page_size),
            min_tokens=min(_FEWEST_PREFILL_TOKENS, config.max_chunk_tokens),
            page_size=page_size,
            window=256,
            refit_every=16,
        )

    @property
    def fitted(self) -> StepModel | None:
        """The model fitted to the latest steps; None: too few steps were measured."""
        return None if self.model is self._initial else self.model

    def record(self, *, num_prefill: int, num_decode: int, num_kv: int, seconds: float) -> None:
        """Record the duration of a step."""
        self.observe(StepSample(num_prefill, num_decode, num_kv, seconds))


class Expectation(Protocol):
    """The part of their allowed output that requests are expected to generate."""

    @property
    def ratio(self) -> float:
        """The part, in [0, 1]."""
        ...


class StepForecast:
    """`core.queue.deadlines.Forecast` by the measured steps of an engine. A past deadline is always missed.

    A request that only its length ends generates all of its output. Other requests are expected to generate the part
    for which the engine keeps memory, so that a high limit does not cause a refusal for tokens that are unlikely.
    """

    __slots__ = ("_chunk", "_expectation", "_max_chunk_tokens", "_paces")

    def __init__(self, chunk: MeasuredChunk, expectation: Expectation, config: EngineConfig) -> None:
        """Estimate by the steps that `chunk` has measured, and by the outputs that `expectation` expects."""
        self._chunk = chunk
        self._expectation = expectation
        self._max_chunk_tokens = config.max_chunk_tokens
        self._paces = config.target_step_s is not None

    def lateness(
        self, request: Request, now_s: float, *, num_tokens_ahead: int, num_decode: int, num_kv: int
    ) -> str | None:
        """Return why a request will miss its deadline, or None if it can meet it or no step was measured yet."""
        left_s = request.deadline_s - now_s
        if left_s <= 0:
            return f"the deadline must be in the future, but it was {-left_s:.3f} s ago"
        model = self._chunk.fitted
        if model is None:
            return None
        chunk_tokens = self._max_chunk_tokens
        if self._paces:
            chunk_tokens = self._chunk.tokens(num_decode=num_decode, num_kv=num_kv)
        feasibility = Feasibility(
            model=model,
            chunk_tokens=chunk_tokens,
            output_ratio=self._expectation.ratio if request.stop_ids else 1.0,
        )
        load = Load(num_prompt_tokens_ahead=num_tokens_ahead, num_decode=num_decode, num_kv=num_kv)
        late = feasibility.check(request, now_s, load)
        if late is None:
            return None
        return (
            f"the request is expected to take {late.expected_s - now_s:.3f} s, with {num_tokens_ahead} prompt tokens "
            f"before its own, but its deadline is in {left_s:.3f} s"
        )
