"""Profiles: tracks on one clock, bounded, in a form that Perfetto opens."""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from pagewood.engine.core.observe.measures import Stage
from pagewood.engine.observe.profiling import Recorded, Span, profiled, summary
from pagewood.engine.runner.cpu.populate import PopulatingRunner
from pagewood.engine.runner.cpu.program import spans as cpu_spans
from pagewood.engine.runner.cpu.program.spans import RunnerSpans


def events(recorded: Recorded) -> list[dict[str, Any]]:
    return [one for one in json.loads(recorded.trace())["traceEvents"] if one["ph"] == "X"]


@pytest.mark.slow
def test_our_spans_and_those_of_torch_have_one_clock() -> None:
    """What torch records of a function lies within what we record around it."""
    profiler = profile(activities=[ProfilerActivity.CPU])
    profiler.start()
    time.sleep(0.02)
    began_s = time.monotonic()
    with record_function("ours"):
        torch.matmul(torch.ones(100, 100), torch.ones(100, 100))
        time.sleep(0.01)
    ended_s = time.monotonic()
    profiler.stop()
    found = events(Recorded([(int(Stage.WAIT), began_s, ended_s)], (), 0, began_s - 1, ended_s, profiler))
    (theirs,) = [one for one in found if one["name"] == "ours"]
    (stage,) = [one for one in found if one["name"] == "wait"]
    slack_us = 2000  # their clock is converted
    assert stage["ts"] - slack_us <= theirs["ts"]
    assert theirs["ts"] + theirs["dur"] <= stage["ts"] + stage["dur"] + slack_us


def test_without_torch_times_begin_with_the_profile() -> None:
    spans = [Span("step", 10.5, 10.75, {"instructions": 2}), Span("attend", 10.5, 10.6, {"rows": 1})]
    (stage, step, attend) = events(Recorded([(int(Stage.PLAN), 10.25, 10.5)], spans, 7, 10.0, 11.0, None))
    assert (stage["name"], stage["ts"], stage["dur"]) == ("plan", 250_000, 250_000)
    assert (step["ts"], step["dur"], step["args"]) == (500_000, 250_000, {"instructions": 2})
    assert (stage["tid"], step["tid"], attend["tid"]) == (1, 2, 2)
    other = json.loads(Recorded((), spans, 7, 10.0, 11.0, None).trace())["otherData"]
    assert (other["seconds"], other["dropped_spans"]) == (1.0, 7)


def test_each_rank_has_a_track_of_its_own() -> None:
    spans = [Span("step", 10.5, 10.75, {}), Span("step", 10.5, 10.75, {"rank": 1})]
    recorded = Recorded((), spans, 0, 10.0, 11.0, None, ["rank 0 (stage 0)", "rank 1 (stage 1) on node 1"])
    found = json.loads(recorded.trace())["traceEvents"]
    named = [(one["name"], one["pid"], one["args"]["name"]) for one in found if "ts" not in one]
    first, second = [one["pid"] for one in found if "ts" in one]
    assert named == [
        ("process_name", first, "pagewood, rank 0 (stage 0)"),
        ("thread_name", first, "engine"),
        ("thread_name", first, "device"),
        ("process_name", second, "pagewood, rank 1 (stage 1) on node 1"),
        ("thread_name", second, "device, rank 1"),
    ]
    assert first != second
    assert [one["tid"] for one in events(recorded)] == [2, 3]


def test_the_summary_has_the_longest_first() -> None:
    spans = [Span("a", 0, 1, {}), Span("b", 1, 4, {}), Span("a", 4, 5.5, {})]
    assert summary(spans) == [
        {"name": "b", "count": 1, "seconds": 3.0},
        {"name": "a", "count": 2, "seconds": 2.5},
    ]


class Instructions:
    """As many instructions as their numbers of rows, which do nothing."""

    def __init__(self, rows: list[int]) -> None:
        self.instructions = np.zeros(len(rows))
        self._rows = rows

    def start(self, counts: object, scopes: object, *, first: int, last: int) -> Instructions:
        return self

    def work(self) -> None:
        pass

    def described(self, place: int, counts: object) -> tuple[str, dict[str, int]]:
        return f"number {place}", {"rows": self._rows[place]}


def test_spans_of_a_runner_are_bounded_and_leave_out_what_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_spans, "MAX_SPANS", 10)
    program: Any = Instructions([3, 0, 1, 4])
    spans = RunnerSpans()
    for _ in range(4):
        spans.begin(program, np.zeros(1, np.int64), np.zeros(1, np.int64), first=1, last=None).measure()
    found, num_dropped = spans.taken()
    assert [span.name for span in found[:4]] == ["step", "number 2", "number 3", "step"]
    assert (len(found), num_dropped) == (10, 2)
    assert all(span.start_s <= span.end_s for span in found)


def test_a_runner_inside_another_one_is_found() -> None:
    class Inner:
        def start_spans(self) -> None: ...
        def take_spans(self) -> tuple[list[Span], int]:
            return [], 0

    inner: Any = Inner()
    wrapped: Any = PopulatingRunner(PopulatingRunner(inner, None), None)  # type: ignore[arg-type]
    assert profiled(wrapped) is inner
    plain: Any = object()
    assert profiled(plain) is None
