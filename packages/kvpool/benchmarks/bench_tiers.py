# pyright: basic
# pytest-benchmark has no types.
"""Copies of 64 pages between the tiers, compared with plain copies of the same size in the same state, in GB/s.

`pytest packages/kvpool/benchmarks/bench_tiers.py --benchmark-enable --benchmark-json=FILE`; the figures are `GB_per_s`,
`plain_GB_per_s` and `of_plain` of extra_info. Plain copies and tiers take turns in every round, because the speed of a
shared disk changes from minute to minute.

Servers are started where their packages are installed; without them these cases are skipped. Only these:

    pytest packages/kvpool/benchmarks/bench_tiers.py --benchmark-enable --benchmark-json=FILE -k "shared_store"
"""

import itertools
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from threading import Thread
from typing import Any

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from pagewood.kvpool.integrations.mooncake import MooncakePlace, MooncakeStore
from pagewood.kvpool.integrations.nixl import NixlStore
from pagewood.kvpool.tiers import ArrayPages, DiskTier, HostTier, PageStore, RedisStore, SharedFolder, shared_memory

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
from mooncake_cluster import master_process
from peer_process import peer_process
from resp_server import place, redis_binary, redis_process

BATCH = 64
POOL = 1024
ROUNDS = 15
# Layers and bytes of a page in a layer: a 110M model in fp32 with 16 tokens, an 8B model in bf16 with 16 tokens.
SHAPES = [pytest.param(12, 98_304, id="110M fp32"), pytest.param(32, 65_536, id="8B bf16")]


def beside(
    benchmark: BenchmarkFixture,
    copy: Callable[[], Any],
    plain: Callable[[], Any],
    num_bytes: int,
    prepare: Callable[[], Any] = lambda: None,
) -> None:
    """Time a copy and a plain copy in turn, each after `prepare`."""
    plain_s: list[float] = []

    def time_plain() -> None:
        prepare()
        start_s = time.perf_counter()
        plain()
        plain_s.append(time.perf_counter() - start_s)
        prepare()

    benchmark.pedantic(copy, setup=time_plain, rounds=ROUNDS, warmup_rounds=2)
    if benchmark.stats is not None:
        copy_s = float(benchmark.stats.stats.median)  # pyright: ignore[reportArgumentType]
        rest_s = median(plain_s[2:])
        benchmark.extra_info["GB_per_s"] = round(num_bytes / copy_s / 1e9, 2)
        benchmark.extra_info["plain_GB_per_s"] = round(num_bytes / rest_s / 1e9, 2)
        benchmark.extra_info["of_plain"] = round(rest_s / copy_s, 2)


def ones(num_rows: int, row_bytes: int) -> Any:
    """Return memory that has been written to, with the alignment of a pool and of a host tier."""
    memory = HostTier(page_bytes=row_bytes, num_pages=num_rows).memory
    memory.fill(1)
    return memory


def scattered(n: int) -> list[int]:
    return np.random.default_rng(0).permutation(n)[:BATCH].tolist()


@pytest.mark.parametrize(("num_layers", "layer_bytes"), SHAPES)
@pytest.mark.parametrize("is_out", [True, False], ids=["device to host", "host to device"])
@pytest.mark.parametrize("is_scattered", [False, True], ids=["pages in a row", "pages scattered"])
def test_copy_of_pages(
    benchmark: BenchmarkFixture, num_layers: int, layer_bytes: int, is_out: bool, is_scattered: bool
):
    device = ArrayPages([[ones(POOL, layer_bytes)] for _ in range(num_layers)])
    host = HostTier(page_bytes=device.page_bytes, num_pages=BATCH, memory=ones(BATCH, device.page_bytes))
    pages = scattered(POOL) if is_scattered else list(range(100, 100 + BATCH))
    slots = list(range(BATCH))
    target = ones(BATCH, device.page_bytes)

    def copy_in() -> None:
        device.write(pages, host.memory, slots, lambda n: None)

    def copy_out() -> None:
        device.read(pages, host.memory, slots)

    beside(benchmark, copy_out if is_out else copy_in, lambda: np.copyto(target, host.memory), host.memory.nbytes)


