"""Some inputs of a matrix of weights, in the form of the matrix.

Legend: N outputs, K inputs, G groups of inputs of a row.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagewood.engine.weights.matrix_forms import (
    GROUPS,
    SHORT_GROUP,
    BFloat16,
    Float4,
    Float16,
    Float32,
    Int4,
    Int8,
    Int8Group,
    Weight,
)


def columns_of(weight: Weight, inputs: range) -> Weight:
    """Return some inputs of a matrix. Groups that they cut become smaller groups with the same scales.

    Raises:
        ValueError: they cut a group where no smaller one ends that the form may have.
    """
    own = slice(inputs.start, inputs.stop)
    match weight:
        case Float32(values):
            return Float32(values[:, own])
        case Float16(values):
            return Float16(values[:, own])
        case BFloat16(bits):
            return BFloat16(bits[:, own])
        case Int8(codes, scales):
            return Int8(codes[:, own], scales)
        case Float4(codes, scales, factors):
            group = weight.group
            if inputs.start % group or inputs.stop % group:
                return columns_of(weight.as_int8(), inputs)
            groups = slice(inputs.start // group, inputs.stop // group)
            return Float4(codes[:, inputs.start // 2 : inputs.stop // 2], scales[:, groups], factors)
        case Int4() | Int8Group():
            allowed = (SHORT_GROUP, *GROUPS) if isinstance(weight, Int8Group) and weight.zeros is None else GROUPS
            fits = [one for one in allowed if weight.group % one == 0 == inputs.start % one == inputs.stop % one]
            if not fits:
                raise ValueError(
                    f"a rank's part must begin and end at a multiple of {allowed[0]} inputs, because these share a "
                    f"scale, got {inputs.start} to {inputs.stop}"
                )
            return _in_groups(weight, max(fits), inputs)


def with_heads(weight: Weight, order: NDArray[np.int64]) -> Weight:
    """Return a matrix in whose inputs heads of one size stand in another order: the old place of each.

    Raises:
        ValueError: a group has inputs of several heads.
    """
    size, group = weight.shape[1] // len(order), getattr(weight, "group", 1)
    if size % group:
        raise ValueError(f"groups of {group} inputs must divide heads of {size}")
    arrays: dict[str, Any] = {one.name: getattr(weight, one.name) for one in fields(weight)}
    changed = {name: in_order(one, order) for name, one in arrays.items() if getattr(one, "ndim", 0) == 2}
    return replace(weight, **changed)


def in_order(array: NDArray[Any], order: NDArray[np.int64]) -> NDArray[Any]:
    """Return a matrix in whose columns equal parts stand in another order: the old place of each."""
    parts = array.reshape(len(array), len(order), -1)[:, order]
    return np.ascontiguousarray(parts).reshape(array.shape)


def _in_groups(weight: Int4 | Int8Group, group: int, inputs: range) -> Weight:
    """Return some inputs of a matrix in groups of `group`, which divides its own groups."""
    groups = slice(inputs.start // group, inputs.stop // group)

    def cut(values: NDArray[Any] | None) -> Any:
        return None if values is None else values.repeat(weight.group // group, axis=1)[:, groups]

    per_byte = 2 if isinstance(weight, Int4) else 1
    codes: Any = weight.codes[:, inputs.start // per_byte : inputs.stop // per_byte]
    return type(weight)(codes, cut(weight.scales), cut(weight.zeros), group, cut(weight.offsets))
