"""The files of a log: frames of msgpack, each after its length, in a file and an older one."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pagewood.engine.decision_log.frames import DECODER, ENCODER, VERSION, Header, Record

_MAGIC = b"pagewood decisions\n"
_LENGTH = struct.Struct("<I")
_BUFFER_BYTES = 1 << 16


class LogFile:
    """Writes frames. Invariant: both files together take at most the given size, apart from one frame.

    An existing file becomes the older one, and so does the file whenever it has reached half of the size. Both can be
    read by their owner only.

    Args:
        path: of the file; the older one has `.1` behind its name.
        max_bytes: of both files.

    Raises:
        OSError: the file cannot be written.
    """

    __slots__ = ("_buffer", "_file", "_max_bytes", "_path", "_size")

    def __init__(self, path: Path, *, max_bytes: int) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._buffer = bytearray()  # written by: append, flush, drop, _open
        self._size = 0  # written by: append, _open
        self._file = -1  # written by: _open, begin, close
        if path.exists():
            os.replace(path, older(path))
        self._open()

    @property
    def is_full(self) -> bool:
        """Whether the next record should begin another file."""
        return self._size >= self._max_bytes // 2

    def begin(self, header: Header) -> None:
        """Begin another file, which makes this one the older."""
        self.close()
        os.replace(self._path, older(self._path))
        self._open()
        self.append(header)

    def append(self, frame: Header | Record) -> None:
        """Write a frame, now or later."""
        data = ENCODER.encode(frame)
        self._buffer += _LENGTH.pack(len(data)) + data
        self._size += _LENGTH.size + len(data)
        if len(self._buffer) >= _BUFFER_BYTES:
            self.flush()

    def flush(self) -> None:
        """Hand all buffered frames over to the system."""
        buffer, self._buffer = self._buffer, bytearray()
        view = memoryview(buffer)
        while view:
            view = view[os.write(self._file, view) :]

    def close(self) -> None:
        """Write the remaining frames and close the file; a second call does nothing."""
        if self._file >= 0:
            try:
                self.flush()
            finally:
                os.close(self._file)
                self._file = -1

    def drop(self) -> None:
        """Close the file without writing the remaining frames."""
        self._buffer.clear()
        self.close()

    def _open(self) -> None:
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._buffer += _MAGIC
        self._size = len(_MAGIC)


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """A log that can be read, any number of times."""

    header: Header
    """The header of its oldest file."""
    files: tuple[Path, ...]
    """Oldest first."""

    @classmethod
    def at(cls, path: Path) -> Log:
        """Return the log in a file, together with its older file if both are of one run and nothing is missing.

        Raises:
            ValueError: it is not such a log, or of another version.
            FileNotFoundError: there is no such file.
        """
        header = _header_of(path)
        before = older(path)
        if header.first and before.exists():
            first = _header_of(before)
            numbers = [frame.number for frame in _frames(before) if isinstance(frame, Record)]
            if first.run == header.run and numbers and numbers[-1] + 1 == header.first:
                return cls(header=first, files=(before, path))
        return cls(header=header, files=(path,))

    def frames(self) -> Iterator[Header | Record]:
        """Yield the header of each file, and its records. An incomplete frame ends them: the engine died."""
        for path in self.files:
            yield from _frames(path)


def older(path: Path) -> Path:
    """Return the path of a log's older file."""
    return path.with_name(path.name + ".1")


def _header_of(path: Path) -> Header:
    header = next(_frames(path), None)
    if not isinstance(header, Header):
        raise ValueError(f"log must begin with a header, got {path}")
    return header


def _frames(path: Path) -> Iterator[Header | Record]:
    with path.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise ValueError(f"log must be a decision log of pagewood, got {path}")
        while len(length := file.read(_LENGTH.size)) == _LENGTH.size:
            data = file.read(_LENGTH.unpack(length)[0])
            if len(data) < _LENGTH.unpack(length)[0]:
                return
            try:
                frame = DECODER.decode(data)
            except msgspec.DecodeError as error:
                raise ValueError(
                    f"log must hold frames of version {VERSION}, got {path} at {file.tell()}: {error}"
                ) from None
            if isinstance(frame, Header) and frame.version != VERSION:
                raise ValueError(f"log must be of version {VERSION}, got {frame.version}")
            yield frame
