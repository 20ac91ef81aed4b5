"""A file of packed weights that later starts map, so that they need not pack again and processes share the pages.

    magic 8 bytes | offset of the index, its length: uint64 | SHA-256 of index and checksums | zeros up to 4096
    matrices | index | checksums of 4096 bytes of matrices each: uint64

Each matrix starts at a multiple of 4096 bytes. The index is JSON; the first bytes are written last, and the file gets
its name when it is whole, so a start that is interrupted leaves no file that looks whole.

All matrices are compared with their checksums when a file is opened: the first step reads them anyway, and a damaged
file is replaced before anything was computed with it. A checksum is a sum of 64-bit words with an odd factor for each
place, modulo 2 ** 64: any change of one word changes it, and it takes a multiplication and an addition for eight bytes.
"""

from __future__ import annotations

import json
import os
import struct
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from threading import Thread
from typing import cast

import numpy as np
from numpy.typing import NDArray

from pagewood.engine.cache_folder import cache_root, remove_abandoned

_MAGIC = b"pagewdw2"
_HEAD = struct.Struct("<8sQQ32s")
_PAGE = 4096  # bytes
_WORDS = _PAGE // 8
_UNFINISHED = ".tmp"
_RUN_BYTES = 1 << 22
"""Bytes that are read and compared at a time, so that they stay in the cache of a core."""

Bytes = NDArray[np.uint8]


class DamagedFile(ValueError):
    """A file of packed weights is incomplete or of another kind; the caller writes a new one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A matrix in a file."""

    label: str
    """Description of the matrix, which the reader compares."""
    offset: int
    """Position of its first byte."""
    num_bytes: int


def weights_folder() -> Path:
    """Return the folder of all files of packed weights."""
    return cache_root() / "weights"


def weights_file(identity: bytes, form: str) -> Path:
    """Return the path of a file of packed weights.

    Args:
        identity: bytes that identify the files of a model and the layout of packed weights.
        form: of the weights.
    """
    return weights_folder() / f"{sha256(identity + form.encode()).hexdigest()[:32]}.{form}"


class PackedReader:
    """The matrices of a file, in their order, mapped for reading. Invariant: they are as they were written."""

    __slots__ = ("_memory", "_place", "_sections", "path")

    def __init__(self, path: Path, *, num_threads: int = 1) -> None:
        """Open a file and read all of it once.

        Args:
            path: of the file.
            num_threads: threads that read it.

        Raises:
            FileNotFoundError: there is none.
            DamagedFile: its size or a checksum does not match its content.
        """
        self.path = path
        self._place = 0  # written by: take
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(_HEAD.size)
            if len(head) < _HEAD.size:
                raise DamagedFile(f"{path} must have at least {_HEAD.size} bytes, got {len(head)}")
            magic, start, length, digest = _HEAD.unpack(head)
            whole = start + length + start // _PAGE * 8 - 8
            if magic != _MAGIC or start % _PAGE or whole != size:
                raise DamagedFile(f"{path} must be a file of packed weights of {whole} bytes, got {size}")
            file.seek(start)
            index, checksums = file.read(length), file.read()
        if sha256(index + checksums).digest() != digest:
            raise DamagedFile(f"{path} must have an index with the checksum that it states, got another")
        entries = cast("list[tuple[str, int, int]]", json.loads(index))
        self._sections = [Section(label=label, offset=at, num_bytes=count) for label, at, count in entries]
        for section in self._sections:
            if section.offset < _PAGE or section.offset + section.num_bytes > start:
                raise DamagedFile(f"{path} must hold {section} before its index at {start}")
        with path.open("rb", buffering=0) as file:
            damaged = _damaged_pages(file.fileno(), np.frombuffer(checksums, "<u8"), num_threads)
        if damaged:
            raise DamagedFile(
                f"{path} must have the contents that were written, got others in {len(damaged)} of its "
                f"{start // _PAGE - 1} pages of {_PAGE} bytes, the first at {damaged[0] * _PAGE}"
            )
        self._memory: Bytes = np.memmap(path, np.uint8, mode="r")

    def take(self, label: str, num_bytes: int) -> Bytes:
        """Return the next matrix, read-only.

        Raises:
            DamagedFile: the next matrix has another label or size, or there is none.
        """
        if self._place == len(self._sections):
            raise DamagedFile(f"{self.path} must hold {label} behind its {self._place} matrices")
        section = self._sections[self._place]
        if section.label != label or section.num_bytes != num_bytes:
            raise DamagedFile(
                f"{self.path} must hold {label} of {num_bytes} bytes as matrix {self._place}, got {section}"
            )
        self._place += 1
        return np.asarray(self._memory)[section.offset : section.offset + num_bytes]

    def finish(self) -> None:
        """Check that all matrices were taken.

        Raises:
            DamagedFile: some were not.
        """
        if self._place != len(self._sections):
            raise DamagedFile(f"{self.path} must hold {self._place} matrices, got {len(self._sections)}")


