"""The sampling parameters of a batch as one table, the same for all devices.

A new parameter is declared in `SamplingParams`, and has a column here if it is read where tokens are drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from operator import attrgetter
from struct import Struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagewood.engine.api import SAMPLING_PARAMETERS, SamplingParams
from pagewood.engine.core.messages.arrays import Int32

Float32 = NDArray[np.float32]


class SamplingColumn(IntEnum):
    """A column of the table. Invariant: those after the seed are named like the fields of `SamplingParams` in them."""

    SEED = 0
    """First half of the seed, an int64. Seed and position of a drawn token are the only source of randomness of a
    request."""
    SEED_REST = 1
    """Second half of the seed."""
    TEMPERATURE = 2
    """float32; 0 is greedy."""
    TOP_K = 3
    """int32; `Parameter.off` says where this and the following, which are float32, are off."""
    TOP_P = 4
    MIN_P = 5
    TYPICAL_P = 6
    TOP_N_SIGMA = 7


NUM_SAMPLING_COLUMNS = len(SamplingColumn)
_COLUMNS = list(SamplingColumn)[SamplingColumn.SEED_REST + 1 :]
_NAMES = [column.name.lower() for column in _COLUMNS]
_KINDS = [int if isinstance(getattr(SamplingParams(), name), int) else float for name in _NAMES]
_ROW = Struct("=q" + "".join("i" if kind is int else "f" for kind in _KINDS))
_values_of = attrgetter(*_NAMES)


def _row(params: SamplingParams, seed: int) -> bytes:
    return _ROW.pack(seed, *(kind(value) for kind, value in zip(_KINDS, _values_of(params), strict=True)))


_EACH_OFF = replace(SamplingParams(), **{name: SAMPLING_PARAMETERS[name].off for name in _NAMES})
_OFF = np.frombuffer(_row(_EACH_OFF, 0), np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingArrays:
    """The sampling parameters of S requests. Invariant: a row is what `of` makes of the parameters of one request."""

    words: Int32  # contents written by: put, with_seeds
    """[S, NUM_SAMPLING_COLUMNS] int32; columns of float32 hold their bits."""

    @classmethod
    def of(cls, params: Sequence[SamplingParams], seeds: Sequence[int]) -> SamplingArrays:
        """Return the arrays of some requests.

        Args:
            params: of each request; their own seeds are not read.
            seeds: of each request, 64 signed bits.
        """
        rows = b"".join(_row(one, seed) for one, seed in zip(params, seeds, strict=True))
        return cls(words=np.frombuffer(bytearray(rows), np.int32).reshape(-1, NUM_SAMPLING_COLUMNS))

    def take(self, indices: NDArray[np.integer[Any]]) -> SamplingArrays:
        """Return copies of the entries at `indices` `[n]`, in that order."""
        return SamplingArrays(words=self.words[indices])

    def copy(self) -> SamplingArrays:
        """Return copies of all entries."""
        return SamplingArrays(words=self.words.copy())

    def put(self, indices: Sequence[int], params: Sequence[SamplingParams], seeds: Sequence[int]) -> None:
        """Overwrite the entries at `indices` by those of `of`, in place; for tables that are used for many batches."""
        if indices:
            self.words[list(indices)] = SamplingArrays.of(params, seeds).words

    def with_seeds(self, seeds: NDArray[np.int64]) -> SamplingArrays:
        """Return copies of all entries, with other seeds `[S] int64`."""
        changed = self.copy()
        changed.words[:, : SamplingColumn.TEMPERATURE] = np.ascontiguousarray(seeds).view(np.int32).reshape(-1, 2)
        return changed

    @property
    def seeds(self) -> NDArray[np.int64]:
        """[S] int64, a copy."""
        return np.ascontiguousarray(self.words[:, : SamplingColumn.TEMPERATURE]).view(np.int64)[:, 0]

    @property
    def temperatures(self) -> Float32:
        """[S] float32, 0 is greedy; the memory of the column."""
        return self.words[:, SamplingColumn.TEMPERATURE].view(np.float32)

    def flat(self) -> Int32:
        """Return the seeds, then the columns after them, one after the other: `[NUM_SAMPLING_COLUMNS * S]`."""
        first = SamplingColumn.TEMPERATURE
        return np.concatenate([self.words[:, :first].ravel(), self.words[:, first:].T.ravel()])

    def used(self) -> frozenset[SamplingColumn]:
        """Return the columns that are on in at least one row."""
        is_used = (self.words != _OFF).any(0)
        return frozenset(column for column in _COLUMNS if is_used[column])
