# pyright: basic
"""The store over LMCache: its real server over TCP, and its connector for files."""

import hashlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from pagewood.kvpool import PageAllocator
from pagewood.kvpool.tiers import ArrayPages, HostTier, PrefetchMode, PrefetchPolicy, TieredIndex
from pagewood.kvpool.tiers.plain_cache import PlainCache
from pagewood.kvpool.tiers.testing import store_conformance

pytest.importorskip("lmcache.v1.storage_backend.connector", exc_type=ImportError)
from pagewood.kvpool.integrations.lmcache import LMCacheStore


class Server:
    """LMCache's server in a process of its own; it can be killed and started again at the same address."""

    def __init__(self) -> None:
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            self.port = one.getsockname()[1]
        self.url = f"lm://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "lmcache.v1.server", "127.0.0.1", str(self.port)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline_s = time.monotonic() + 120
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                assert time.monotonic() < deadline_s
                assert self.process.poll() is None
                time.sleep(0.05)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.kill()


@pytest.fixture(params=["lm", "fs"])
def url(request: pytest.FixtureRequest, server: Server, tmp_path: Path) -> str:
    return server.url if request.param == "lm" else f"fs://host:0{tmp_path}"


def pages(number: int, seed: int, page_bytes: int = 4096) -> list[np.ndarray]:
    return list(np.random.default_rng(seed).integers(0, 256, (number, page_bytes), np.uint8))


def keys(number: int) -> list[bytes]:
    return [hashlib.blake2b(bytes([index]), digest_size=32).digest() for index in range(number)]


def wait_for(is_done: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not is_done():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_conformance(url: str) -> None:
    """All calls of the random machine; every example has pages of its own."""
    machine = store_conformance(lambda size: LMCacheStore(url, page_bytes=size, fingerprint=os.urandom(8)))
    machine.TestCase.settings = settings(
        max_examples=10,
        stateful_step_count=15,
        deadline=None,
        suppress_health_check=(HealthCheck.too_slow, HealthCheck.filter_too_much),
    )
    machine.TestCase().runTest()


def test_two_processes_share_pages(url: str) -> None:
    mine = LMCacheStore(url, page_bytes=4096, fingerprint=b"model")
    given = pages(40, 1)
    mine.put(keys(40), given)
    wait_for(lambda: all(mine.exists(keys(40))))
    code = f"""
import hashlib, numpy as np
from pagewood.kvpool.integrations.lmcache import LMCacheStore
store = LMCacheStore({url!r}, page_bytes=4096, fingerprint=b"model")
keys = [hashlib.blake2b(bytes([index]), digest_size=32).digest() for index in range(41)]
found = np.zeros((41, 4096), np.uint8)
assert store.get(keys, list(found)) == [True] * 40 + [False]
print(hashlib.sha256(found[:40].tobytes()).hexdigest())
store.close()
"""
    said = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True, timeout=120)
    assert said.stdout.split()[-1] == hashlib.sha256(np.stack(given).tobytes()).hexdigest()
    other = LMCacheStore(url, page_bytes=4096, fingerprint=b"other model")
    assert other.exists(keys(3)) == [False] * 3
    other.close()
    mine.close()


def test_the_example(url: str) -> None:
    example = Path(__file__).parents[2] / "examples" / "shared_kv.py"
    done = subprocess.run(
        [sys.executable, str(example), url], stdout=subprocess.PIPE, text=True, check=True, timeout=300
    )
    assert [line for line in done.stdout.splitlines() if "tokens found" in line] == [
        "first: 0 tokens found, 160 computed, KV right: True",
        "second: 160 tokens found, 0 computed, KV right: True",
    ]


def test_a_damaged_page_is_absent(tmp_path: Path) -> None:
    store = LMCacheStore(f"fs://host:0{tmp_path}", page_bytes=4096)
    store.put(keys(2), pages(2, 3))
    (path,) = [path for path in tmp_path.iterdir() if f"{int.from_bytes(keys(2)[1], 'big'):x}" in path.name]
    path.write_bytes(path.read_bytes()[:-100] + bytes(100))
    assert store.get(keys(2), list(np.zeros((2, 4096), np.uint8))) == [True, False]
    store.close()


