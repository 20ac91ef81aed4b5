# pyright: basic
"""The store over a real cluster of Mooncake: `mooncake_master` and clients over TCP, without a GPU."""

import hashlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from pagewood.kvpool.tiers.testing import store_conformance

pytest.importorskip("mooncake.store", exc_type=ImportError)
from pagewood.kvpool.integrations.mooncake import MooncakeStore

MASTER = shutil.which("mooncake_master") or str(Path(sys.executable).parent / "mooncake_master")


@pytest.fixture(scope="module")
def master() -> Iterator[str]:
    """A master of its own; returns its address."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    with subprocess.Popen(
        [MASTER, "--port", str(port), "--enable_metric_reporting=false"], stderr=subprocess.DEVNULL
    ) as process:
        deadline_s = time.monotonic() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert time.monotonic() < deadline_s
                time.sleep(0.05)
        yield f"127.0.0.1:{port}"
        process.terminate()


def connect(master: str, **options) -> MooncakeStore:
    return MooncakeStore.connect(master, num_bytes=64 * 1024 * 1024, **{"page_bytes": 4096, **options})


def pages(number: int, seed: int, page_bytes: int = 4096) -> list[np.ndarray]:
    return list(np.random.default_rng(seed).integers(0, 256, (number, page_bytes), np.uint8))


def keys(number: int) -> list[bytes]:
    return [index.to_bytes(32, "big") for index in range(number)]


def test_conformance(master: str) -> None:
    """All calls of the random machine; every example has pages of its own."""

    def make(page_bytes: int) -> MooncakeStore:
        return connect(master, page_bytes=page_bytes, fingerprint=os.urandom(8))

    machine = store_conformance(make)
    machine.TestCase.settings = settings(
        max_examples=5,
        stateful_step_count=15,
        deadline=None,
        suppress_health_check=(HealthCheck.too_slow, HealthCheck.filter_too_much),
    )
    machine.TestCase().runTest()


def test_two_processes_share_pages(master: str) -> None:
    mine = connect(master, fingerprint=b"model")
    given = pages(600, 1)  # several megabytes
    mine.put(keys(600), given)
    code = f"""
import hashlib, numpy as np
from pagewood.kvpool.integrations.mooncake import MooncakeStore
store = MooncakeStore.connect({master!r}, page_bytes=4096, fingerprint=b"model", num_bytes=0)
found = np.zeros((601, 4096), np.uint8)
assert store.get([index.to_bytes(32, "big") for index in range(601)], list(found)) == [True] * 600 + [False]
print(hashlib.sha256(found[:600].tobytes()).hexdigest())
store.close()
"""
    said = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True, timeout=120)
    assert said.stdout.split()[-1] == hashlib.sha256(np.stack(given).tobytes()).hexdigest()
    other = connect(master, fingerprint=b"other model")
    assert other.exists(keys(3)) == [False] * 3
    other.close()
    mine.close()


def test_the_same_page_several_times(master: str) -> None:
    store = connect(master, fingerprint=b"repeated")
    given = pages(2, 3)
    store.put(keys(2), given)
    found = np.zeros((4, 4096), np.uint8)
    assert store.get([keys(2)[index] for index in (0, 1, 0, 0)], list(found)) == [True] * 4
    assert np.array_equal(found, np.stack([given[index] for index in (0, 1, 0, 0)]))
    store.close()


def test_several_threads(master: str) -> None:
    store = connect(master, fingerprint=b"threads")
    given = pages(64, 2)
    failed: list[int] = []

    def work(start: int) -> None:
        mine = keys(64)[start : start + 16]
        store.put(mine, given[start : start + 16])
        found = np.zeros((16, 4096), np.uint8)
        if store.get(mine, list(found)) != [True] * 16 or not np.array_equal(
            found, np.stack(given[start : start + 16])
        ):
            failed.append(start)

    threads = [Thread(target=work, args=(start,)) for start in (0, 16, 32, 48)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store.close()
    assert not failed


def test_no_master() -> None:
    with pytest.raises(OSError, match="could not join"):
        connect("127.0.0.1:1")
