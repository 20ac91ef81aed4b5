"""Pages between memory and files: read and verified, or written and summed, by two threads at a time."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from threading import Lock

from pagewood.kvpool.tiers.arrays import Bytes
from pagewood.kvpool.tiers.checksum import checksum

_RUN_BYTES = 2**20
"""Neighbours are read together up to this size; what was read is then summed while a cache still has it."""
_MAX_ROWS = 1024
"""Buffers that one system call takes."""
_PROBE_BYTES = 4096
_DO_NOT_WAIT: int = getattr(os, "RWF_NOWAIT", 0)
"""Only Linux has it; elsewhere a probe waits, and every batch passes for cached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a page lies in an open file, and what it must sum to."""

    file: int
    offset: int
    key: bytes
    checksum: bytes


class PageCopier:
    """Copies batches of pages from and to files.

    Invariant: when a call returns, no thread touches the memory that it was given.

    A batch that the system has cached is read by two threads side by side. One that must come from the disk is read in
    the order of the file, so that the system reads ahead, while the page before is verified. Thread-safe.

    Args:
        name: of its threads.
    """

    __slots__ = ("_helpers",)

    def __init__(self, name: str) -> None:
        self._helpers = ThreadPoolExecutor(2, name)

    def read(self, places: Sequence[Place], pages: Sequence[Bytes]) -> list[bool]:
        """Read page i from place i; return which are whole. What cannot be read is not."""
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
        """Write pages one after the other from `offset` on; return their checksums.

        Raises:
            OSError: the disk is full or failed; any part may have been written.
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
    """Fill the rows from the file; False: it is too short.

    Raises:
        OSError: the disk failed.
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
        OSError: the disk is full or failed; any part may have been written.
    """
    buffers = [row.data for row in rows]
    while buffers:
        n = os.pwritev(file, buffers[:_MAX_ROWS], offset)
        offset += n
        buffers = _after(buffers, n)


def _runs(places: Sequence[Place], pages: Sequence[Bytes]) -> list[list[int]]:
    """Return the indices of places in the order of the files, neighbours together up to the size of a run."""
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
    """Read neighbours together, or those that can be read if they cannot be read together."""
    try:
        if read_rows(places[0].file, pages, places[0].offset):
            return [True] * len(pages)
    except OSError:
        pass
    if len(pages) == 1:
        return [False]
    return [_read_run([place], [page])[0] for place, page in zip(places, pages, strict=True)]


def _is_cached(place: Place, page: Bytes) -> bool:
    """Whether the system can read the page's end without the disk; asked of a batch's last page, it is a good guess."""
    probe = page[-_PROBE_BYTES:]
    offset = place.offset + page.nbytes - probe.nbytes
    try:
        return os.preadv(place.file, [probe.data], offset, _DO_NOT_WAIT) == probe.nbytes
    except OSError:  # it would have to wait, or the file system cannot say
        return False


def _after(buffers: list[memoryview], n: int) -> list[memoryview]:
    """Return what is left of the buffers after n bytes."""
    for index, buffer in enumerate(buffers):
        if n < buffer.nbytes:
            return [buffer[n:], *buffers[index + 1 :]]
        n -= buffer.nbytes
    return []
