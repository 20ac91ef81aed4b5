"""The sampling parameters of a batch, one array for each; a new parameter is declared here and in `SamplingParams`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagewood.engine.api import SamplingParams
from pagewood.engine.core.arrays import Int32

Float32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingArrays:
    """The sampling parameters of S requests. Invariant: every field is an array of S numbers."""

    temperatures: Float32
    """[S] float32, 0 is greedy."""
    top_ks: Int32
    """[S] int32, 0 switches the filter off."""
    top_ps: Float32
    """[S] float32, 1 switches the filter off."""
    min_ps: Float32
    """[S] float32, 0 switches the filter off."""
    typical_ps: Float32
    """[S] float32, 1 switches the filter off."""
    seeds: NDArray[np.int64]
    """[S] int64; with the position of the drawn token, the only source of randomness of a request."""

    @classmethod
    def of(cls, params: Sequence[SamplingParams], seeds: Sequence[int]) -> SamplingArrays:
        """Return the arrays of some requests.

        Args:
            params: of each request; their own seeds are not read.
            seeds: of each request, 64 signed bits.
        """
        return cls(
            temperatures=np.array([one.temperature for one in params], np.float32),
            top_ks=np.array([one.top_k for one in params], np.int32),
            top_ps=np.array([one.top_p for one in params], np.float32),
            min_ps=np.array([one.min_p for one in params], np.float32),
            typical_ps=np.array([one.typical_p for one in params], np.float32),
            seeds=np.array(seeds, np.int64),
        )

    def take(self, indices: NDArray[np.integer[Any]]) -> SamplingArrays:
        """Return copies of the entries at `indices` `[n]`, in that order."""
        return SamplingArrays(**{name: getattr(self, name)[indices] for name in _NAMES})

    def copy(self) -> SamplingArrays:
        """Return copies of all entries."""
        return SamplingArrays(**{name: getattr(self, name).copy() for name in _NAMES})

    def put(self, indices: Sequence[int], params: Sequence[SamplingParams], seeds: Sequence[int]) -> None:
        """Overwrite the entries at `indices` by those of `of`, in place; for tables that are used for many batches."""
        for index, one, seed in zip(indices, params, seeds, strict=True):
            self.temperatures[index] = one.temperature
            self.top_ks[index] = one.top_k
            self.top_ps[index] = one.top_p
            self.min_ps[index] = one.min_p
            self.typical_ps[index] = one.typical_p
            self.seeds[index] = seed

    def fields(self) -> dict[str, NDArray[Any]]:
        """Return the arrays by name, in the order of their declaration."""
        return {name: getattr(self, name) for name in _NAMES}


_NAMES = tuple(field.name for field in fields(SamplingArrays))
