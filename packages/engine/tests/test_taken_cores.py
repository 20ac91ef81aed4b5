"""When cores count as taken: by the times that Linux counts for each thread."""

import multiprocessing
import os
import threading
import time
from pathlib import Path

import pytest

from pagewood.engine.runner.cpu.taken_cores import TakenCores


class Counted:
    """Folders of threads whose times the test sets, and the clock."""

    def __init__(self, folder: Path, num_threads: int) -> None:
        self.now_s = 100.0
        self._files = [folder / str(tid) / "schedstat" for tid in range(num_threads)]
        for file in self._files:
            file.parent.mkdir()
            file.write_text("0 0 0\n")

    def end_first(self) -> None:
        """Let the first thread end."""
        self._files.pop(0).unlink()

    def pass_time(self, seconds: float, waiting_share: float) -> None:
        """Let all threads be ready all the time, and wait for a part of it."""
        self.now_s += seconds
        for file in self._files:
            run_ns, wait_ns, _ = map(int, file.read_text().split())
            ran_ns, waited_ns = seconds * (1 - waiting_share) * 1e9, seconds * waiting_share * 1e9
            file.write_text(f"{run_ns + round(ran_ns)} {wait_ns + round(waited_ns)} 7\n")


def test_cores_are_taken_while_threads_wait_for_them(tmp_path: Path) -> None:
    counted = Counted(tmp_path, 3)
    taken = TakenCores(tmp_path, clock=lambda: counted.now_s)
    seen: list[bool] = []
    for share in (0.02, 0.2, 0.5, 0.2, 0.15, 0.05, 0.2, 0.3):
        counted.pass_time(0.2, share)
        seen.append(taken())
    assert seen == [False, False, True, True, True, False, False, True]


def test_it_looks_ten_times_a_second(tmp_path: Path) -> None:
    counted = Counted(tmp_path, 1)
    taken = TakenCores(tmp_path, clock=lambda: counted.now_s)
    counted.pass_time(1.0, 0.0)
    assert not taken()
    counted.pass_time(0.09, 1.0)
    assert not taken()
    counted.pass_time(0.02, 1.0)
    assert not taken()  # threads that have not run at all: nothing is known of a step
    counted.pass_time(0.2, 0.9)
    assert taken()


def test_without_the_counters_no_core_is_taken(tmp_path: Path) -> None:
    assert not TakenCores(tmp_path / "missing")()
    thread = tmp_path / "1"
    thread.mkdir()
    (thread / "schedstat").write_text("")
    assert not TakenCores(tmp_path)()


def test_a_thread_that_has_ended_is_left_out(tmp_path: Path) -> None:
    counted = Counted(tmp_path, 2)
    taken = TakenCores(tmp_path, clock=lambda: counted.now_s)
    counted.pass_time(10.0, 0.5)
    assert taken()
    counted.end_first()
    counted.pass_time(0.2, 0.0)
    taken()  # its times are gone from the sums
    counted.pass_time(0.2, 0.0)
    assert not taken()


def _spin(core: int, seconds: float) -> None:
    os.sched_setaffinity(0, {core})
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        pass


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the system does not count these times")
def test_a_busy_process_on_the_same_core_is_noticed() -> None:
    """A thread of this process and three processes share a core, so the thread waits for three quarters of the time."""
    core = min(os.sched_getaffinity(0))
    noticed = threading.Event()

    def compute() -> None:
        os.sched_setaffinity(0, {core})
        taken, end_s = TakenCores(), time.monotonic() + 60
        while not noticed.is_set() and time.monotonic() < end_s:
            if taken():
                noticed.set()

    context = multiprocessing.get_context("spawn")
    others = [context.Process(target=_spin, args=(core, 120.0)) for _ in range(3)]
    for other in others:
        other.start()
    try:
        thread = threading.Thread(target=compute)
        thread.start()
        thread.join()
    finally:
        for other in others:
            other.kill()
            other.join()
    assert noticed.is_set()
