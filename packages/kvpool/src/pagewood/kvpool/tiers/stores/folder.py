"""A remote tier without a service: pages in files of a folder that several processes or machines can access."""

import os
import stat
import time
from collections.abc import Iterator, Sequence, Set
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Lock

from pagewood.kvpool.arrays import check_at_least_one, require_whole
from pagewood.kvpool.tiers.pages.arrays import Bytes
from pagewood.kvpool.tiers.pages.keys import check_sizes
from pagewood.kvpool.tiers.stores.checksum import FORM
from pagewood.kvpool.tiers.stores.copier import PageCopier, Place
from pagewood.kvpool.tiers.stores.segments import (
    SUFFIX,
    UNFINISHED,
    Segments,
    create,
    delete,
    is_damaged,
    num_pages_in,
    read_table,
    segment_name,
    write_segment,
)

_PREFIX = "pages-"
# A process checks the size of the folder whenever it has written this share of the budget. Trimming leaves it free.
_TRIM_SHARE = 1 / 16
# The time of use of a segment is updated at most this often, so that reads rarely cause a write.
_TOUCH_S = 60.0
# An unfinished file that has not changed for this long belongs to a process that died.
_ABANDONED_S = 3600.0


class SharedFolder:
    """A `PageStore` that any number of processes can use at once, on a local disk, in memory (tmpfs), or on NFS.

    Invariant: a segment is a file of pages that were put together, and never changes under its final name. A torn
    segment counts as absent, and is deleted when a process notices it. A segment that cannot be read counts as absent
    in this process until the folder changes.

    There are no locks and no common index: each process reads the tables of the segments that it has not seen yet. A
    segment appears by an atomic rename. A segment that is deleted during a read can still be read to its end. The pages
    of a segment are dropped together, the least recently used segment first. Thread-safe.
    """

    __slots__ = (
        "_copier", "_folder", "_is_private", "_lock", "_max_pages", "_num_bytes", "_num_untrimmed", "_page_bytes",
        "_segments",
    )  # fmt: skip

    def __init__(
        self,
        path: str | Path,
        *,
        page_bytes: int,
        num_bytes: int,
        fingerprint: bytes = b"",
        is_private: bool = False,
    ) -> None:
        """Use the folder, and create it if it does not exist.

        Args:
            path: Path of the folder.
            page_bytes: Size of a page image, in bytes.
            num_bytes: Largest total size of the pages of this fingerprint, in bytes. All users of the folder together
                stay within it, plus up to a sixteenth for each user. A segment takes at most a sixteenth.
            fingerprint: Identifies the content of pages: model, dtype, layout. Pages of different fingerprints are kept
                apart.
            is_private: Whether only this user may read the folder, which is then for all fingerprints together:
                `num_bytes` limits all files in it, and those of other fingerprints make room too. See
                `shared_memory`.

        Raises:
            ValueError: A size is not an integer >= 1, `num_bytes` is less than one page, the folder cannot be created
                or written, or a private one belongs to another user or is open to others.
        """
        check_at_least_one(page_bytes=page_bytes)
        if require_whole("num_bytes", num_bytes) < page_bytes:
            raise ValueError(f"num_bytes must hold at least one page of {page_bytes} bytes, got {num_bytes}")
        self._folder = Path(path) / f"{_PREFIX}{FORM}-{fingerprint.hex() or 'any'}-{page_bytes}"
        self._is_private = is_private
        self._page_bytes = page_bytes
        self._num_bytes = num_bytes
        self._lock = Lock()
        self._max_pages = max(1, int(num_bytes * _TRIM_SHARE) // page_bytes)
        self._copier = PageCopier("kv-folder")
        self._segments = Segments(self._folder, page_bytes=page_bytes)
        # Bytes written since the size of the folder was last checked.
        self._num_untrimmed = num_bytes  # written by: _put_segment, _trim_if_due
        try:
            if is_private:
                _make_private(Path(path))
            self._folder.mkdir(mode=0o700 if is_private else 0o777, parents=not is_private, exist_ok=True)
            probe = self._segments.temporary()
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise ValueError(f"path must be a folder that can be made and written, got {path}: {error}") from error
        self._trim_if_due()

    def put(self, keys: Sequence[bytes], pages: Sequence[Bytes]) -> None:
        """Write the pages that the folder does not have, in one segment if they fit.

        Raises:
            OSError: The file system is full or failed.
            ValueError: A page or a key has the wrong size.
        """
        check_sizes(keys, pages, self._page_bytes)
        found = self._segments.find(keys)
        missing = [index for index, page in enumerate(found) if page is None]
        new = {page.name for page in found if page is not None}
        for start in range(0, len(missing), self._max_pages):
            indices = missing[start : start + self._max_pages]
            new.add(self._put_segment([keys[index] for index in indices], [pages[index] for index in indices]))
        self._trim_if_due(new)

    def get(self, keys: Sequence[bytes], pages: Sequence[Bytes]) -> list[bool]:
        """Read and verify pages; a segment with a torn page is deleted, and one that cannot be read is left alone."""
        found = self._segments.find(keys, is_opened=True)
        with ExitStack() as stack:
            files = {name: self._open(name, stack) for name in {page.name for page in found if page is not None}}
            places = [
                (index, Place(file=file, offset=page.offset, key=key, checksum=page.checksum))
                for index, (key, page) in enumerate(zip(keys, found, strict=True))
                if page is not None and (file := files[page.name]) is not None
            ]
            is_whole = self._copier.read([place for _, place in places], [pages[index] for index, _ in places])
            answer = [False] * len(keys)
            suspects: dict[str, list[bytes]] = {}
            for (index, _), is_good in zip(places, is_whole, strict=True):
                answer[index] = is_good
                page = found[index]
                if page is not None and not is_good:
                    suspects.setdefault(page.name, []).append(keys[index])
            for name, lost in suspects.items():
                file = files[name]
                if file is not None:
                    self._examine(name, file, lost)
        return answer

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Return which pages are in a segment."""
        return [page is not None for page in self._segments.find(keys)]

    def close(self) -> None:
        """End the threads; no file stays open."""
        self._copier.close()

    def _open(self, name: str, stack: ExitStack) -> int | None:
        """Open a segment until the stack is closed, and count a use; return None if it is gone or not readable."""
        try:
            file = os.open(self._folder / name, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._segments.drop(name)
            return None
        stack.callback(os.close, file)
        if time.time() - os.fstat(file).st_mtime > _TOUCH_S:
            with suppress(OSError):  # no permission
                os.utime(file)
        return file

    def _examine(self, name: str, file: int, lost: Sequence[bytes]) -> None:
        """Check why pages of an open segment were not read; delete the segment only if it is damaged.

        Another process may have put a segment with the same keys since the table was read; its pages may differ in
        their last bits. Then the new table is used.
        """
        self._segments.drop(name)
        with suppress(OSError):  # it cannot be read, perhaps only for the moment
            table = read_table(file, self._page_bytes)
            if table is None or is_damaged(file, table, lost, self._page_bytes):
                delete(self._folder / name, os.fstat(file), self._segments.temporary())
            else:
                self._segments.add(name, *table)

    def _put_segment(self, keys: Sequence[bytes], pages: Sequence[Bytes]) -> str:
        """Write a segment; return its name."""
        name = segment_name(keys)
        checksums = create(
            self._folder / name,
            self._segments.temporary(),
            lambda file: write_segment(file, self._copier, keys, pages),
            mode=0o600 if self._is_private else 0o666,
        )
        self._segments.add(name, keys, checksums)
        with self._lock:
            self._num_untrimmed += len(keys) * self._page_bytes
        return name

    def _trim_if_due(self, new: Set[str] = frozenset()) -> None:
        """Delete the least recently used segments if enough has been written since the last time.

        Args:
            new: Names of segments with the pages just put, some of which may have been there before. They go last.
        """
        with self._lock:
            if self._num_untrimmed < self._num_bytes * _TRIM_SHARE:
                return
            self._num_untrimmed = 0
        now_s = time.time()
        segments: list[tuple[Path, os.stat_result]] = []
        num_bytes = 0
        for folder in self._limited():
            for entry, status in _files(folder):
                path = Path(entry)
                if entry.name.endswith(UNFINISHED) and now_s - status.st_mtime > _ABANDONED_S:
                    path.unlink(missing_ok=True)
                    continue
                if entry.name.endswith(SUFFIX):
                    segments.append((path, status))
                num_bytes += self._num_bytes_of(status)
        excess = num_bytes - self._num_bytes
        if excess <= 0:
            return
        excess += int(self._num_bytes * _TRIM_SHARE)
        for path, status in sorted(segments, key=lambda one: (one[0].name in new, one[1].st_mtime_ns, one[0].name)):
            if excess <= 0:
                return
            if path.parent == self._folder:
                self._segments.drop(path.name)
            delete(path, status, path.with_name(self._segments.temporary().name))
            excess -= self._num_bytes_of(status)

    def _limited(self) -> list[Path]:
        """Return the folders that `num_bytes` limits together."""
        if not self._is_private:
            return [self._folder]
        with os.scandir(self._folder.parent) as entries:
            return [Path(entry) for entry in entries if entry.name.startswith(_PREFIX) and entry.is_dir()]

    def _num_bytes_of(self, status: os.stat_result) -> int:
        """Return the bytes of a file that count: those of its pages, or all if it may have pages of another size."""
        if self._is_private:
            return status.st_size
        return num_pages_in(status.st_size, self._page_bytes) * self._page_bytes


def _make_private(path: Path) -> None:
    """Make a folder that only this user can open.

    Raises:
        OSError: It cannot be made, or it is there and not such a folder.
    """
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise OSError(
            f"it must be a folder of user {os.geteuid()} with the mode 0700, got {stat.filemode(status.st_mode)} of "
            f"user {status.st_uid}"
        )


def _files(folder: Path) -> Iterator[tuple[os.DirEntry[str], os.stat_result]]:
    """Yield the files in a folder, with their sizes and times."""
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                yield entry, entry.stat()
            except FileNotFoundError:  # another process has deleted it
                continue