class PackedWriter:
    """Writes a file of packed weights. It is mapped while it is written, so there is no second copy of a matrix."""

    __slots__ = ("_end", "_file", "_sections", "_temporary")

    def __init__(self, folder: Path) -> None:
        """Begin a file in a folder.

        Raises:
            OSError: the folder cannot be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        remove_abandoned(folder, f"*{_UNFINISHED}")
        number, name = tempfile.mkstemp(suffix=_UNFINISHED, dir=folder)
        self._file = os.fdopen(number, "r+b")
        self._temporary = Path(name)
        self._sections: list[Section] = []  # written by: add
        self._end = _PAGE  # written by: add

    def __enter__(self) -> PackedWriter:
        return self

    def __exit__(self, *error: object) -> None:
        """Delete the file unless it is finished."""
        self._file.close()
        with suppress(OSError):
            self._temporary.unlink()

    def add(self, label: str, num_bytes: int) -> Bytes:
        """Return memory for the next matrix, to be written; it is the file.

        Raises:
            OSError: the disk is full.
        """
        _reserve(self._file.fileno(), self._end, num_bytes)
        section = Section(label=label, offset=self._end, num_bytes=num_bytes)
        self._sections.append(section)
        self._end += -(-num_bytes // _PAGE) * _PAGE
        memory = np.memmap(self._file, np.uint8, mode="r+", offset=section.offset, shape=(num_bytes,))
        return np.asarray(memory)

    def finish(self, path: Path) -> None:
        """Give the file its name, in the same folder; the memory of its matrices stays valid, and must not change.

        Raises:
            OSError: the disk is full, or the folder has gone.
        """
        index = json.dumps([(one.label, one.offset, one.num_bytes) for one in self._sections]).encode()
        checksums = np.zeros(self._end // _PAGE - 1, "<u8")
        _reserve(self._file.fileno(), self._end, len(index) + checksums.nbytes)
        for first in range(0, len(checksums), _RUN_BYTES // _PAGE):
            count = min(len(checksums) - first, _RUN_BYTES // _PAGE)
            pages = np.memmap(self._file, np.uint8, mode="r", offset=(first + 1) * _PAGE, shape=(count * _PAGE,))
            checksums[first : first + count] = _checksums(pages)
        behind = index + checksums.tobytes()
        self._file.seek(self._end)
        self._file.write(behind)
        self._file.seek(0)
        self._file.write(_HEAD.pack(_MAGIC, self._end, len(index), sha256(behind).digest()))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._temporary.replace(path)


def _checksums(pages: Bytes) -> NDArray[np.uint64]:
    """Return the checksum of each page of 4096 bytes."""
    return pages.view("<u8").reshape(-1, _WORDS) @ _factors()


def _factors() -> NDArray[np.uint64]:
    """Return an odd number for each word of a page."""
    return (np.arange(1, _WORDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)) | np.uint64(1)


def _damaged_pages(descriptor: int, checksums: NDArray[np.uint64], num_threads: int) -> list[int]:
    """Return the pages of a file whose contents do not have their checksums, from page 1 on, ascending.

    It is read, not mapped: pages of a mapping would count as memory of this process.
    """
    runs = iter(range(0, len(checksums), _RUN_BYTES // _PAGE))
    damaged: list[int] = []

    def compare() -> None:
        buffer = np.zeros(_RUN_BYTES, np.uint8)
        for first in runs:  # next() of a range's iterator is atomic
            expected = checksums[first : first + _RUN_BYTES // _PAGE]
            part = buffer[: len(expected) * _PAGE]
            if _read_whole(descriptor, part, (first + 1) * _PAGE):
                found = np.flatnonzero(_checksums(part) != expected) + first + 1
                damaged.extend(found.tolist())
            else:
                damaged.append(first + 1)

    threads = [Thread(target=compare) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sorted(damaged)


def _read_whole(descriptor: int, memory: Bytes, offset: int) -> bool:
    """Fill memory from a file; return False if the file ends before, or cannot be read."""
    place = 0
    try:
        while place < len(memory):
            count = os.preadv(descriptor, [memory[place:].data], offset + place)
            if not count:
                return False
            place += count
    except OSError:
        return False
    return True


def _reserve(number: int, start: int, num_bytes: int) -> None:
    """Make a file longer. Writing to mapped memory without space on the disk would end the process."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(number, start, num_bytes)
    else:
        os.ftruncate(number, start + num_bytes)
