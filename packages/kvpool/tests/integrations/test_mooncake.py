# pyright: basic
"""The store over a real cluster of Mooncake: `mooncake_master` and clients over TCP, without a GPU."""

import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from threading import Thread

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from pagewood.kvpool.tiers import Breaker
from pagewood.kvpool.tiers.testing import store_conformance

pytest.importorskip("mooncake.store", exc_type=ImportError)
from mooncake_cluster import free_port, master_process
from pagewood.kvpool.integrations import mooncake
from pagewood.kvpool.integrations.mooncake import MooncakePlace, MooncakeStore
from peer_process import peer_process

PATIENT_S = 60.0
"""A limit that no working call reaches."""


@pytest.fixture(scope="module")
def master() -> Iterator[int]:
    """A master of its own; returns its port."""
    with master_process() as (port, _):
        yield port


def place(port: int, timeout_s: float = PATIENT_S) -> MooncakePlace:
    return MooncakePlace(master="127.0.0.1", port=port, timeout_s=timeout_s)


def join(port: int, *, timeout_s: float = PATIENT_S, **options) -> MooncakeStore:
    return MooncakeStore(place(port, timeout_s), **{"page_bytes": 4096, "num_bytes": 64 << 20, **options})


def peer(port: int, num_pages: int) -> AbstractContextManager[subprocess.Popen[str]]:
    """A process that gives memory, with pages under the fingerprint b"peer"."""
    options = "page_bytes=4096, num_bytes=64 << 20, fingerprint=b'peer'"
    store = f"MooncakeStore(MooncakePlace.parse({str(place(port))!r}), {options})"
    return peer_process(store, num_pages=num_pages, page_bytes=4096)


def pages(number: int, seed: int, page_bytes: int = 4096) -> list[np.ndarray]:
    return list(np.random.default_rng(seed).integers(0, 256, (number, page_bytes), np.uint8))


def keys(number: int) -> list[bytes]:
    return [index.to_bytes(32, "big") for index in range(number)]


def until(holds: Callable[[], bool]) -> None:
    """Call until it holds; calls that fail are failures of the cluster meanwhile."""
    deadline_s = time.monotonic() + 120
    while True:
        try:
            if holds():
                return
        except OSError:
            pass
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def test_conformance(master: int) -> None:
    """All calls of the random machine; every example has pages of its own."""
    made: list[MooncakeStore] = []

    def make(page_bytes: int) -> MooncakeStore:
        made.append(join(master, page_bytes=page_bytes, fingerprint=os.urandom(8)))
        return made[-1]

    machine = store_conformance(make)
    machine.TestCase.settings = settings(
        max_examples=4,
        stateful_step_count=15,
        deadline=None,
        suppress_health_check=(HealthCheck.too_slow, HealthCheck.filter_too_much),
    )
    machine.TestCase().runTest()


def test_two_processes_share_pages(master: int) -> None:
    """More pages than one call has room for."""
    number = 2500
    given = pages(number, 0)
    with peer(master, number):
        mine = join(master, fingerprint=b"peer", num_bytes=0)
        assert len(mine._lanes[0].rows) < number
        found = np.zeros((number + 1, 4096), np.uint8)
        assert mine.get(keys(number + 1), list(found)) == [True] * number + [False]
        assert np.array_equal(found[:number], np.stack(given))
        assert mine.exists(keys(number + 1)) == [True] * number + [False]
        other = join(master, fingerprint=b"other model", num_bytes=0)
        assert other.exists(keys(3)) == [False] * 3
        other.close()
        mine.close()


def test_a_damaged_page_is_a_miss(master: int) -> None:
    store = join(master, fingerprint=b"damage")
    given, size = pages(3, 4), 4096
    store.put(keys(3)[1:], given[1:])
    row = np.concatenate([given[0], np.zeros(16, np.uint8)])  # the checksum is wrong
    assert store._client.register_buffer(row.ctypes.data, row.nbytes) == 0
    assert store._client.put_from(store._prefix + keys(1)[0].hex(), row.ctypes.data, row.nbytes) == 0
    found = np.zeros((3, size), np.uint8)
    assert store.exists(keys(3)) == [True] * 3
    assert store.get(keys(3), list(found)) == [False, True, True]
    assert np.array_equal(found[1:], np.stack(given[1:]))
    store.close()


def test_the_same_page_several_times(master: int) -> None:
    store = join(master, fingerprint=b"repeated")
    given = pages(2, 3)
    store.put(keys(2), given)
    found = np.zeros((4, 4096), np.uint8)
    assert store.get([keys(2)[index] for index in (0, 1, 0, 0)], list(found)) == [True] * 4
    assert np.array_equal(found, np.stack([given[index] for index in (0, 1, 0, 0)]))
    store.close()


