"""Which rows of stored matrices are read, and in which order."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pagewood.engine.models.stored.head_order import RowOrder

_MOST_VIEWS = 4
"""Runs of rows of a matrix that stay where they are; more of them are copied."""


def orders_of_parts(order: RowOrder | None, sizes: Sequence[int]) -> list[RowOrder | None]:
    """Return the order of the rows of each of several matrices that stand one below the other.

    Args:
        order: the old place of each row of all; rows of one matrix stand together, in the order of the matrices. None:
            all rows, as they are.
        sizes: rows of each.
    """
    if order is None:
        return [None] * len(sizes)
    ends = np.cumsum(sizes)
    parts = np.searchsorted(ends, order, side="right")
    assert (np.diff(parts) >= 0).all(), "rows of a matrix must stand together"
    bounds = np.searchsorted(parts, np.arange(len(sizes) + 1))
    own = [order[bounds[i] : bounds[i + 1]] - (ends[i] - sizes[i]) for i in range(len(sizes))]
    return [None if np.array_equal(one, np.arange(size)) else one for one, size in zip(own, sizes, strict=True)]


def as_slice(order: RowOrder) -> slice | RowOrder:
    """Return a slice that stands for `order`, if there is one."""
    is_run = len(order) > 0 and bool((np.diff(order) == 1).all())
    return slice(int(order[0]), int(order[-1]) + 1) if is_run else order


def rows_in(tensor: Tensor, order: RowOrder | None) -> list[Tensor]:
    """Return tensors that are, one below the other, the rows of `tensor` in an order; None: `tensor` itself.

    Rows that follow each other are not copied, unless they are many short runs.
    """
    if order is None:
        return [tensor]
    breaks = np.flatnonzero(np.diff(order) != 1) + 1
    if len(breaks) >= _MOST_VIEWS:
        return [tensor.index_select(0, torch.from_numpy(order).to(tensor.device))]
    return [tensor[int(run[0]) : int(run[-1]) + 1] for run in np.split(order, breaks) if len(run)]
