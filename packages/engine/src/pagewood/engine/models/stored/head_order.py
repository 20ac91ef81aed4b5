"""The order of rows that makes every rotated pair of a head elements i and i + D / 2.

Some checkpoints rotate neighbours, and some only the first elements of a head. A head's elements may stand in any order
as long as it is the same one in queries and keys, whose products are sums over them. So rows are put into the one order
that kernels know, when weights are read.

Legend: D head_dim, R elements of a head that are rotated.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

RowOrder: TypeAlias = NDArray[np.int64]
"""The old place of each row, in its new order."""


def head_order(head_dim: int, *, rotated: int, has_neighbours: bool) -> RowOrder | None:
    """Return the order `[D]` of the elements of a head; None: they stay where they are.

    Args:
        head_dim: D.
        rotated: R; the first R elements of a head in a checkpoint are rotated.
        has_neighbours: whether elements 2i and 2i + 1 are pairs rather than i and i + R / 2.
    """
    if rotated == head_dim and not has_neighbours:
        return None
    pairs = np.arange(rotated).reshape(-1, 2) if has_neighbours else np.arange(rotated).reshape(2, -1).T
    rest = np.arange(rotated, head_dim).reshape(2, -1)
    return np.concatenate([pairs[:, 0], rest[0], pairs[:, 1], rest[1]])


def in_heads(order: RowOrder, heads: range, *, size: int | None = None) -> RowOrder:
    """Return the order of the elements of some heads, each of which has `size` rows; None: as many as `order`."""
    return (np.asarray(heads)[:, None] * (size or len(order)) + order).reshape(-1)
