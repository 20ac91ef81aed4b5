"""Profiles of a running engine, as traces that Perfetto and chrome://tracing open.

A profile has the stages of the engine's thread and the work of the device: on a CPU the steps of the runner with the
time of every instruction of the compiled program, on a GPU the record of torch.profiler.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Protocol, runtime_checkable

from pagewood.engine.core.loop import Engine, Runner
from pagewood.engine.core.observe.measures import Stage
from pagewood.engine.runner.ranks.rank_names import RankNames

MAX_SPANS = 100_000
"""Spans of a device in a profile; later ones are counted, but not kept."""
RANK = "rank"
"""Detail of a span: which of the processes that compute a model together has recorded it; without it, rank 0."""
_ENGINE, _DEVICE = 1, 2
_PID = 1_000_000
"""Process id of rank 0 in traces, followed by those of other ranks; process ids of torch's tracks are smaller."""


class Span(NamedTuple):
    """A span of time, seconds on the clock of `time.monotonic`."""

    name: str
    start_s: float
    end_s: float
    details: dict[str, int]


@runtime_checkable
class ProfiledRunner(Protocol):
    """A runner that can record its work."""

    def start_spans(self) -> None:
        """Record from now on; steps become slower."""
        ...

    def take_spans(self) -> tuple[Sequence[Span], int]:
        """Stop recording; return the spans, and the number of spans that did not fit."""
        ...


@runtime_checkable
class WrappingRunner(Protocol):
    """A runner around another one."""

    @property
    def inner(self) -> Runner:
        """The runner that it gives batches to."""
        ...


def profiled(runner: Runner) -> ProfiledRunner | None:
    """Return the runner that can record its work: this one or one inside it; None: no such runner."""
    if isinstance(runner, ProfiledRunner):
        return runner
    return profiled(runner.inner) if isinstance(runner, WrappingRunner) else None


class Profile:
    """One profile. Use it in the engine's thread: `start`, then `stop` once.

    Args:
        engine: to profile; it is measured from now on.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._runner = profiled(engine.runner)
        self._torch: Any = None  # written by: start
        self._started_s = 0.0  # written by: start
        self._first_step = 0  # written by: start

    @property
    def num_steps(self) -> int:
        """Steps that have begun since the start."""
        return self._engine.counters().num_steps - self._first_step

    def start(self) -> None:
        """Record from now on."""
        if self._engine.config.device == "cuda":
            self._torch = _torch_profiler()
            self._torch.start()
        self._started_s = time.monotonic()
        self._first_step = self._engine.counters().num_steps
        self._engine.measure().start_spans()
        if self._runner is not None:
            self._runner.start_spans()

    def stop(self) -> Recorded:
        """Stop recording, and return the record."""
        spans, num_dropped = ((), 0) if self._runner is None else self._runner.take_spans()
        stages = self._engine.measure().take_spans()
        if self._torch is not None:
            self._torch.stop()
        config, places = self._engine.config, self._engine.info.rank_places
        names = RankNames(config.num_ranks, config.pipeline_parallel_size)
        ranks = [f"{names[rank]} on {places[rank]}" if places else names[rank] for rank in range(config.num_ranks)]
        return Recorded(stages, spans, num_dropped, self._started_s, time.monotonic(), self._torch, ranks)


class Recorded(NamedTuple):
    """The record of a profile. `trace` takes long; any thread may call it."""

    stages: Sequence[tuple[int, float, float]]
    spans: Sequence[Span]
    num_dropped: int
    started_s: float
    ended_s: float
    torch: Any
    """torch's profiler, stopped; None: it was not used."""
    names: Sequence[str] = ("rank 0",)
    """Those of the ranks, with their stages and hosts."""

    def trace(self) -> bytes:
        """Return the profile as JSON, in Chrome's format of traces."""
        found: dict[str, Any] = {"traceEvents": [], "displayTimeUnit": "ms"}
        origin_s = self.started_s
        if self.torch is not None:
            found = _torch_trace(self.torch)
            base_s = int(found.get("baseTimeNanoseconds", 0)) * 1e-9
            origin_s = base_s - (time.time() - time.monotonic())
        events: list[dict[str, Any]] = found["traceEvents"]
        events += [
            _named("process_name", 0, "pagewood" if len(self.names) == 1 else f"pagewood, {self.names[0]}"),
            _named("thread_name", _ENGINE, "engine"),
            _named("thread_name", _DEVICE, "device"),
        ]
        for rank, name in enumerate(self.names[1:], 1):
            events.append(_named("process_name", 0, f"pagewood, {name}", rank))
            events.append(_named("thread_name", _DEVICE + rank, f"device, rank {rank}", rank))
        stages = [Span(Stage(stage).name.lower(), start_s, end_s, {}) for stage, start_s, end_s in self.stages]
        events += _events(stages, _ENGINE, origin_s)
        for rank in range(len(self.names)):
            own = [span for span in self.spans if span.details.get(RANK, 0) == rank]
            events += _events(own, _DEVICE + rank, origin_s, rank)
        found["otherData"] = {
            "seconds": round(self.ended_s - self.started_s, 6),
            "dropped_spans": self.num_dropped,
            "summary": summary(self.spans),
        }
        return json.dumps(found).encode()


def summary(spans: Iterable[Span]) -> list[dict[str, Any]]:
    """Return the number and the total seconds of the spans of each name, the longest first."""
    totals: dict[str, tuple[int, float]] = {}
    for span in spans:
        num, seconds = totals.get(span.name, (0, 0.0))
        totals[span.name] = (num + 1, seconds + span.end_s - span.start_s)
    ordered = sorted(totals.items(), key=lambda item: -item[1][1])
    return [{"name": name, "count": num, "seconds": round(seconds, 6)} for name, (num, seconds) in ordered]


def _events(spans: Iterable[Span], track: int, origin_s: float, rank: int = 0) -> list[dict[str, Any]]:
    """Return complete events of a rank, microseconds since `origin_s`."""
    return [
        {
            "name": span.name,
            "ph": "X",
            "pid": _PID + rank,
            "tid": track,
            "ts": round((span.start_s - origin_s) * 1e6, 3),
            "dur": round((span.end_s - span.start_s) * 1e6, 3),
            "args": span.details,
        }
        for span in spans
    ]


def _named(what: str, track: int, name: str, rank: int = 0) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": _PID + rank, "tid": track, "args": {"name": name}}


def _torch_profiler() -> Any:
    from torch.profiler import ProfilerActivity, profile

    return profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])


def _torch_trace(profiler: Any) -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return json.loads(path.read_bytes())
