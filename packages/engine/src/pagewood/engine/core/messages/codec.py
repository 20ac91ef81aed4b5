"""Batches, results and what passes between them as bytes, for a runner in another process or on another machine.

A message is a header in msgpack and the bytes of its arrays, one after the other:

    4 bytes  length of the header, little-endian
    header   [kind, values of the fields; of an array in their place its dtype and shape], padded to 8 bytes
    arrays   in the order of the fields, each padded to 8 bytes

Nothing in a message is executed. A message is read into memory of its own, which the arrays share and may change.
"""

from __future__ import annotations

import math
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Any, TypeAlias, TypeVar, cast, get_args, get_origin

import msgspec
import numpy as np
from numpy.typing import NDArray

from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.core.messages.batch import Batch
from pagewood.engine.core.messages.result import StepResult

_ALIGNMENT = 8
_DTYPES = [np.dtype(kind) for kind in (np.int32, np.int64, np.float32, np.bool_)]
_NUMBERS = {dtype: number for number, dtype in enumerate(_DTYPES)}
_PADDING = [bytes(-size % _ALIGNMENT) for size in range(_ALIGNMENT)]

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafts:
    """What `ConstrainedHandle.drafts` returns, for M grants with D drafts in all."""

    counts: Int32
    """[M], drafts of each."""
    tokens: Int32
    """[D], in the order of the grants."""

    @classmethod
    def of(cls, drafts: Sequence[Sequence[int]]) -> Drafts:
        """Return the drafts of some grants."""
        return cls(
            counts=np.array([len(one) for one in drafts], np.int32),
            tokens=np.array([token for one in drafts for token in one], np.int32),
        )

    def by_grant(self) -> list[tuple[int, ...]]:
        """Return the drafts of each grant."""
        tokens: list[int] = self.tokens.tolist()
        ends = np.cumsum(self.counts).tolist()
        return [tuple(tokens[end - count : end]) for end, count in zip(ends, self.counts.tolist(), strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Masks:
    """What `ConstrainedHandle.constrain` gets."""

    masks: Int32
    """[>= M and drafts, words of a mask]."""


Message: TypeAlias = Batch | StepResult | Drafts | Masks
_KINDS: tuple[type[Any], ...] = (Batch, StepResult, Drafts, Masks)


def encode(message: Message) -> bytes:
    """Return a message as bytes.

    Raises:
        TypeError: an array has a dtype that no field has, or a value is of no plain type.
    """
    arrays: list[bytes] = []
    kind = cast("type[Any]", type(message))
    header = _encode([_KINDS.index(kind), _plan(kind).write(message, arrays)])
    return b"".join([len(header).to_bytes(4, "little"), header, _PADDING[(4 + len(header)) % _ALIGNMENT], *arrays])


def decode(data: bytes | memoryview) -> Message:
    """Return the message that `encode` has made bytes of.

    Raises:
        ValueError: it is no such message, or it is not whole.
    """
    memory = bytearray(data)
    length = int.from_bytes(memory[:4], "little")
    try:
        header: tuple[int, list[Any]] = _decode(memoryview(memory)[4 : 4 + length])
        kind, values = header
        arrays = _Arrays(memory, 4 + length + (-(4 + length) % _ALIGNMENT))
        message = _plan(_KINDS[kind]).read(values, arrays)
    except (msgspec.DecodeError, msgspec.ValidationError, TypeError, IndexError, ValueError, OverflowError) as error:
        raise ValueError(f"data must be a message of this version, got {len(memory)} bytes: {error}") from error
    if arrays.position != len(memory):
        raise ValueError(f"data must end with the last array, at {arrays.position}, got {len(memory)} bytes")
    return cast("Message", message)


_encode = msgspec.msgpack.Encoder().encode
_decode: Callable[..., Any] = msgspec.msgpack.Decoder(tuple[int, list[Any]]).decode


class _Arrays:
    """The arrays of a message that is being read, in their order."""

    __slots__ = ("_memory", "position")

    def __init__(self, memory: bytearray, position: int) -> None:
        self._memory = memory
        self.position = position  # written by: next

    def next(self, number: int, *shape: int) -> NDArray[Any]:
        """Return the next array."""
        if number < 0 or min(shape, default=0) < 0:
            raise ValueError(f"dtype and shape of an array must be >= 0, got {number} and {shape}")
        dtype, size = _DTYPES[number], math.prod(shape)
        found = np.frombuffer(self._memory, dtype, size, self.position) if size else np.empty(0, dtype)
        self.position += size * dtype.itemsize + (-size * dtype.itemsize % _ALIGNMENT)
        return found if len(shape) == 1 else found.reshape(shape)


def _write_array(value: NDArray[Any], arrays: list[bytes]) -> list[int]:
    dtype = value.dtype
    if dtype not in _NUMBERS:
        raise TypeError(f"arrays of a message must be of {', '.join(map(str, _DTYPES))}, got {dtype}")
    data = value.tobytes()
    arrays.append(data)
    if padding := len(data) % _ALIGNMENT:
        arrays.append(_PADDING[padding])
    return [_NUMBERS[dtype], *value.shape]


@dataclass(frozen=True, slots=True)
class _Field:
    """A field of a class, and how it becomes a plain value and is made of one; None stays None."""

    name: str
    write: Callable[[Any, list[bytes]], Any]
    read: Callable[[Any, _Arrays], Any]


@dataclass(frozen=True, slots=True)
class _Plan:
    """How the values of a class become plain and are made of plain ones."""

    made: type[Any]
    fields: tuple[_Field, ...]

    def write(self, value: Any, arrays: list[bytes]) -> list[Any]:
        """Return the values of the fields, and append their arrays."""
        found: list[Any] = []
        for field in self.fields:
            own = getattr(value, field.name)
            found.append(None if own is None else field.write(own, arrays))
        return found

    def read(self, values: Sequence[Any], arrays: _Arrays) -> Any:
        """Return an object that has these values."""
        given = {
            field.name: None if value is None else field.read(value, arrays)
            for field, value in zip(self.fields, values, strict=True)
        }
        return self.made(**given)


@cache
def _plan(made: type[Any]) -> _Plan:
    hints = typing.get_type_hints(made)
    return _Plan(made, tuple(_field(one.name, hints[one.name]) for one in fields(made)))


def _field(name: str, hint: Any) -> _Field:
    kinds = [one for one in get_args(hint) if one is not type(None)] if type(None) in get_args(hint) else [hint]
    (kind,) = kinds
    if get_origin(kind) is np.ndarray:
        return _Field(name, _write_array, lambda value, arrays: arrays.next(*value))
    if isinstance(kind, type) and is_dataclass(kind):
        plan = _plan(kind)
        return _Field(name, plan.write, plan.read)

    plain = cast("type[Any]", kind)

    def read(value: Any, arrays: _Arrays) -> Any:
        return msgspec.convert(value, plain)

    return _Field(name, lambda value, _: value, read)
