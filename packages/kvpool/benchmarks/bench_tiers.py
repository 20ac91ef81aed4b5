# pyright: basic
# pytest-benchmark has no types.
"""Copies of 64 pages between the tiers, beside a plain copy in memory and a plain read of a file, in GB/s.

`pytest packages/kvpool/benchmarks/bench_tiers.py --benchmark-enable`; the figure is `GB_per_s` of extra_info.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from pagewood.kvpool.tiers import ArrayPages, DiskTier, HostTier, SharedFolder

BATCH = 64
POOL = 1024
# Layers and bytes of a page in a layer: a 110M model in fp32 with 16 tokens, an 8B model in bf16 with 16 tokens.
SHAPES = [pytest.param(12, 98_304, id="110M fp32"), pytest.param(32, 65_536, id="8B bf16")]


def timed(benchmark: BenchmarkFixture, copy: Callable[..., Any], num_bytes: int, setup: Any = None) -> None:
    benchmark.pedantic(copy, setup=setup, rounds=15, warmup_rounds=2)
    if benchmark.stats is not None:
        benchmark.extra_info["GB_per_s"] = round(num_bytes / float(benchmark.stats.stats.median) / 1e9, 2)  # pyright: ignore[reportArgumentType]


def scattered(n: int) -> list[int]:
    return np.random.default_rng(0).permutation(n)[:BATCH].tolist()


@pytest.mark.parametrize(("num_layers", "layer_bytes"), SHAPES)
def test_plain_copy(benchmark: BenchmarkFixture, num_layers: int, layer_bytes: int):
    source = np.ones(BATCH * num_layers * layer_bytes, np.uint8)
    target = np.ones_like(source)
    timed(benchmark, lambda: np.copyto(target, source), source.nbytes)


@pytest.mark.parametrize(("num_layers", "layer_bytes"), SHAPES)
@pytest.mark.parametrize("is_out", [True, False], ids=["device to host", "host to device"])
@pytest.mark.parametrize("is_scattered", [False, True], ids=["pages in a row", "pages scattered"])
def test_copy_of_pages(
    benchmark: BenchmarkFixture, num_layers: int, layer_bytes: int, is_out: bool, is_scattered: bool
):
    device = ArrayPages([[np.ones((POOL, layer_bytes), np.uint8)] for _ in range(num_layers)])
    host = HostTier(page_bytes=device.page_bytes, num_pages=BATCH)
    host.memory.fill(1)
    pages = scattered(POOL) if is_scattered else list(range(100, 100 + BATCH))
    slots = list(range(BATCH))

    def copy_in() -> None:
        for layer in range(num_layers):
            device.write(layer, pages, host.memory, slots)

    copy_out = lambda: device.read(pages, host.memory, slots)  # noqa: E731
    timed(benchmark, copy_out if is_out else copy_in, BATCH * device.page_bytes)


def forget(path: Path) -> None:
    """Make the system read the file from the disk the next time."""
    for file in [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]:
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


@pytest.mark.parametrize(("num_layers", "layer_bytes"), SHAPES)
@pytest.mark.parametrize("is_cold", [False, True], ids=["cached by the system", "from the disk"])
@pytest.mark.parametrize("kind", ["plain", "disk", "folder"])
def test_read(benchmark: BenchmarkFixture, tmp_path: Path, num_layers: int, layer_bytes: int, is_cold: bool, kind: str):
    page_bytes = num_layers * layer_bytes
    memory = np.random.default_rng(0).integers(0, 256, (BATCH, page_bytes), np.uint8)
    keys = [bytes([index]) * 32 for index in range(BATCH)]
    rows = list(memory)
    if kind == "plain":
        path = tmp_path / "plain"
        path.write_bytes(memory.tobytes())
        descriptor = os.open(path, os.O_RDONLY)
        read = lambda: os.preadv(descriptor, [memory.data], 0)  # noqa: E731
    else:
        path = tmp_path / "store"
        make = DiskTier if kind == "disk" else SharedFolder
        store = make(path, page_bytes=page_bytes, num_bytes=2 * BATCH * page_bytes)
        store.put(keys, rows)
        read = lambda: store.get(keys, rows)  # noqa: E731
    timed(benchmark, read, memory.nbytes, setup=(lambda: forget(path)) if is_cold else None)


@pytest.mark.parametrize(("num_layers", "layer_bytes"), SHAPES[:1])
@pytest.mark.parametrize("kind", ["plain", "disk", "folder"])
def test_write(benchmark: BenchmarkFixture, tmp_path: Path, num_layers: int, layer_bytes: int, kind: str):
    page_bytes = num_layers * layer_bytes
    memory = np.random.default_rng(0).integers(0, 256, (BATCH, page_bytes), np.uint8)
    rows, count = list(memory), iter(range(10_000))
    if kind == "plain":
        descriptor = os.open(tmp_path / "plain", os.O_RDWR | os.O_CREAT)

        def write() -> None:
            os.pwrite(descriptor, memory.data, 0)

    else:
        make = DiskTier if kind == "disk" else SharedFolder
        store = make(
            tmp_path / "store", page_bytes=page_bytes, num_bytes=BATCH * page_bytes * (1 if kind == "disk" else 40)
        )

        def write() -> None:
            salt = next(count)
            store.put([bytes([index]) * 30 + salt.to_bytes(2, "big") for index in range(BATCH)], rows)

    timed(benchmark, write, memory.nbytes)
