"""Matrices one below the other that are read a few rows at a time, so that they need not be copied together first.

Legend: N outputs of all parts, K inputs.
"""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from pagewood.engine.models.stored.mapped_memory import give_back


class StackedRows:
    """A matrix `[N, K]` whose parts stay where they are, such as in a mapped file. Invariant: nothing is written."""

    __slots__ = ("_columns", "_parts", "dtype", "shape")

    def __init__(self, parts: Sequence[Tensor], *, columns: range | None = None) -> None:
        """Stack `columns` (None: all) of `parts`, each `[n, >= K]`; `dtype` holds the numbers of all exactly."""
        self._parts = tuple(parts)
        self._columns = columns
        self.shape = (sum(len(part) for part in parts), parts[0].shape[1] if columns is None else len(columns))
        self.dtype: torch.dtype = functools.reduce(torch.promote_types, (part.dtype for part in parts))

    def write_to(self, out: Tensor, first: int) -> None:
        """Write rows [first, first + n) to `out` `[n, K]`, converted to its dtype."""
        start = 0
        for rows in self._between(first, first + len(out)):
            own = rows if self._columns is None else rows[:, self._columns.start : self._columns.stop]
            out[start : start + len(rows)] = own
            start += len(rows)

    def largest(self, first: int, last: int) -> Tensor | None:
        """Return the largest magnitudes `[last - first] float32` of whole rows; None: it has all of their columns."""
        if self._columns is None:
            return None
        return torch.cat([rows.float().abs().amax(dim=1) for rows in self._between(first, last)])

    def forget(self, first: int, last: int) -> None:
        """Give the memory of rows [first, last) back to the system where a file holds it; see `give_back`."""
        for rows in self._between(first, last):
            give_back(rows)

    def _between(self, first: int, last: int) -> list[Tensor]:
        """Return the part of the rows [first, last) in each matrix that has any of them."""
        found: list[Tensor] = []
        start = 0
        for part in self._parts:
            inside = part[max(first - start, 0) : max(last - start, 0)]
            if len(inside):
                found.append(inside)
            start += len(part)
        return found
