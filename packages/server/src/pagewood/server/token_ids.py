"""Token ids as the links carry them: little-endian int32 bytes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def ids_of(tokens: bytes) -> list[int]:
    """Return the ids that bytes hold."""
    return np.frombuffer(tokens, dtype="<i4").tolist() if tokens else []


def bytes_of(ids: Sequence[int]) -> bytes:
    """Return ids as bytes."""
    return np.array(ids, dtype="<i4").tobytes()
