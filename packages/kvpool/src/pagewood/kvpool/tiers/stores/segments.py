"""Segments: the files of a shared folder, and this process's index of them.

A segment holds pages that were put together. It is written once, under a temporary name, and never changed afterwards.

| part | bytes | contents |
|---|---|---|
| pages | page_bytes each | page images |
| table | 48 each | key (32), checksum (16) |
| mark | 16 | "pagewood segment" |

A segment is never synced. After a crash a damaged segment has no mark at its end, or pages that do not match their
checksums. The name of the file is a hash of its keys, so processes that put the same pages at the same time write the
same file. The name of the folder contains the kind of checksum of its segments.

While it is written, a segment has no name at all where the file system can do that: if the process is killed, the
system takes the memory back. Elsewhere (NFS) it has a temporary name.
"""

import errno
import itertools
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from threading import Lock
from typing import TypeAlias, TypeVar
from uuid import uuid4

import numpy as np

from pagewood.kvpool.tiers.pages.arrays import Bytes
from pagewood.kvpool.tiers.stores.checksum import checksum
from pagewood.kvpool.tiers.stores.copier import PageCopier, read_rows, write_rows

_T = TypeVar("_T")

Table: TypeAlias = tuple[list[bytes], list[bytes]]
"""The keys and the checksums of the pages of a segment, in the order of the pages."""

SUFFIX = ".pages"
UNFINISHED = ".tmp"
_MARK = b"pagewood segment"
_ENTRY = np.dtype([("key", "u1", 32), ("checksum", "u1", 16)])
# Changes within one tick of the file system's clock do not change a folder's modification time. So a folder that was
# modified less than this long ago may change again without notice.
_SETTLED_NS = 2_000_000_000
# Opens a file without a name in a folder; only Linux has this flag.
_UNNAMED: int | None = getattr(os, "O_TMPFILE", None)
# How file systems say that they have no such files.
_NAMED_ONLY = frozenset((errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL))


def num_pages_in(num_bytes: int, page_bytes: int) -> int:
    """Return the number of pages in a segment of `num_bytes` bytes."""
    return max(0, num_bytes - len(_MARK)) // (page_bytes + _ENTRY.itemsize)


def segment_name(keys: Sequence[bytes]) -> str:
    """Return the file name of the segment of these pages."""
    return blake2b(b"".join(keys), digest_size=32).hexdigest() + SUFFIX


def create(path: Path, temporary: Path, write: Callable[[int], _T], *, mode: int) -> _T:
    """Write a file that appears under its name when it is complete, and return what `write` returns.

    Args:
        path: Path of the file; one that is there is replaced.
        temporary: Path in the same folder that no file has.
        write: Writes the contents to a file descriptor.
        mode: Permissions of the file, less those of the process's mask.

    Raises:
        OSError: The file system is full or failed. No file is left behind.
    """
    file = _open_unnamed(path.parent, mode)
    is_named = file is None
    try:
        if file is None:
            file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        result = write(file)
        if is_named or not _link(file, path):
            if not is_named:
                _link(file, temporary)
            temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        if file is not None:
            os.close(file)
    return result


def _link(file: int, path: Path) -> bool:
    """Give an open file without a name its name; return whether no other file has that name."""
    try:  # with a descriptor as the folder, Python follows the link in /proc to the file itself
        os.link(f"/proc/self/fd/{file}", path, src_dir_fd=file, follow_symlinks=True)
    except FileExistsError:
        return False
    return True


