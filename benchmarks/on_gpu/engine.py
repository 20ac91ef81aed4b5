"""The whole engine: time to the first token of a long prompt, and the share of time in which the device idles."""

# pyright: basic
# torch's profiler is typed in part only.

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from on_gpu.subject import PAGE_SIZE, Subject
from pagewood.engine.api import EngineConfig, SamplingParams, Submit
from pagewood.engine.build import assemble
from pagewood.engine.loop import Engine, EngineInfo, Pending
from pagewood.engine.memory import MemoryInbox, MemoryOutbox

_PROFILED_STEPS = 32
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of a trace."""


class Session:
    """An engine over the subject's runner, and its requests."""

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
        """Go on by one step.

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
    """Return the seconds from submitting a long prompt to its first token; the second of two tries."""
    seconds = 0.0
    for _ in range(2):
        session = Session(subject, overlap=True, num_requests=1, length=subject.plan.long_prompt, max_tokens=1)
        start_s = perf_counter()
        while not session.num_finished:
            session.step()
        seconds = perf_counter() - start_s
    return seconds


def idle_share(subject: Subject, *, overlap: bool) -> float | None:
    """Return the share of a span of decode steps in which nothing runs on the device; None: no device was seen."""
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
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(_PROFILED_STEPS):
            session.step()
        subject.device.finish()
    while session.num_finished < plan.idle_batch:
        session.step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        spans = device_spans(json.loads(path.read_text()))
    return idle_of(spans)


def device_spans(trace: Mapping[str, Any]) -> list[tuple[float, float]]:
    """Return (start, end) in microseconds of what a trace says ran on the device."""
    return [
        (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        for event in trace["traceEvents"]
        if event.get("ph") == "X" and event.get("cat") in _ON_DEVICE
    ]


def idle_of(spans: Iterable[tuple[float, float]]) -> float | None:
    """Return the share of the time from the first start to the last end that no span covers; None: no time passed."""
    ordered = sorted(spans)
    if not ordered:
        return None
    busy, first, end = 0.0, ordered[0][0], ordered[0][0]
    for start, stop in ordered:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return 1 - busy / (end - first) if end > first else None
