"""Puts the rows of a matrix into another order, in whatever form its numbers are."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from pagewood.engine.models.stored.head_order import RowOrder
from pagewood.engine.models.stored.stacked_rows import StackedRows
from pagewood.engine.weights.matrix_forms import rows_of


def in_order(stacked: Tensor, order: RowOrder | None) -> Tensor:
    """Return a matrix, or a vector, whose row i is row `order[i]` of `stacked`, in new memory; None: `stacked` itself.

    Args:
        stacked: a tensor; or what stands for one, `StackedRows` or a `Weight`.
        order: the old place of each row.
    """
    if order is None:
        return stacked
    rows: Any = stacked
    if isinstance(rows, Tensor):
        return rows.index_select(0, torch.from_numpy(order).to(rows.device))
    if isinstance(rows, StackedRows):
        whole = torch.empty(rows.shape, dtype=rows.dtype)
        rows.write_to(whole, 0)
        return cast("Tensor", StackedRows([whole.index_select(0, torch.from_numpy(order))]))
    return cast("Tensor", rows_of(rows, order))
