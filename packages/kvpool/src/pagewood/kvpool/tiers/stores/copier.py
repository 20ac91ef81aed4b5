"""Copies pages between memory and files, and computes or verifies their checksums, with two threads at a time."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from threading import Lock

from pagewood.kvpool.tiers.pages.arrays import Bytes
from pagewood.kvpool.tiers.stores.checksum import checksum

# Largest number of bytes of neighbouring pages that are read together. Their checksums are computed while they are
# still in a cache.
_RUN_BYTES = 2**20
# Largest number of buffers in one system call.
_MAX_ROWS = 1024
_PROBE_BYTES = 4096
# Only Linux has this flag. Elsewhere a probe waits for the disk, and every batch is treated as cached.
_DO_NOT_WAIT: int = getattr(os, "RWF_NOWAIT", 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The place of a page in an open file, and its expected checksum.

    Attributes:
        file: File descriptor.
        offset: Offset of the page in the file, in bytes.
        key: Key of the page.
        checksum: Expected checksum of the page.
    """

    file: int
    offset: int
    key: bytes
    checksum: bytes


class PageCopier:
    """Copies batches of pages from and to files.

    Invariant: after a call has returned, no thread accesses the memory that was passed to it.

    Two threads read a batch side by side if the operating system has it cached. A batch that must come from the disk is
    read in the order of the file, so that the system reads ahead, while the previous pages are verified. Thread-safe.
    """

    __slots__ = ("_helpers",)

    def __init__(self, name: str) -> None:
        """Create a copier with up to two helper threads.

        Args:
            name: Prefix of the names of the threads.
        """
        self._helpers = ThreadPoolExecutor(2, name)

    def read(self, places: Sequence[Place], pages: Sequence[Bytes]) -> list[bool]:
        """Read page i from place i.

        Args:
            places: Where the pages are.
            pages: `[page_bytes] uint8` each, contiguous, one for each place; written to.

        Returns:
            Whether each page was read and matches its checksum. A page that cannot be read is False.
        """
        is_whole = [False] * len(places)
        runs = _runs(places, pages)
        if not runs:
            return is_whole
        last = runs[-1][-1]
        turn = nullcontext() if _is_cached(places[last], pages[last]) else Lock()
        due = iter(runs)

        def work() -> None:
            while True:
                with turn:
                    run = next(due, None)
                    if run is None:
                        return
                    is_read = _read_run([places[index] for index in run], [pages[index] for index in run])
                for index, is_there in zip(run, is_read, strict=True):
                    place = places[index]
                    is_whole[index] = is_there and checksum(place.key, pages[index]) == place.checksum

        helper = self._helpers.submit(work) if len(runs) > 1 else None
        try:
            work()
        finally:
            if helper is not None:
                helper.result()
        return is_whole

    def write(self, file: int, offset: int, keys: Sequence[bytes], pages: Sequence[Bytes]) -> list[bytes]:
        """Write pages one after another, starting at `offset`; return their checksums.

        Raises:
            OSError: The disk is full or failed. Any part may have been written.
        """
        checksums = self._helpers.submit(lambda: [checksum(key, page) for key, page in zip(keys, pages, strict=True)])
        try:
            write_rows(file, pages, offset)
        finally:
            result = checksums.result()
        return result

    def close(self) -> None:
        """End the threads."""
        self._helpers.shutdown()


def read_rows(file: int, rows: Sequence[Bytes], offset: int) -> bool:
    """Fill the rows from the file; return False if the file is too short.

    Raises:
        OSError: The disk failed.
    """
    buffers = [row.data for row in rows]
    while buffers:
        n = os.preadv(file, buffers[:_MAX_ROWS], offset)
        if not n:
            return False
        offset += n
        buffers = _after(buffers, n)
    return True


def write_rows(file: int, rows: Sequence[Bytes], offset: int) -> None:
    """Write the rows to the file.

    Raises:
        OSError: The disk is full or failed. Any part may have been written.
    """
    buffers = [row.data for row in rows]
    while buffers:
        n = os.pwritev(file, buffers[:_MAX_ROWS], offset)
        offset += n
        buffers = _after(buffers, n)


def _runs(places: Sequence[Place], pages: Sequence[Bytes]) -> list[list[int]]:
    """Return the indices of places in the order of the files, with neighbours grouped into runs of limited size."""
    runs: list[list[int]] = []
    file, end, num_bytes = -1, -1, 0
    for index in sorted(range(len(places)), key=lambda index: (places[index].file, places[index].offset)):
        place, page_bytes = places[index], pages[index].nbytes
        if (place.file, place.offset) == (file, end) and num_bytes + page_bytes <= _RUN_BYTES:
            runs[-1].append(index)
            num_bytes += page_bytes
        else:
            runs.append([index])
            num_bytes = page_bytes
        file, end = place.file, place.offset + page_bytes
    return runs


def _read_run(places: Sequence[Place], pages: Sequence[Bytes]) -> list[bool]:
    """Read neighbours together; if that fails, read them one by one. Return which were read."""
    try:
        if read_rows(places[0].file, pages, places[0].offset):
            return [True] * len(pages)
    except OSError:
        pass
    if len(pages) == 1:
        return [False]
    return [_read_run([place], [page])[0] for place, page in zip(places, pages, strict=True)]


def _is_cached(place: Place, page: Bytes) -> bool:
    """Return whether the system can read the end of the page without the disk; for a batch, test its last page."""
    probe = page[-_PROBE_BYTES:]
    offset = place.offset + page.nbytes - probe.nbytes
    try:
        return os.preadv(place.file, [probe.data], offset, _DO_NOT_WAIT) == probe.nbytes
    except OSError:  # the read would have to wait, or the file system does not support the flag
        return False


def _after(buffers: list[memoryview], n: int) -> list[memoryview]:
    """Return what remains of the buffers after their first `n` bytes."""
    for index, buffer in enumerate(buffers):
        if n < buffer.nbytes:
            return [buffer[n:], *buffers[index + 1 :]]
        n -= buffer.nbytes
    return []
