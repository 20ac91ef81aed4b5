"""Batches of pages from and to files, compared with the bytes in the files."""

import errno
import os
import random
import time
from collections.abc import Generator
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import pytest

from pagewood.kvpool.tiers.stores.checksum import checksum
from pagewood.kvpool.tiers.stores.copier import PageCopier, Place

KEY = bytes(32)


@pytest.fixture
def copier() -> Generator[PageCopier]:
    copier = PageCopier("test")
    yield copier
    copier.close()


def is_never_cached(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Make the system report that every read must wait for the disk; return the offsets of reads, as they end.

    Fails if two reads overlap in time.
    """
    read = os.preadv
    offsets: list[int] = []
    head = Lock()

    def preadv(file: int, buffers: Any, offset: int, flags: int = 0) -> int:
        if flags & os.RWF_NOWAIT:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        assert head.acquire(blocking=False), "two threads make the disk seek"
        time.sleep(0.001)
        offsets.append(offset)
        head.release()
        return read(file, buffers, offset, flags)

    monkeypatch.setattr(os, "preadv", preadv)
    return offsets


@pytest.mark.parametrize("is_cached", [True, False])
@pytest.mark.parametrize(("page_bytes", "num_pages"), [(1, 2000), (2000, 1500), (300_000, 12), (2**20 + 7, 4)])
def test_pages_in_any_order_are_read(
    tmp_path: Path,
    copier: PageCopier,
    monkeypatch: pytest.MonkeyPatch,
    page_bytes: int,
    num_pages: int,
    is_cached: bool,
) -> None:
    rng = random.Random(page_bytes)
    images = np.random.default_rng(0).integers(0, 256, (num_pages, page_bytes), np.uint8)
    with (tmp_path / "file").open("w+b") as file:
        checksums = copier.write(file.fileno(), 5, [KEY] * num_pages, list(images))
        assert checksums == [checksum(KEY, image) for image in images]
        assert os.pread(file.fileno(), 2**30, 5) == images.tobytes()
        offsets = [] if is_cached else is_never_cached(monkeypatch)
        wanted = [rng.randrange(num_pages) for _ in range(num_pages)]  # with gaps and repetitions
        torn = set(rng.sample(range(num_pages), num_pages // 4))
        places = [
            Place(
                file=file.fileno(), offset=5 + index * page_bytes, key=KEY,
                checksum=bytes(16) if index in torn else checksums[index],
            )
            for index in wanted
        ]  # fmt: skip
        pages = np.zeros((num_pages, page_bytes), np.uint8)
        assert copier.read(places, list(pages)) == [index not in torn for index in wanted]
    assert np.array_equal(pages, images[wanted])
    assert offsets == sorted(offsets), "the disk is not read in the order of the file"


@pytest.mark.parametrize("is_cached", [True, False])
def test_an_unreadable_page_does_not_affect_other_pages(
    tmp_path: Path, copier: PageCopier, monkeypatch: pytest.MonkeyPatch, is_cached: bool
) -> None:
    images = np.random.default_rng(0).integers(0, 256, (20, 100), np.uint8)
    with (tmp_path / "file").open("w+b") as file:
        checksums = copier.write(file.fileno(), 0, [KEY] * 20, list(images))
        os.ftruncate(file.fileno(), 1950)
        if not is_cached:
            is_never_cached(monkeypatch)
        read = os.preadv

        def preadv(file: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
            if offset <= 700 < offset + sum(buffer.nbytes for buffer in buffers):
                raise OSError(errno.EIO, "Input/output error")
            return read(file, buffers, offset, flags)

        monkeypatch.setattr(os, "preadv", preadv)
        places = [
            Place(file=file.fileno(), offset=100 * index, key=KEY, checksum=checksums[index]) for index in range(20)
        ]
        found = copier.read(places, list(np.zeros_like(images)))
    assert [index for index, is_there in enumerate(found) if not is_there] == [7, 19]


def test_empty_batches_are_accepted(copier: PageCopier, tmp_path: Path) -> None:
    assert copier.read([], []) == []
    with (tmp_path / "file").open("wb") as file:
        assert copier.write(file.fileno(), 0, [], []) == []


def test_a_failed_write_is_an_error(copier: PageCopier, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (tmp_path / "file").open("rb") as file, pytest.raises(OSError, match="Bad file descriptor"):
        copier.write(file.fileno(), 0, [KEY], [np.zeros(10, np.uint8)])
