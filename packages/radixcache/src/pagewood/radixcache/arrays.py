"""The array types of the public interface, and the checks on arrays that callers pass."""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Int32: TypeAlias = npt.NDArray[np.int32]
"""A one-dimensional int32 array of token ids or page ids."""

Key: TypeAlias = bytes | memoryview
"""int32 token ids as bytes: a copy, or a view of the caller's array that is valid only during the call."""

ITEM_BYTES = 4
"""Size of one token id or page id in bytes."""

_INT32 = np.dtype(np.int32)
_MAX_COPIED = 8192
"""Up to this many tokens, a copy costs less than what bytes save: they can be compared and cut without views."""

_BLOCK_BYTES = 32768
"""Bytes of a key that one memcmp compares to find where keys differ."""


def require_int32(name: str, array: Int32) -> None:
    """Check an array at run time, because callers may not use a type checker.

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
    """Concatenate the parts and return them as a read-only `[total items] int32` array."""
    return np.frombuffer(b"".join(parts), _INT32)


def as_key(tokens: Int32, num_tokens: int) -> Key:
    """Return the first `num_tokens` tokens as bytes, without a copy if they are many and the array is contiguous."""
    if num_tokens <= _MAX_COPIED or not tokens.flags.c_contiguous:
        return tokens.tobytes()[: num_tokens * ITEM_BYTES]
    return tokens.data.cast("B")[: num_tokens * ITEM_BYTES]


def num_common_items(left: bytes, right: Key, offset: int) -> int:
    """Return the number of leading int32 items that `left` and `right[offset:]` have in common.

    The tree calls it only if `right` does not continue with all of `left`, so at most once per descent. Blocks are
    compared with memcmp, and the first one that differs item by item.
    """
    num_bytes = min(len(left), len(right) - offset) // ITEM_BYTES * ITEM_BYTES
    for start in range(0, num_bytes, _BLOCK_BYTES):
        end = min(start + _BLOCK_BYTES, num_bytes)
        if not left.startswith(right[offset + start : offset + end], start):
            count = (end - start) // ITEM_BYTES
            differs = np.frombuffer(left, _INT32, count, start) != np.frombuffer(right, _INT32, count, offset + start)
            return start // ITEM_BYTES + int(differs.argmax())
    return num_bytes // ITEM_BYTES
