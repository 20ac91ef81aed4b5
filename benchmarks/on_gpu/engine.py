"""Measures the whole engine: time to the first token of a long prompt, and the share of time the device is idle."""

# pyright: basic
# torch's profiler is typed in part only.

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from on_gpu.subject import PAGE_SIZE, Subject
from pagewood.engine.api import EngineConfig, SamplingParams, Submit
from pagewood.engine.assemble import assemble
from pagewood.engine.core.loop import Engine, EngineInfo, Pending
from pagewood.engine.links import MemoryInbox, MemoryOutbox

_PROFILED_STEPS = 32
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of trace events that run on the device."""
_HOST_GAP_US = 10.0
"""Longer gaps are waits for the host; the gap between two kernels of a graph is about 1 us."""


class Session:
    """An engine over the subject's runner, with its requests."""

    def __init__(self, subject: Subject, *, overlap: bool, num_requests: int, length: int, max_tokens: int) -> None:
        """Submit random prompts of `length` tokens."""
        plan = subject.plan
        self._inbox, self._outbox = MemoryInbox(), MemoryOutbox()
        self.engine: Engine = assemble(
            EngineConfig(
                max_running=max(plan.batches), chunked_prefill_size=plan.chunk, overlap=overlap, prefix_cache=False,
                page_size=PAGE_SIZE,
            ),
            info=EngineInfo(
                model_name="random", max_length=plan.max_length, vocab_size=plan.model.vocab_size, eos_token_ids=(),
                num_pages=subject.num_pages, page_size=PAGE_SIZE,
            ),
            make_runner=lambda _: subject.runner,
            inbox=self._inbox,
            outbox=self._outbox,
        )  # fmt: skip
        rng = np.random.default_rng(0)
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        for number in range(num_requests):
            tokens = rng.integers(0, plan.model.vocab_size, length).astype("<i4").tobytes()
            self._inbox.put(Submit(request_id=str(number), tokens=tokens, sampling=sampling))
        self._pending: Pending | None = None
        self.num_started = 0
        self.num_finished = 0

    def step(self) -> None:
        """Run one step.

        Raises:
            RuntimeError: a request was refused or failed.
        """
        self._pending = self.engine.advance(self._pending)
        for delta in self._outbox.take():
            if delta.finish is not None and delta.finish.value not in ("stop", "length"):
                raise RuntimeError(f"request {delta.request_id} ended with {delta.finish.value}: {delta.refusal}")
            self.num_started += delta.first
            self.num_finished += delta.finish is not None


def first_token_seconds(subject: Subject) -> float:
    """Return the seconds from submitting a long prompt to its first token; the second of two runs."""
    seconds = 0.0
    for _ in range(2):
        session = Session(subject, overlap=True, num_requests=1, length=subject.plan.long_prompt, max_tokens=1)
        start_s = perf_counter()
        while not session.num_finished:
            session.step()
        seconds = perf_counter() - start_s
    return seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Idle:
    """Shares of a span of time."""

    share: float
    """Share in which nothing runs on the device, including the gaps between kernels that no host can avoid."""
    for_host: float
    """Share in gaps so long that the device waits for the host."""


def idle_share(subject: Subject, *, overlap: bool) -> Idle | None:
    """Return the idle shares of the device during decode steps, or None if the trace has no device events."""
    plan = subject.plan
    session = Session(
        subject, overlap=overlap, num_requests=plan.idle_batch, length=plan.idle_context,
        max_tokens=3 * _PROFILED_STEPS,
    )  # fmt: skip
    while session.num_started < plan.idle_batch:
        session.step()
    for _ in range(4):
        session.step()
    activities = [torch.profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else None
    warm = torch.profiler.schedule(wait=0, warmup=4, active=_PROFILED_STEPS, repeat=1)  # it starts slowly
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "trace.json")
        with torch.profiler.profile(
            activities=activities, schedule=warm, on_trace_ready=lambda done: done.export_chrome_trace(path)
        ) as profiler:
            for _ in range(4 + _PROFILED_STEPS):
                session.step()
                profiler.step()
        spans = device_spans(json.loads(Path(path).read_text()))
    while session.num_finished < plan.idle_batch:
        session.step()
    return idle_of(spans)


def device_spans(trace: Mapping[str, Any]) -> list[tuple[float, float]]:
    """Return (start, end) in microseconds of the events of a trace that ran on the device."""
    return [
        (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        for event in trace["traceEvents"]
        if event.get("ph") == "X" and event.get("cat") in _ON_DEVICE
    ]


def idle_of(spans: Iterable[tuple[float, float]]) -> Idle | None:
    """Return the share of the time from first start to last end that no span covers, or None if no time passed."""
    ordered = sorted(spans)
    if not ordered:
        return None
    first = end = ordered[0][0]
    gaps: list[float] = []
    for start, stop in ordered:
        gaps.append(max(0.0, start - end))
        end = max(end, stop)
    if end == first:
        return None
    return Idle(
        share=sum(gaps) / (end - first), for_host=sum(gap for gap in gaps if gap > _HOST_GAP_US) / (end - first)
    )
