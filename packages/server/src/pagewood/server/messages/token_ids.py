"""Token ids as the links carry them: little-endian int32 bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast

import msgspec
import numpy as np

_PART = 65_536
"""Ids that are written as JSON at a time, which takes some milliseconds."""


def ids_of(tokens: bytes) -> list[int]:
    """Return the ids that bytes hold."""
    return np.frombuffer(tokens, dtype="<i4").tolist() if tokens else []


def num_ids(tokens: bytes) -> int:
    """Return the number of ids that bytes hold."""
    return len(tokens) // 4


async def written_ids_of(tokens: bytes) -> list[int]:
    """Return the ids that bytes hold as JSON for an answer; other requests go on while it is written."""
    parts: list[bytes] = []
    for start in range(0, len(tokens), 4 * _PART):
        parts.append(msgspec.json.encode(ids_of(tokens[start : start + 4 * _PART]))[1:-1])
        await asyncio.sleep(0)
    return cast("list[int]", msgspec.Raw(b"[" + b",".join(parts) + b"]"))  # msgspec writes it as it is


def bytes_of(ids: Sequence[int]) -> bytes:
    """Return ids as bytes."""
    return np.array(ids, dtype="<i4").tobytes()