def _open_unnamed(folder: Path, mode: int) -> int | None:
    """Open a file without a name for writing; None: the file system has none, or /proc cannot give it one."""
    if _UNNAMED is None or not os.path.isdir("/proc/self/fd"):
        return None
    try:
        return os.open(folder, os.O_WRONLY | _UNNAMED | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno in _NAMED_ONLY:
            return None
        raise


def write_segment(file: int, copier: PageCopier, keys: Sequence[bytes], pages: Sequence[Bytes]) -> list[bytes]:
    """Write a segment to an empty file; return the checksums of its pages.

    Raises:
        OSError: The file system is full or failed.
    """
    checksums = copier.write(file, 0, keys, pages)
    entries = b"".join(part for entry in zip(keys, checksums, strict=True) for part in entry)
    write_rows(file, [np.frombuffer(entries + _MARK, np.uint8)], sum(page.nbytes for page in pages))
    return checksums


def read_table(file: int, page_bytes: int) -> Table | None:
    """Return the table of a segment, or None if the segment is torn.

    Raises:
        OSError: The file system failed; the segment may be intact.
    """
    size = os.fstat(file).st_size
    n = num_pages_in(size, page_bytes)
    tail = np.empty(max(0, size - n * page_bytes), np.uint8)
    is_whole = tail.size == n * _ENTRY.itemsize + len(_MARK) and read_rows(file, [tail], n * page_bytes)
    if not is_whole or tail[-len(_MARK) :].tobytes() != _MARK:
        return None
    table = tail[: -len(_MARK)].view(_ENTRY)
    return [key.tobytes() for key in table["key"]], [checksum.tobytes() for checksum in table["checksum"]]


def is_damaged(file: int, table: Table, keys: Sequence[bytes], page_bytes: int) -> bool:
    """Read pages of a segment; return whether one is missing or does not match the segment's own table.

    Raises:
        OSError: The file system failed; the segment may be intact.
    """
    indices = {key: index for index, key in enumerate(table[0])}
    page = np.empty(page_bytes, np.uint8)
    for key in keys:
        index = indices.get(key)
        if index is None or not read_rows(file, [page], index * page_bytes) or checksum(key, page) != table[1][index]:
            return True
    return False


def delete(path: Path, status: os.stat_result, aside: Path) -> None:
    """Delete a segment, unless another process has replaced it or used it since `status` was taken.

    A file cannot be deleted by its identity. So it is renamed first, and renamed back if it is not the one that was
    meant. Another process may miss the segment in between. A segment that cannot be deleted stays.

    Args:
        path: Path of the segment.
        status: Status of the file to delete.
        aside: Path in the same folder that no file has; its suffix is `UNFINISHED`.
    """
    with suppress(OSError):
        if _identity(path.stat()) != _identity(status):
            return
        path.rename(aside)
        if _identity(aside.stat()) == _identity(status):
            aside.unlink()
        else:
            aside.rename(path)


def _identity(status: os.stat_result) -> tuple[int, int, int]:
    """Return an identity that distinguishes a file from a later one with its name, and perhaps its inode."""
    return status.st_dev, status.st_ino, status.st_mtime_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class PageInSegment:
    """The place of a page in a folder.

    Attributes:
        name: Name of the segment.
        offset: Offset of the page in the segment, in bytes.
        checksum: Expected checksum of the page.
    """

    name: str
    offset: int
    checksum: bytes


class Segments:
    """The segment of each page in a folder, as far as this process has read the folder.

    Invariant: every known page is in a known segment. A segment that another process has deleted since the folder was
    listed is noticed when it is opened. Thread-safe.
    """

    __slots__ = ("_folder", "_keys", "_lock", "_looked_ns", "_mark", "_names", "_page_bytes", "_pages")

    def __init__(self, folder: Path, *, page_bytes: int) -> None:
        """Start with no known segments.

        Args:
            folder: Folder of the segments.
            page_bytes: Size of a page image, in bytes.
        """
        self._folder = folder
        self._page_bytes = page_bytes
        self._lock = Lock()
        # A process that has ended may have left files, and the next one may have its number.
        self._mark = uuid4().hex
        self._names = itertools.count()
        self._pages: dict[bytes, PageInSegment] = {}  # written by: _add, _drop
        # The keys in each segment.
        self._keys: dict[str, list[bytes]] = {}  # written by: _add, _drop
        # The folder's modification time when it was listed, or 0 if it may have changed since without notice.
        self._looked_ns = 0  # written by: _look

    def temporary(self) -> Path:
        """Return a path in the folder that no process uses."""
        return self._folder / f"{os.uname().nodename}-{os.getpid()}-{self._mark}-{next(self._names)}{UNFINISHED}"

    def find(self, keys: Sequence[bytes], *, is_opened: bool = False) -> list[PageInSegment | None]:
        """Return the place of each page, or None if no segment has it.

        Lists the folder if it has changed. If the pages are going to be opened, which notices that one is gone, only if
        one is not known.
        """
        with self._lock:
            if not is_opened or any(key not in self._pages for key in keys):
                self._look()
            return [self._pages.get(key) for key in keys]

    def add(self, name: str, keys: Sequence[bytes], checksums: Sequence[bytes]) -> None:
        """Record a complete segment."""
        with self._lock:
            self._add(name, keys, checksums)

    def drop(self, name: str) -> None:
        """Forget a segment that is gone or torn."""
        with self._lock:
            self._drop(name)

    def _look(self) -> None:
        """List the folder if it has changed: forget segments that are gone, and read the tables of new ones."""
        changed_ns = self._folder.stat().st_mtime_ns
        if changed_ns == self._looked_ns:
            return
        names = {entry.name for entry in os.scandir(self._folder) if entry.name.endswith(SUFFIX)}
        for name in self._keys.keys() - names:
            self._drop(name)
        for name in names - self._keys.keys():
            table = self._read(name)
            if table is not None:
                self._add(name, *table)
        self._looked_ns = changed_ns if time.time_ns() - changed_ns > _SETTLED_NS else 0

    def _read(self, name: str) -> Table | None:
        """Return the table of a segment, or None if it cannot be read or is torn; a torn one is deleted."""
        path = self._folder / name
        try:
            with path.open("rb", buffering=0) as file:
                table = read_table(file.fileno(), self._page_bytes)
                if table is None:
                    delete(path, os.fstat(file.fileno()), self.temporary())
                return table
        except OSError:
            return None

    def _add(self, name: str, keys: Sequence[bytes], checksums: Sequence[bytes]) -> None:
        self._keys[name] = list(keys)
        for index, (key, expected) in enumerate(zip(keys, checksums, strict=True)):
            self._pages[key] = PageInSegment(name=name, offset=index * self._page_bytes, checksum=expected)

    def _drop(self, name: str) -> None:
        for key in self._keys.pop(name, ()):
            if key in self._pages and self._pages[key].name == name:
                del self._pages[key]
