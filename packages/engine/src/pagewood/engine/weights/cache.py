"""A file of packed weights that later starts map, so that they need not pack again and processes share the pages.

    magic 8 bytes | offset of the index, its length: uint64 | SHA-256 of the index | zeros up to 4096 | matrices | index

Each matrix starts at a multiple of 4096 bytes. The index is JSON; the first bytes are written last, and the file gets
its name when it is whole, so a start that is interrupted leaves no file that looks whole.
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
from types import TracebackType
from typing import cast

import numpy as np
from numpy.typing import NDArray

_MAGIC = b"pagewdw1"
_HEAD = struct.Struct("<8sQQ32s")
_PAGE = 4096  # bytes
_VARIABLE = "PAGEWOOD_CACHE"

Bytes = NDArray[np.uint8]


class DamagedFile(ValueError):
    """A file of packed weights is not whole or not of this kind; the caller writes a new one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A matrix in a file."""

    label: str
    """What it is, for the reader to compare."""
    offset: int
    """Of its first byte."""
    num_bytes: int


def weights_file(identity: bytes, form: str) -> Path:
    """Return where packed weights are kept: in the folder of the environment's PAGEWOOD_CACHE, or ~/.cache/pagewood.

    Args:
        identity: bytes that identify the files of a model and the layout of packed weights.
        form: of the weights.
    """
    usual = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagewood"
    root = Path(os.environ.get(_VARIABLE) or usual)
    return root / "weights" / f"{sha256(identity + form.encode()).hexdigest()[:32]}.{form}"


class PackedReader:
    """The matrices of a file, in their order, mapped for reading."""

    __slots__ = ("_memory", "_place", "_sections", "path")

    def __init__(self, path: Path) -> None:
        """Open a file.

        Raises:
            FileNotFoundError: there is none.
            DamagedFile: its size, or the checksum of its index, is not what it says.
        """
        self.path = path
        self._place = 0  # written by: take
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(_HEAD.size)
            if len(head) < _HEAD.size:
                raise DamagedFile(f"{path} must have at least {_HEAD.size} bytes, got {len(head)}")
            magic, start, length, digest = _HEAD.unpack(head)
            if magic != _MAGIC or start + length != size:
                raise DamagedFile(f"{path} must be a file of packed weights of {start + length} bytes, got {size}")
            file.seek(start)
            index = file.read(length)
        if sha256(index).digest() != digest:
            raise DamagedFile(f"{path} must have an index with the checksum that it states, got another")
        entries = cast("list[tuple[str, int, int]]", json.loads(index))
        self._sections = [Section(label=label, offset=at, num_bytes=count) for label, at, count in entries]
        for section in self._sections:
            if section.offset < _PAGE or section.offset + section.num_bytes > start:
                raise DamagedFile(f"{path} must hold {section} before its index at {start}")
        self._memory: Bytes = np.memmap(path, np.uint8, mode="r")

    def take(self, label: str, num_bytes: int) -> Bytes:
        """Return the next matrix, read-only.

        Raises:
            DamagedFile: the next one is another, or there is none.
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

    __slots__ = ("_end", "_file", "_sections", "_temporary", "path")

    def __init__(self, path: Path) -> None:
        """Begin a file that replaces the one at `path` when it is whole.

        Raises:
            OSError: the folder cannot be written.
        """
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        number, name = tempfile.mkstemp(prefix=f"{path.name}.", suffix=".tmp", dir=path.parent)
        self._file = os.fdopen(number, "r+b")
        self._temporary = Path(name)
        self._sections: list[Section] = []  # written by: add
        self._end = _PAGE  # written by: add

    def __enter__(self) -> PackedWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Delete what is not finished."""
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

    def finish(self) -> None:
        """Give the file its name; the memory of its matrices stays valid.

        Raises:
            OSError: the disk is full, or the folder has gone.
        """
        index = json.dumps([(one.label, one.offset, one.num_bytes) for one in self._sections]).encode()
        _reserve(self._file.fileno(), self._end, len(index))
        self._file.seek(self._end)
        self._file.write(index)
        self._file.seek(0)
        self._file.write(_HEAD.pack(_MAGIC, self._end, len(index), sha256(index).digest()))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._temporary.replace(self.path)


def _reserve(number: int, start: int, num_bytes: int) -> None:
    """Make a file longer. Writing to mapped memory without space on the disk would end the process."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(number, start, num_bytes)
    else:
        os.ftruncate(number, start + num_bytes)
