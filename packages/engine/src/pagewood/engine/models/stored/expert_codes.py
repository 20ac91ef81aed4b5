"""Reads matrices of 8-bit floating point numbers as they are stored."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from pagewood.engine.models.scaled_codes import LEAST_GROUP, ScaledCodes
from pagewood.engine.models.stored.row_orders import as_slice, rows_in
from pagewood.engine.weights.float8 import Float8

if TYPE_CHECKING:
    from pagewood.engine.models.stored.checkpoint import Found

EXPERTS = ".experts."
"""Part of the names of the matrices of chosen experts, and of no others."""


def read_codes(
    found: Sequence[Found], columns: int, read: Callable[[str], Tensor], *, device: torch.device | None
) -> ScaledCodes | None:
    """Return what is needed of matrices of `columns` inputs, one below the other; None: they must be widened.

    `read` returns the tensor of a name, and `device` is that of the result.

    Raises:
        ValueError: a scale is NaN.
    """
    forms = [one.format for one in found if isinstance(one.format, Float8)]
    wides = {form.inputs_of_scale(columns) for form in forms}
    if len(forms) < len(found) or len(wides) != 1:
        return None
    [wide], own = wides, found[0].inputs or range(columns)
    group = math.gcd(wide, own.start)  # a smaller one where a rank begins inside a group
    if wide >= own.stop:
        group = len(own)
    elif group % LEAST_GROUP:
        return None
    group_of = (own.start + np.arange(0, len(own), group)) // wide
    num_rows = sum(one.shape(columns)[0] for one in found)
    codes = torch.empty(num_rows, len(own), dtype=torch.float8_e4m3fn, device=device)
    scales = torch.empty(num_rows, len(group_of), dtype=torch.float32, device=device)
    start = 0
    for one, form in zip(found, forms, strict=True):
        stored = read(one.parts[form.scale])
        numbers = (stored.view(torch.uint8) if stored.dtype.itemsize == 1 else stored.float()).numpy()
        try:
            by_row = form.scales_by_row(numbers, one.rows, columns)
        except ValueError as error:
            raise ValueError(f"{one.name}: {error}") from error
        kept = by_row[slice(None) if one.order is None else as_slice(one.order)][:, group_of]
        scales[start : start + len(kept)] = torch.from_numpy(kept)
        for rows in rows_in(read(one.parts[form.codes]).view(torch.uint8)[:, own.start : own.stop], one.order):
            codes.view(torch.uint8)[start : start + len(rows)] = rows
            start += len(rows)
    return ScaledCodes(codes=codes, scales=scales, group=group)
