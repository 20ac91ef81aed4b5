"""Jobs that the engine's thread shares with helpers: each runs once, helpers come only where work is long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

import pytest

from pagewood.engine.core.masks.shared_work import SharedWork


def note(done: list[tuple[int, int]], index: int, seconds: float = 0.0) -> None:
    time.sleep(seconds)
    done.append((index, threading.get_ident()))


@pytest.mark.parametrize("num_helpers", [0, 1, 3])
@pytest.mark.parametrize("num_jobs", [0, 1, 2, 40])
@pytest.mark.parametrize("seconds", [0.0, 0.001])
def test_each_job_runs_once(num_helpers: int, num_jobs: int, seconds: float) -> None:
    work = SharedWork(num_helpers)
    for _ in range(3):
        done: list[tuple[int, int]] = []
        work.run([partial(note, done, index, seconds) for index in range(num_jobs)])
        assert sorted(index for index, _ in done) == list(range(num_jobs))
    work.close()
    work.close()


def test_helpers_share_long_work_only() -> None:
    work = SharedWork(2)
    done: list[tuple[int, int]] = []
    work.run([partial(note, done, index) for index in range(2)])
    assert {thread for _, thread in done} == {threading.get_ident()}
    done.clear()
    together = threading.Barrier(3)

    def long_job(index: int) -> None:
        """Each of three threads has one of the jobs 1 to 3 at the same time."""
        note(done, index, 0.01)
        if 1 <= index <= 3:
            together.wait(60)

    work.run([partial(long_job, index) for index in range(12)])
    assert len({thread for _, thread in done}) == 3
    work.close()


@pytest.mark.parametrize("in_helper", [False, True])
def test_an_error_is_raised_when_no_job_runs_any_more(in_helper: bool) -> None:
    work, caller = SharedWork(1), threading.get_ident()
    running: list[int] = []

    def job() -> None:
        running.append(1)
        time.sleep(0.005)
        running.pop()
        is_late, is_helper = len(work_done) > 2, threading.get_ident() != caller
        if is_late and is_helper == in_helper:
            has_failed.set()
            raise ValueError("a job failed")
        if is_late and in_helper:  # a helper comes, however late
            has_failed.wait(60)
        work_done.append(1)

    work_done: list[int] = []
    has_failed = threading.Event()
    jobs: list[Callable[[], None]] = [job] * 30
    with pytest.raises(ValueError, match="a job failed"):
        work.run(jobs)
    assert not running
    work.run([partial(work_done.append, 2)])
    assert work_done[-1] == 2
    work.close()
