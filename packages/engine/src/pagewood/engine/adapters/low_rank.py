"""What an adapter changes, under the names of a model's modules.

Legend: r rank, K inputs, N outputs of a module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Change:
    """The change of one module: its result y for the input x becomes `factors` y + `b` (`a` x) + `bias`.

    Invariant: `a` and `b` are there or absent together, and the scale of the adapter is part of `b`.
    """

    a: Float32 | None = None
    """`[r, K]`. Modules that are stored as one have the same array."""
    b: Float32 | None = None
    """`[N, r]`"""
    factors: Float32 | None = None
    """`[N]`; None: ones."""
    bias: Float32 | None = None
    """`[N]`; None: zeros."""

    @property
    def arrays(self) -> tuple[Float32 | None, ...]:
        """The arrays in their order."""
        return self.a, self.b, self.factors, self.bias


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AdapterWeights:
    """An adapter for one model."""

    changes: Mapping[str, Change]
    """By the name of the module, as in "model.layers.0.self_attn.q_proj"."""
    invocation: tuple[int, ...] = ()
    """Tokens from whose last occurrence in a prompt on it computes (aLoRA); empty: it computes all positions."""
    is_bound: bool = False
    """Whether numbers of the model went into the changes, so that they are right for these weights only."""

    def version(self) -> str:
        """Return a digest of all that it changes; two adapters with the same one give the same results."""
        digest = blake2b(repr(self.invocation).encode() if self.invocation else b"", digest_size=16)
        for name, change in sorted(self.changes.items()):
            digest.update(f"{name}\0".encode())
            for array in change.arrays:
                digest.update(b"-" if array is None else f"{array.shape}".encode())
                if array is not None:
                    digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()


def low_rank_of(matrix: Float32, max_rank: int) -> tuple[Float32, Float32] | None:
    """Return `a` `[r, K]` and `b` `[N, r]` whose product is `matrix` `[N, K]`, exactly; None: r would be too large.

    Only rows or columns that are zero lower the rank, as when a trainer has changed the rows of some tokens.
    """
    rows, columns = (np.flatnonzero(matrix.any(axis=axis)) for axis in (1, 0))
    if min(len(rows), len(columns)) > max_rank:
        return None
    if len(rows) <= len(columns):
        b = np.zeros((len(matrix), max(1, len(rows))), np.float32)
        b[rows, np.arange(len(rows))] = 1
        a = matrix[rows] if len(rows) else np.zeros((1, matrix.shape[1]), np.float32)
        return np.ascontiguousarray(a), b
    a = np.zeros((len(columns), matrix.shape[1]), np.float32)
    a[np.arange(len(columns)), columns] = 1
    return a, np.ascontiguousarray(matrix[:, columns])
