"""The measurements of an engine as a message: the fields of the engine's `core.observe.measures.Measurement`."""

from __future__ import annotations

import msgspec

Counts = tuple[tuple[float, ...], tuple[int, ...], float]
"""Bounds, counts and total of a `pagewood.engine.observe.histogram.Histogram`."""


class Queue(msgspec.Struct, frozen=True, kw_only=True):
    """The live requests of the engine by priority; see `core.observe.measures.Queue`."""

    waiting: dict[str, int] = {}
    running: dict[str, int] = {}
    oldest_s: float = 0.0


class ExpertLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of experts; see `core.observe.expert_load.ExpertLoad`."""

    rank_rows: tuple[int, ...]
    rank_imbalance: float
    expert_imbalance: float
    rows: dict[str, tuple[int, ...]]


class AdapterUse(msgspec.Struct, frozen=True, kw_only=True):
    """The adapters of live requests; see `core.observe.measures.AdapterUse`."""

    num_slots: int
    running: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """Sums since the engine was built, queues at the time of the pulse."""

    stage_s: dict[str, float]
    step_s: Counts
    step_tokens: Counts
    num_prefill_tokens: int
    num_decode_tokens: int
    num_available_pages: int
    num_evicted_pages: int
    preempted: dict[str, int]
    queue: Queue
    num_parked: int
    num_at_quota: int
    num_compiling: int
    num_recalling: int
    tiers: dict[str, int]
    experts: ExpertLoad | None = None
    adapters: AdapterUse | None = None
