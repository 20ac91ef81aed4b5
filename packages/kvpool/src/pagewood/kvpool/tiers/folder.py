"""A remote tier without a service: pages as files in a folder that several processes or machines see."""

import itertools
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

import numpy as np

from pagewood.kvpool.tiers.arrays import Bytes
from pagewood.kvpool.tiers.checksum import CHECKSUM_BYTES, checksum

_NUM_READERS = 4
"""Threads that read and verify: each waits for a file of its own."""
_TRIM_SHARE = 1 / 16
"""Part of the budget that is written between two looks at the whole folder, and then kept free."""
_TOUCH_S = 60.0
"""A page's time of use is only as exact as this, so that reading seldom writes."""
_ABANDONED_S = 3600.0
"""A file that is still being written after this long belongs to a process that died."""


class SharedFolder:
    """A `PageStore` that any number of processes may use at once, on a local disk, in memory (tmpfs), or on NFS.

    Invariant: a file under its final name never changes, and holds its checksum and one page; a file that does not is
    absent, and deleted when it is noticed.

    There are no locks and there is no index to agree on: names are content hashes, a page appears by an atomic rename,
    and one that is deleted while it is read is read to its end. Thread-safe.

    Args:
        path: of the folder; made if it is not there.
        page_bytes: of a page image.
        num_bytes: how large the pages of this fingerprint may be together; kept by all users of the folder, within a
            sixteenth for each of them.
        fingerprint: says what the pages are of: model, dtype, layout. Pages of different ones do not meet.

    Raises:
        ValueError: `num_bytes` is less than one page, or the folder cannot be made or written.
    """

    __slots__ = ("_folder", "_lock", "_names", "_num_bytes", "_num_untrimmed", "_page_bytes", "_readers")

    def __init__(self, path: str | Path, *, page_bytes: int, num_bytes: int, fingerprint: bytes = b"") -> None:
        if page_bytes < 1:
            raise ValueError(f"page_bytes must be >= 1, got {page_bytes}")
        if num_bytes < page_bytes:
            raise ValueError(f"num_bytes must hold at least one page of {page_bytes} bytes, got {num_bytes}")
        self._folder = Path(path) / f"pages-{fingerprint.hex() or 'any'}-{page_bytes}"
        self._page_bytes = page_bytes
        self._num_bytes = num_bytes
        self._lock = Lock()
        self._readers = ThreadPoolExecutor(_NUM_READERS, "kv-folder")
        self._num_untrimmed = num_bytes  # bytes written since the last look; written by: put, _trim_if_due
        self._names = itertools.count()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for first in range(256):
                (self._folder / f"{first:02x}").mkdir(exist_ok=True)
            probe = self._temporary()
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise ValueError(f"path must be a folder that can be made and written, got {path}: {error}") from error
        self._trim_if_due()

    def put(self, keys: Sequence[bytes], pages: Sequence[Bytes]) -> None:
        """Write pages that are not there.

        Raises:
            OSError: the file system is full or failed.
            ValueError: a page has another size.
        """
        for key, page in zip(keys, pages, strict=True):
            if page.nbytes != self._page_bytes:
                raise ValueError(f"pages must have {self._page_bytes} bytes, got {page.nbytes}")
            path = self._path(key)
            if path.exists():
                continue
            temporary = self._temporary()
            try:
                with temporary.open("wb") as file:
                    file.write(checksum(key, page))
                    file.write(page.data)
                temporary.replace(path)
            except OSError:
                temporary.unlink(missing_ok=True)
                raise
            with self._lock:
                self._num_untrimmed += page.nbytes
        self._trim_if_due()

    def get(self, keys: Sequence[bytes], pages: Sequence[Bytes]) -> list[bool]:
        """Read and verify pages; a file that is torn is deleted."""
        return list(self._readers.map(self._get, keys, pages))

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Return which pages have a file."""
        return [self._path(key).exists() for key in keys]

    def close(self) -> None:
        """End the readers; no file stays open."""
        self._readers.shutdown()

    def _get(self, key: bytes, page: Bytes) -> bool:
        path = self._path(key)
        head = np.empty(CHECKSUM_BYTES, np.uint8)
        try:
            with path.open("rb", buffering=0) as file:
                num_read = os.preadv(file.fileno(), [head.data, page.data], 0)
                used_s = os.fstat(file.fileno()).st_mtime
        except FileNotFoundError:
            return False
        if num_read != head.nbytes + page.nbytes or checksum(key, page) != head.tobytes():
            path.unlink(missing_ok=True)
            return False
        if time.time() - used_s > _TOUCH_S:
            try:
                os.utime(path)
            except OSError:  # deleted meanwhile, or not ours to touch
                return True
        return True

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self._folder / name[:2] / name

    def _temporary(self) -> Path:
        return self._folder / f"{os.uname().nodename}-{os.getpid()}-{id(self):x}-{next(self._names)}.tmp"

    def _trim_if_due(self) -> None:
        """Delete the least recently used pages if enough has been written since the last time."""
        with self._lock:
            if self._num_untrimmed < self._num_bytes * _TRIM_SHARE:
                return
            self._num_untrimmed = 0
        now_s = time.time()
        for path, used_s, _ in _files(self._folder):
            if path.endswith(".tmp") and now_s - used_s > _ABANDONED_S:
                Path(path).unlink(missing_ok=True)
        files = [file for first in range(256) for file in _files(self._folder / f"{first:02x}")]
        excess = sum(size for _, _, size in files) - self._num_bytes
        if excess <= 0:
            return
        excess += int(self._num_bytes * _TRIM_SHARE)
        for path, _, size in sorted(files, key=lambda file: file[1]):
            if excess <= 0:
                return
            Path(path).unlink(missing_ok=True)
            excess -= size


def _files(folder: Path) -> Iterator[tuple[str, float, int]]:
    """Yield path, time of use and bytes of the files in a folder."""
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                status = entry.stat()
            except FileNotFoundError:  # another process trims too
                continue
            if entry.is_file():
                yield entry.path, status.st_mtime, status.st_size
