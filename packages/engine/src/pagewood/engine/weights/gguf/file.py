"""The header of a GGUF file, read without trust: every count, length and offset is compared with the file's size.

Source: ggml, docs/gguf.md, versions 2 and 3.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAGIC = b"GGUF"
BLOCKS = MappingProxyType(
    {
        0: ("F32", 1, 4),
        1: ("F16", 1, 2),
        2: ("Q4_0", 32, 18),
        3: ("Q4_1", 32, 20),
        6: ("Q5_0", 32, 22),
        7: ("Q5_1", 32, 24),
        8: ("Q8_0", 32, 34),
        10: ("Q2_K", 256, 84),
        11: ("Q3_K", 256, 110),
        12: ("Q4_K", 256, 144),
        13: ("Q5_K", 256, 176),
        14: ("Q6_K", 256, 210),
        20: ("IQ4_NL", 32, 18),
        23: ("IQ4_XS", 256, 136),
        30: ("BF16", 1, 2),
        39: ("MXFP4", 32, 17),
    }
)
"""By number: the name of a type, the numbers of a block, and its bytes."""
_OTHERS = MappingProxyType(
    {
        9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S",
        24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4",
    }
)  # fmt: skip
_NUMBERS = MappingProxyType(
    {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "|b1", 10: "<u8", 11: "<i8", 12: "<f8"}
)
_STRING, _ARRAY = 8, 9
_MOST_KEYS, _MOST_TENSORS, _MOST_ITEMS = 1 << 16, 1 << 18, 1 << 24
_LONGEST_NAME = 1 << 10
_MOST_DIMENSIONS = 4
_LARGEST_ALIGNMENT = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """The place of a tensor in a file."""

    shape: tuple[int, ...]
    """The last dimension is the one along which blocks lie."""
    kind: str
    """Name of the type, as in "Q4_K"."""
    start: int
    """First byte in the file."""
    num_bytes: int


class GGUFFile:
    """A GGUF file, mapped. Invariant: every tensor lies inside the file, and no two overlap."""

    __slots__ = ("_bytes", "_others", "metadata", "path", "tensors")

    def __init__(self, path: Path) -> None:
        """Read the header.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is not a whole GGUF file, or a type of a tensor is not supported.
        """
        self.path = path
        if path.stat().st_size < 24:
            raise ValueError(f"{path} must be a GGUF file of at least 24 bytes, got {path.stat().st_size}")
        # A writable private mapping that is never written, because torch warns about read-only memory.
        self._bytes: NDArray[np.uint8] = np.memmap(path, np.uint8, mode="c")
        reader = _Reader(self._bytes, path)
        num_tensors, num_keys = reader.preamble()
        self.metadata: dict[str, Any] = {}  # written by: __init__
        for _ in range(num_keys):
            key = reader.name("a key")
            if key in self.metadata:
                raise ValueError(f"{path}: keys must differ, got {key!r} twice")
            self.metadata[key] = reader.value(key)
        entries = [reader.tensor() for _ in range(num_tensors)]
        self.tensors = _placed(entries, self._alignment(), reader.position, len(self._bytes), path)
        self._others: dict[str, GGUFFile] = {}  # written by: append
        """The file of a tensor, if it is another part of this one."""

    def append(self, part: GGUFFile) -> None:
        """Take in the tensors of another part of the same model.

        Raises:
            ValueError: both have a tensor of the same name.
        """
        for name, stored in part.tensors.items():
            if name in self.tensors:
                raise ValueError(f"{part.path}: names of tensors must differ, got {name!r}, which {self.path} has too")
            self.tensors[name] = stored
            self._others[name] = part

    def raw(self, name: str) -> NDArray[np.uint8]:
        """Return the bytes of a tensor, mapped; a row holds the numbers along its last dimension."""
        if name in self._others:
            return self._others[name].raw(name)
        stored = self.tensors[name]
        return self._bytes[stored.start : stored.start + stored.num_bytes].reshape(*stored.shape[:-1], -1)

    def _alignment(self) -> int:
        value = self.metadata.get("general.alignment", 32)
        if type(value) is not int or not 1 <= value <= _LARGEST_ALIGNMENT or value & (value - 1):
            raise ValueError(
                f"{self.path}: general.alignment must be a power of two up to {_LARGEST_ALIGNMENT}, got {value!r:.80}"
            )
        return value


class _Reader:
    """Reads a header from its beginning. Invariant: `position` is in the file."""

    __slots__ = ("_buffer", "_path", "_size", "position")

    def __init__(self, content: NDArray[np.uint8], path: Path) -> None:
        self._buffer: memoryview = content.data
        self._size = len(content)
        self._path = path
        self.position = 0  # written by: _take

    def preamble(self) -> tuple[int, int]:
        """Return the numbers of tensors and of keys."""
        magic = bytes(self._take(4, "the magic"))
        if magic != MAGIC:
            raise ValueError(f"{self._path} must begin with {MAGIC!r} to be a GGUF file, got {magic!r}")
        (version,) = struct.unpack("<I", self._take(4, "the version"))
        if version not in (2, 3):
            order = " (a file of another byte order)" if version in (2 << 24, 3 << 24) else ""
            raise ValueError(f"{self._path}: the version of GGUF must be 2 or 3, got {version}{order}")
        num_tensors = self._count("the number of tensors", _MOST_TENSORS, 24)
        return num_tensors, self._count("the number of keys", _MOST_KEYS, 13)

    def name(self, what: str) -> str:
        """Return a short string."""
        return self._string(what, _LONGEST_NAME)

    def value(self, key: str) -> Any:
        """Return a value: a number, a string, a list of strings, or a list of numbers."""
        (kind,) = struct.unpack("<I", self._take(4, f"the type of {key}"))
        if kind in _NUMBERS:
            return self._numbers(kind, 1, key)[0]
        if kind == _STRING:
            return self._string(key, self._size)
        if kind != _ARRAY:
            raise ValueError(f"{self._path}: the type of {key} must be 0 to 12, got {kind}")
        (kind,) = struct.unpack("<I", self._take(4, f"the type of the items of {key}"))
        if kind in _NUMBERS:
            size = np.dtype(_NUMBERS[kind]).itemsize
            return self._numbers(kind, self._count(f"the number of items of {key}", _MOST_ITEMS, size), key)
        if kind != _STRING:
            raise ValueError(f"{self._path}: the items of {key} must be numbers or strings, got type {kind}")
        count = self._count(f"the number of items of {key}", _MOST_ITEMS, 8)
        return [self._string(key, self._size) for _ in range(count)]

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Return name, shape, type and offset of a tensor."""
        name = self.name("the name of a tensor")
        (num_dimensions,) = struct.unpack("<I", self._take(4, f"the dimensions of {name}"))
        if not 1 <= num_dimensions <= _MOST_DIMENSIONS:
            raise ValueError(f"{self._path}: {name} must have 1 to {_MOST_DIMENSIONS} dimensions, got {num_dimensions}")
        shape = struct.unpack(f"<{num_dimensions}Q", self._take(8 * num_dimensions, f"the shape of {name}"))
        kind, offset = struct.unpack("<IQ", self._take(12, f"the offset of {name}"))
        return name, shape[::-1], kind, offset

    def _numbers(self, kind: int, count: int, key: str) -> list[Any]:
        dtype = np.dtype(_NUMBERS[kind])
        return np.frombuffer(self._take(count * dtype.itemsize, key), dtype).tolist()

    def _string(self, what: str, longest: int) -> str:
        (length,) = struct.unpack("<Q", self._take(8, f"the length of {what}"))
        if length > longest:
            raise ValueError(f"{self._path}: {what} must have at most {longest} bytes, got {length}")
        try:
            return str(self._take(length, what), "utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{self._path}: {what} must be UTF-8: {error}") from error

    def _count(self, what: str, most: int, least_bytes: int) -> int:
        """Read a number of items that take at least `least_bytes` bytes each in the rest of the file."""
        (count,) = struct.unpack("<Q", self._take(8, what))
        possible = min(most, (self._size - self.position) // least_bytes)
        if count > possible:
            raise ValueError(f"{self._path}: {what} must be at most {possible}, got {count}")
        return count

    def _take(self, length: int, what: str) -> memoryview:
        end = self.position + length
        if end > self._size:
            raise ValueError(f"{self._path} must not end inside {what}: {end} bytes are needed, got {self._size}")
        taken = self._buffer[self.position : end]
        self.position = end
        return taken


def _placed(
    entries: list[tuple[str, tuple[int, ...], int, int]], alignment: int, header_end: int, size: int, path: Path
) -> dict[str, StoredTensor]:
    """Return the places of tensors.

    Raises:
        ValueError: a name is there twice, a type is not supported, or tensors overlap or lie outside the file.
    """
    first = -(-header_end // alignment) * alignment
    placed: dict[str, StoredTensor] = {}
    for name, shape, kind, offset in entries:
        if name in placed:
            raise ValueError(f"{path}: names of tensors must differ, got {name!r} twice")
        if kind not in BLOCKS:
            known = ", ".join(sorted(known for known, _, _ in BLOCKS.values()))
            raise ValueError(f"{path}: the type of {name} must be one of {known}, got {_OTHERS.get(kind, kind)}")
        shown, per_block, block_bytes = BLOCKS[kind]
        if min(shape) < 1 or shape[-1] % per_block:
            rule = f" and the last a multiple of {per_block}" if per_block > 1 else ""
            raise ValueError(f"{path}: the dimensions of {name} must be >= 1{rule} for {shown}, got {shape}")
        if offset % alignment:
            raise ValueError(f"{path}: the offset of {name} must be a multiple of {alignment}, got {offset}")
        num_bytes = math.prod(shape) // per_block * block_bytes
        if first + offset + num_bytes > size:
            raise ValueError(
                f"{path}: {name} must lie in the file of {size} bytes, got {num_bytes} bytes from {first + offset} on"
            )
        placed[name] = StoredTensor(shape=shape, kind=shown, start=first + offset, num_bytes=num_bytes)
    end, last = 0, ""
    for name, stored in sorted(placed.items(), key=lambda item: item[1].start):
        if stored.start < end:
            raise ValueError(
                f"{path}: tensors must not overlap, got {last} until {end} and {name} from {stored.start} on"
            )
        end, last = stored.start + stored.num_bytes, name
    return placed