def test_several_threads(master: int) -> None:
    """More than there are calls at the same time."""
    store = join(master, fingerprint=b"threads")
    given = pages(128, 2)
    failed: list[int] = []

    def work(start: int) -> None:
        mine = keys(128)[start : start + 16]
        store.put(mine, given[start : start + 16])
        found = np.zeros((16, 4096), np.uint8)
        if store.get(mine, list(found)) != [True] * 16 or not np.array_equal(
            found, np.stack(given[start : start + 16])
        ):
            failed.append(start)

    threads = [Thread(target=work, args=(start,)) for start in range(0, 128, 16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store.close()
    assert not failed


def test_a_peer_that_is_killed_is_a_miss() -> None:
    """Its pages are found until it ends; then they are missing, which is no failure of the store."""
    with (
        master_process() as (master, _),
        peer(master, 8) as process,
    ):
        store = join(master, fingerprint=b"peer", num_bytes=0)
        found = np.zeros((8, 4096), np.uint8)
        assert all(store.get(keys(8), list(found)))
        process.kill()
        process.wait()
        assert store.get(keys(8), list(found)) == [False] * 8
        store.close()


def test_a_peer_that_stops_costs_the_time_limit() -> None:
    """Mooncake waits a minute for it."""
    with (
        master_process() as (master, _),
        peer(master, 8) as process,
    ):
        store = join(master, fingerprint=b"peer", num_bytes=0)
        found = np.zeros((8, 4096), np.uint8)
        assert all(store.get(keys(8), list(found)))
        store._place = place(master, 0.2)
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(TimeoutError, match=r"did not fetch pages within 0.2 s"):
            store.get(keys(8), list(found))
        assert store._idle.qsize() == len(store._lanes) - 1  # the call goes on, and keeps its buffer
        process.kill()
        until(lambda: store._idle.qsize() == len(store._lanes))
        store.close()


def test_the_master_dies_and_comes_back() -> None:
    """Nothing but misses for the caller behind the breaker; later the store has pages again."""
    now_s = [0.0]
    with master_process() as (port, process):
        inner = join(port, fingerprint=b"death")
        store = Breaker(inner, name="mooncake", clock=lambda: now_s[0])
        given, found = pages(4, 5), np.zeros((4, 4096), np.uint8)
        store.put(keys(4), given)
        assert all(store.get(keys(4), list(found)))
        process.kill()
        process.wait()
        for _ in range(3):
            with pytest.raises(OSError, match="mooncake could not fetch pages"):
                store.get(keys(4), list(found))
        assert store.get(keys(4), list(found)) == store.exists(keys(4)) == [False] * 4
        with pytest.raises(OSError, match=r"could not|left alone"):
            store.put(keys(4), given)
        now_s[0] = 1000.0
    with master_process(port):

        def works() -> bool:
            now_s[0] += 100
            store.put(keys(4), given)
            return all(store.get(keys(4), list(found)))

        found[:] = 0
        until(works)
        assert np.array_equal(found, np.stack(given))
        store.close()


def test_a_master_that_stops_costs_the_time_limit() -> None:
    with master_process() as (port, process):
        store = join(port)
        store.put(keys(2), pages(2, 6))
        store._place = place(port, 0.2)
        process.send_signal(signal.SIGSTOP)
        found = np.zeros((2, 4096), np.uint8)
        for call, what in (
            (lambda: store.exists(keys(2)), "look for pages"),
            (lambda: store.get(keys(2), list(found)), "fetch pages"),
            (lambda: store.put(keys(3)[2:], pages(1, 7)), "look for pages"),
        ):
            with pytest.raises(TimeoutError, match=f"did not {what} within 0.2 s"):
                call()
        with pytest.raises(TimeoutError, match="are waiting for an answer"):
            store.exists(keys(2))
        process.send_signal(signal.SIGCONT)
        store._place = place(port)
        assert store.get(keys(2), list(found)) == [True] * 2
        assert np.array_equal(found, np.stack(pages(2, 6)))
        store.close()


def test_a_master_that_is_away_is_joined_when_it_comes(caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()
    with caplog.at_level(logging.WARNING):
        store = join(port)
    assert f"mooncake://127.0.0.1:{port} has no pages yet" in caplog.text
    with pytest.raises(OSError, match="refused"):
        store.exists(keys(1))
    with master_process(port):
        given, found = pages(2, 8), np.zeros((2, 4096), np.uint8)

        def works() -> bool:
            store.put(keys(2), given)
            return all(store.get(keys(2), list(found)))

        until(works)
        assert np.array_equal(found, np.stack(given))
        store.close()


def test_a_master_that_stops_is_not_joined(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Mooncake would try for ten minutes, with the lock of the interpreter."""
    monkeypatch.setattr(mooncake, "_JOIN_S", 1.0)
    with master_process() as (port, process):
        process.send_signal(signal.SIGSTOP)
        with caplog.at_level(logging.WARNING):
            store = join(port)
        assert "has no pages yet" in caplog.text
        store.close()
        process.send_signal(signal.SIGCONT)


def test_bad_arguments_are_errors(master: int) -> None:
    with pytest.raises(ValueError, match="page_bytes must be >= 1, got 0"):
        join(master, page_bytes=0)
    with pytest.raises(ValueError, match="num_bytes must be >= 0, got -1"):
        join(master, num_bytes=-1)