def forget(folder: Path) -> None:
    """Drop all files from the system's cache, so that the next read goes to the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def images(page_bytes: int) -> HostTier:
    """Return host memory with 64 pages of random bytes."""
    host = HostTier(page_bytes=page_bytes, num_pages=BATCH)
    host.memory[:] = np.random.default_rng(0).integers(0, 256, host.memory.shape, np.uint8)
    return host


@pytest.mark.parametrize(("num_layers", "layer_bytes"), SHAPES)
@pytest.mark.parametrize("is_cold", [False, True], ids=["cached by the system", "from the disk"])
@pytest.mark.parametrize("kind", [DiskTier, SharedFolder])
def test_read(benchmark: BenchmarkFixture, tmp_path: Path, num_layers: int, layer_bytes: int, is_cold: bool, kind: Any):
    """Compared with one read of all bytes."""
    host = images(num_layers * layer_bytes)
    keys, rows = [bytes([index]) * 32 for index in range(BATCH)], list(host.memory)
    (tmp_path / "plain").write_bytes(host.memory.data)
    descriptor = os.open(tmp_path / "plain", os.O_RDONLY)
    store = kind(tmp_path / "store", page_bytes=host.page_bytes, num_bytes=32 * BATCH * host.page_bytes)
    store.put(keys, rows)

    def read() -> None:
        assert all(store.get(keys, rows))

    def plain() -> None:
        assert os.preadv(descriptor, [host.memory.data], 0) == host.memory.nbytes

    beside(benchmark, read, plain, host.memory.nbytes, (lambda: forget(tmp_path)) if is_cold else lambda: None)


@pytest.mark.parametrize(("num_layers", "layer_bytes"), SHAPES)
def test_write_over_old_pages(benchmark: BenchmarkFixture, tmp_path: Path, num_layers: int, layer_bytes: int):
    """A full disk tier, compared with one write over the same bytes of a file."""
    host = images(num_layers * layer_bytes)
    rows, salts = list(host.memory), itertools.count()
    store = DiskTier(tmp_path / "store", page_bytes=host.page_bytes, num_bytes=host.memory.nbytes)
    descriptor = os.open(tmp_path / "plain", os.O_RDWR | os.O_CREAT)

    def write() -> None:
        salt = next(salts).to_bytes(31, "big")
        store.put([bytes([index]) + salt for index in range(BATCH)], rows)

    beside(benchmark, write, lambda: os.pwrite(descriptor, host.memory.data, 0), host.memory.nbytes)


@pytest.mark.parametrize(("num_layers", "layer_bytes"), SHAPES)
def test_write_of_new_files(benchmark: BenchmarkFixture, tmp_path: Path, num_layers: int, layer_bytes: int):
    """A shared folder, compared with one write to a new file; both delete old files outside the timed part."""
    host = images(num_layers * layer_bytes)
    rows, salts = list(host.memory), itertools.count()
    store = SharedFolder(tmp_path / "store", page_bytes=host.page_bytes, num_bytes=1000 * host.memory.nbytes)

    def write() -> None:
        salt = next(salts).to_bytes(31, "big")
        store.put([bytes([index]) + salt for index in range(BATCH)], rows)

    def plain() -> None:
        with (tmp_path / "plain").open("xb", buffering=0) as file:
            file.write(host.memory.data)

    def delete() -> None:
        for path in tmp_path.rglob("*"):
            if path.is_file():
                path.unlink()

    beside(benchmark, write, plain, host.memory.nbytes, delete)


@contextmanager
def shared_store(kind: str, page_bytes: int, *, is_read: bool) -> Iterator[PageStore]:
    """Open a store whose pages are in another process; to read, those with the numbers from 0 on are there."""
    num_bytes = 2 * (ROUNDS + 5) * BATCH * page_bytes  # of all rounds, so that nothing is left out
    with ExitStack() as opened:
        if kind == "shared memory":
            name = f"bench-{os.getpid()}"
            opened.callback(shutil.rmtree, f"/dev/shm/pagewood-{os.geteuid()}-{name}", ignore_errors=True)
            store = shared_memory(name, page_bytes=page_bytes, num_bytes=4 * BATCH * page_bytes)
        elif kind == "mooncake":
            pytest.importorskip("mooncake.store", exc_type=ImportError)
            port, _ = opened.enter_context(master_process())
            url = f"mooncake://127.0.0.1:{port}?timeout_s=60"
            options = f"page_bytes={page_bytes}, num_bytes={num_bytes}"
            peer = f"MooncakeStore(MooncakePlace.parse({url!r}), {options})"
            opened.enter_context(peer_process(peer, num_pages=BATCH * is_read, page_bytes=page_bytes))
            store = MooncakeStore(MooncakePlace.parse(url), page_bytes=page_bytes, num_bytes=0)
        elif redis_binary() is None:
            pytest.skip("redis-server is not installed")
        elif kind == "redis":
            port, _ = opened.enter_context(redis_process())
            store = RedisStore(place(port, timeout_s=60), page_bytes=page_bytes)
        else:
            pytest.importorskip("nixl_cu12._api", exc_type=ImportError)
            port, _ = opened.enter_context(redis_process())
            where = place(port, timeout_s=60)
            peer = f"NixlStore({where!r}, page_bytes={page_bytes}, num_bytes={BATCH * page_bytes})"
            opened.enter_context(peer_process(peer, num_pages=BATCH * is_read, page_bytes=page_bytes))
            store = NixlStore(where, page_bytes=page_bytes, num_bytes=4 * BATCH * page_bytes)
        opened.callback(store.close)
        yield store


@pytest.mark.parametrize(("num_layers", "layer_bytes"), SHAPES)
@pytest.mark.parametrize("is_read", [True, False], ids=["read", "write"])
@pytest.mark.parametrize("kind", ["shared memory", "redis", "mooncake", "nixl"])
def test_shared_store(benchmark: BenchmarkFixture, kind: str, is_read: bool, num_layers: int, layer_bytes: int):
    """Compared with all bytes through a socket of the loopback. Written pages of nixl stay in this process."""
    host, salts = images(num_layers * layer_bytes), itertools.count(1)
    keys, rows = [index.to_bytes(32, "big") for index in range(BATCH)], list(host.memory)
    with (
        shared_store(kind, host.page_bytes, is_read=is_read) as store,
        socket.create_server(("127.0.0.1", 0)) as server,
    ):
        given = host.memory.copy()
        sender = socket.create_connection(server.getsockname())
        receiver, _ = server.accept()
        if is_read:
            store.put(keys, rows)  # where no peer has

        def copy() -> None:
            if is_read:
                assert all(store.get(keys, rows))
                return
            salt = next(salts).to_bytes(24, "big")
            store.put([index.to_bytes(8, "big") + salt for index in range(BATCH)], rows)

        def plain() -> None:
            thread = Thread(target=sender.sendall, args=(given.data,))
            thread.start()
            received, memory = 0, host.memory.data.cast("B")
            while received < len(memory):
                received += receiver.recv_into(memory[received:])
            thread.join()

        beside(benchmark, copy, plain, host.memory.nbytes)
        if not is_read:
            salt = (next(salts) - 1).to_bytes(24, "big")
            assert all(store.exists([index.to_bytes(8, "big") + salt for index in range(BATCH)]))
        sender.close()
        receiver.close()
