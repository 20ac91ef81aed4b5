"""The arrays that cross the cache's border, and the checks they pass there."""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Int32: TypeAlias = npt.NDArray[np.int32]
"""A one-dimensional array of int32: token ids, or page ids."""

Key: TypeAlias = bytes | memoryview
"""int32 token ids as bytes: a copy, or a view of the caller's array that must not outlive the call."""

ITEM_BYTES = 4
"""Bytes of one token id, and of one page id."""

_INT32 = np.dtype(np.int32)


def require_int32(name: str, array: Int32) -> None:
    """Check what a type checker cannot.

    Raises:
        ValueError: `array` is not a one-dimensional numpy array of int32 in native byte order.
    """
    if not isinstance(array, np.ndarray):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may be untyped
        raise ValueError(f"{name} must be a numpy array, got {type(array).__name__}")
    if array.dtype != _INT32:
        raise ValueError(f"{name} must have dtype int32, got {array.dtype}")
    if array.ndim != 1:
        raise ValueError(f"{name} must have 1 dimension, got {array.ndim}")


def from_bytes(parts: list[bytes]) -> Int32:
    """Return `[total items] int32`, the parts one after the other, as a read-only array."""
    return np.frombuffer(b"".join(parts), _INT32)


def as_key(tokens: Int32, num_tokens: int) -> Key:
    """Return the bytes of the first `num_tokens` tokens, without a copy where numpy allows it."""
    if not num_tokens:
        return b""  # there is no view of nothing
    if not tokens.flags.c_contiguous:
        return tokens[:num_tokens].tobytes()
    return tokens.data.cast("B")[: num_tokens * ITEM_BYTES]


def num_common_items(left: bytes, right: Key, offset: int) -> int:
    """Return how many leading int32 items `left` shares with `right[offset:]`.

    One vectorised pass. The tree asks only where a memcmp has already failed, which is once in a descent.
    """
    count = min(len(left), len(right) - offset) // ITEM_BYTES
    differs = np.frombuffer(left, _INT32, count) != np.frombuffer(right, _INT32, count, offset)
    first = int(differs.argmax()) if count else 0
    return first if count and differs[first] else count
