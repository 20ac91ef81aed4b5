"""Ranks that are silent, or stand still, before they are ready; and the progress that all ranks have together."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from group_in_threads import ranks_are_threads
from pagewood.engine.api import EngineConfig
from pagewood.engine.assembly.cpu import build as build_cpu
from pagewood.engine.build import build_engine
from pagewood.engine.core.loop import RunnerLostError
from pagewood.engine.links import MemoryInbox, MemoryOutbox
from pagewood.engine.offline.llm import LLM
from pagewood.engine.runner.ranks.early_beats import Standstill, early_beats
from pagewood.engine.runner.ranks.group import Group, RankProcess, spawn
from pagewood.engine.runner.ranks.joint_progress import JointProgress
from pagewood.engine.runner.ranks.messages import Doing, StartSpans
from pagewood.engine.runner.ranks.pulse import Pulse
from pagewood.engine.runner.ranks.rank_names import RankNames
from pagewood.engine.runner.ranks.segment import Segment, mapped, segment_bytes, shared_memory

CONFIG = EngineConfig(tensor_parallel_size=2, num_threads=2, max_running=2, max_total_tokens=256)
SILENT = "rank 1 has given no sign of life for"


def segment_of(count: int) -> Segment:
    return Segment.in_memory(np.zeros(segment_bytes(count), np.uint8), count)


@pytest.fixture
def beating() -> Any:
    """Return a function that starts the pulse of a rank; all are stopped in the end."""
    pulses: list[Pulse] = []

    def start(segment: Segment, rank: int, **options: Any) -> Pulse:
        pulses.append(Pulse(segment, rank, on_end=lambda: None, **options))
        return pulses[-1]

    yield start
    for pulse in pulses:
        pulse.stop()


def test_a_rank_that_is_silent_before_it_is_ready_ends_the_group(beating: Any) -> None:
    segment = segment_of(3)
    beating(segment, 2)
    beating(segment, 0, loading_s=0.3)  # rank 1 has been silent for longest
    assert (segment.wait_for_end(60) or "").startswith(SILENT)


def test_silence_counts_later_only_while_something_is_awaited(beating: Any) -> None:
    segment = segment_of(2)
    pulse = beating(segment, 0, loading_s=60, heartbeat_s=0.2)
    pulse.begin()
    assert segment.wait_for_end(0.6) is None
    with pulse.awaiting():
        assert (segment.wait_for_end(60) or "").startswith(SILENT)


def test_a_rank_that_stands_still_is_silent_until_it_goes_on(beating: Any) -> None:
    segment, is_still = segment_of(2), threading.Event()
    is_still.set()
    pulse = beating(segment, 1, stands_still=is_still.is_set)
    time.sleep(0.3)
    assert segment.beats[:, 0].tolist() == [0, 0]
    pulse.begin()  # it is ready, so it need not load
    while not segment.beats[1, 0]:
        time.sleep(0.01)


def test_a_process_stands_still_when_it_uses_no_processor_and_waits_for_no_other() -> None:
    now_s, used = 0.0, 0.0
    standstill = Standstill(used_s=lambda: used, clock=lambda: now_s)
    for used_s, is_waiting, expected in (
        (0.0, False, True),
        (0.005, False, True),  # next to nothing
        (1.0, False, False),
        (1.0, True, False),
        (1.0, False, True),
    ):
        used, standstill.is_waiting = used_s, is_waiting
        now_s += 100
        assert not standstill.is_found() or expected
        now_s += 25
        assert standstill.is_found() == expected


@pytest.mark.parametrize("count", [2, 5])
def test_beats_before_anything_is_imported_are_those_of_the_rank(count: int) -> None:
    descriptor = shared_memory(segment_bytes(count))
    segment = Segment.in_memory(mapped(descriptor), count)
    with early_beats(descriptor, Segment.beats_at(count - 1, count)):
        while segment.beats[-1, 0] < 2:
            time.sleep(0.01)
    before = segment.beats[:, 0].tolist()
    assert before[:-1] == [0] * (count - 1)
    time.sleep(0.25)
    assert segment.beats[:, 0].tolist() == before
    os.close(descriptor)


def test_all_ranks_have_one_progress() -> None:
    progress = JointProgress(RankNames(3))
    found: list[tuple[str, int, int]] = []
    for rank, what, done, total in (
        (0, "reading weights", 1, 10),
        (1, "reading weights", 2, 10),
        (2, "reading weights", 3, 10),
        (1, "compiling", 0, 4),
        (0, "compiling", 1, 4),
        (2, "compiling", 2, 4),
    ):
        progress.note(rank, Doing(what=what, done=done, total=total))
        report = progress.report()
        found.append((report.what, report.done, report.total))
    assert found == [
        ("ranks 1, 2: starting; rank 0: reading weights", 0, 2),
        ("rank 2: starting; ranks 0, 1: reading weights", 0, 1),
        ("reading weights", 6, 30),
        ("ranks 0, 2: reading weights; rank 1: compiling", 4, 20),
        ("rank 2: reading weights; ranks 0, 1: compiling", 3, 10),
        ("compiling", 3, 12),
    ]


def test_the_progress_names_the_nodes_of_ranks() -> None:
    progress = JointProgress(RankNames(4, per_node=2))
    for rank in (0, 2):
        progress.note(rank, Doing(what="reading weights", done=0, total=1))
    assert (
        progress.report().what
        == "node 0 rank 1, node 1 rank 3: starting; node 0 rank 0, node 1 rank 2: reading weights"
    )
    progress.note(1, Doing(what="reading weights", done=0, total=1))
    assert progress.report().what == "node 1 rank 3: starting; node 0 ranks 0, 1, node 1 rank 2: reading weights"


def nothing(*_: object) -> None:
    """Do nothing."""


def slowly(*_: object) -> None:
    """Take some time."""
    time.sleep(0.05)


def built(**options: Any) -> None:
    engine = build_engine(CONFIG, inbox=MemoryInbox(), outbox=MemoryOutbox(), **options)
    engine.close()


def test_a_start_reports_what_all_ranks_do(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks_are_threads(monkeypatch)
    found: list[tuple[str, int, int]] = []

    def progress(what: str, done: int, total: int) -> None:
        found.append((what, done, total))

    built(progress=progress)
    assert any("rank 1: " in what and "rank 0: " in what for what, _, _ in found)
    assert found[-1] == ("ready", 2, 2)
    assert all(0 <= done <= total for _, done, total in found)


class Silent:
    """Satisfies `RankProcess`: it lives, and does nothing."""

    pid = 0

    def __init__(self, connection: int) -> None:
        self._connection = os.dup(connection)
        self._is_alive = True

    def poll(self) -> int | None:
        return None if self._is_alive else -9

    def wait(self, timeout: float | None = None) -> int:
        assert not self._is_alive
        return -9

    def kill(self) -> None:
        self._is_alive = False
        os.close(self._connection)


def test_a_silent_rank_ends_the_start_with_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(label: str, connection: int, descriptors: Sequence[int]) -> RankProcess:
        return Silent(connection)

    monkeypatch.setattr(build_cpu, "Group", partial(Group, spawn=start, loading_s=0.3))
    with pytest.raises(RunnerLostError, match=SILENT):
        built()


def test_a_rank_that_takes_no_messages_ends_its_group() -> None:
    """It is silent, and the connection is full."""

    def start(label: str, connection: int, descriptors: Sequence[int]) -> RankProcess:
        return Silent(connection)

    group = Group(CONFIG, 2, spawn=start, heartbeat_s=0.3, loading_s=60)
    group._pulse.begin()  # pyright: ignore[reportPrivateUsage]

    def tell_for_ever() -> None:
        while True:
            group.tell_all(StartSpans())

    with pytest.raises(RunnerLostError, match=SILENT):
        tell_for_ever()
    group.close()


def test_rank_0_does_not_load_on_when_another_one_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(label: str, connection: int, descriptors: Sequence[int]) -> RankProcess:
        process = Silent(connection)
        process.kill()
        return process

    monkeypatch.setattr(build_cpu, "Group", partial(Group, spawn=start))
    monkeypatch.setattr(Group, "tell", nothing)  # it ends later than it gets its first message
    monkeypatch.setattr(Group, "answers", None)  # not reached
    with pytest.raises(RunnerLostError, match="rank 1 has ended with code -9"):
        built(progress=slowly)


@pytest.mark.slow
@pytest.mark.parametrize("moment_s", [0.0, 0.3, 1.0, 2.0, 3.0, 4.0])
def test_a_stopped_rank_ends_the_start(moment_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a limit of three seconds instead of thirty."""
    pids: list[int] = []

    def start(label: str, connection: int, descriptors: Sequence[int]) -> RankProcess:
        process = spawn(label, connection, descriptors)
        pids.append(process.pid)
        threading.Timer(moment_s, os.kill, (process.pid, signal.SIGSTOP)).start()
        return process

    monkeypatch.setattr(build_cpu, "Group", partial(Group, spawn=start, loading_s=3.0))
    with pytest.raises(RunnerLostError, match=SILENT):
        built(progress=slowly)
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


@pytest.mark.slow
def test_a_rank_that_hangs_while_it_loads_ends_the_start() -> None:
    """It still beats, but for two minutes it uses no processor."""
    with pytest.raises(RunnerLostError, match=SILENT):
        LLM(tensor_parallel_size=2, num_threads=2, logits_processors=(("none", "hangs_in_ranks:nothing"),))
