"""What ranks compute a part of the columns of, each.

Legend: T tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic

from pagewood.engine.models.ops import A, Ops


class Gathered(Generic[A]):
    """An embedding or a projection whose result is put together from the parts of all ranks."""

    __slots__ = ("_ops", "_part", "_size")

    def __init__(self, part: Callable[[A], A], ops: Ops[A], size: int) -> None:
        """Take the function that computes this rank's part of `size` columns."""
        self._part = part
        self._ops = ops
        self._size = size

    def __call__(self, x: A) -> A:
        """Return `[T, size]`."""
        return self._ops.gather_ranks(self._part(x), self._size)