def test_several_threads(server: Server) -> None:
    store = LMCacheStore(server.url, page_bytes=4096, fingerprint=b"threads")
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


def test_a_server_that_dies_and_comes_back() -> None:
    server = Server()
    store = LMCacheStore(server.url, page_bytes=4096)
    store.put(keys(2), pages(2, 4))
    assert store.exists(keys(2)) == [True, True]
    server.kill()
    with pytest.raises(OSError, match=r"LMCache at lm://127\.0\.0\.1:\d+ could not"):
        store.exists(keys(2))
    with pytest.raises(OSError, match="could not look for a page: Conn"):
        store.exists(keys(1))
    server.start()
    assert store.exists(keys(2)) == [False, False]
    store.put(keys(2), pages(2, 4))
    assert store.get(keys(2), list(np.zeros((2, 4096), np.uint8))) == [True, True]
    store.close()
    server.kill()


def test_a_server_that_does_not_answer() -> None:
    server = Server()
    store = LMCacheStore(server.url, page_bytes=4096, timeout_s=0.5)
    server.process.send_signal(signal.SIGSTOP)
    with pytest.raises(OSError, match="could not look for a page: TimeoutError"):
        store.exists(keys(1))
    server.process.send_signal(signal.SIGCONT)
    assert store.exists(keys(1)) == [False]
    store.close()
    server.kill()


def index_over(store: LMCacheStore, array: np.ndarray) -> TieredIndex:
    """Return an index over device pages of 4,096 bytes for 16 tokens each."""
    return TieredIndex(
        PlainCache(16),
        device=ArrayPages([[array]]),
        host=HostTier(page_bytes=4096, num_pages=64),
        remote=store,
        page_size=16,
        prefetch=PrefetchPolicy(mode=PrefetchMode.WAIT),
    )


def recall(index: TieredIndex, allocator: PageAllocator, tokens: np.ndarray) -> int:
    """Bring a prefix to the device; return how many of its tokens are there."""
    found = index.recall(tokens)
    while found is not None and index.advance(found, allocator.alloc):
        time.sleep(0.001)
    return index.match(tokens).num_tokens


def test_indices_share_pages_until_the_server_dies() -> None:
    server = Server()
    arrays = [np.zeros((64, 4096), np.uint8) for _ in range(2)]
    indices = [index_over(LMCacheStore(server.url, page_bytes=4096), array) for array in arrays]
    allocators = [PageAllocator(64) for _ in range(2)]
    first, second = np.arange(160, dtype=np.int32), np.arange(1000, 1160, dtype=np.int32)
    given = allocators[0].alloc(10)
    arrays[0][given] = pages(10, 5)
    indices[0].insert(first, given)

    def is_stored() -> bool:
        indices[0].poll()
        return indices[1].locate(first).num_remote == 160

    wait_for(is_stored)
    assert recall(indices[1], allocators[1], first) == 160
    assert np.array_equal(arrays[1][indices[1].peek(first).pages], arrays[0][given])

    server.kill()
    given = allocators[0].alloc(10)
    arrays[0][given] = pages(10, 6)
    indices[0].insert(second, given)

    def has_failed() -> bool:
        indices[0].poll()
        return indices[0].counters.num_failed == 10

    wait_for(has_failed)
    assert recall(indices[1], allocators[1], second) == 0
    allocators[0].free(indices[0].evict(20))
    assert recall(indices[0], allocators[0], second) == 160  # the host has them
    assert np.array_equal(arrays[0][indices[0].peek(second).pages], pages(10, 6))
    for index in indices:
        index.close()


def test_no_service(tmp_path: Path) -> None:
    for url in ("lm://127.0.0.1:1", "unknown://127.0.0.1:1", "lm://nothing"):
        with pytest.raises(OSError, match="could not connect"):
            LMCacheStore(url, page_bytes=4096)
    with pytest.raises(ValueError, match="page_bytes must be >= 1, got 0"):
        LMCacheStore(f"fs://host:0{tmp_path}", page_bytes=0)
    with pytest.raises(ValueError, match="timeout_s must be > 0, got 0"):
        LMCacheStore(f"fs://host:0{tmp_path}", page_bytes=1, timeout_s=0)
