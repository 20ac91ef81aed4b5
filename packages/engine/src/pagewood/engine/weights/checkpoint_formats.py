"""The interface of a quantised checkpoint's format: it names the tensors of a matrix, and makes a form from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pagewood.engine.weights.matrix_forms import Weight

FLOATS = ("F32", "BF16", "F16", "F64")
"""Dtypes of numbers without a scale, as headers of safetensors name them."""
HALVES = ("F32", "BF16", "F16")
WORDS = ("I32", "U32")
FLOAT8 = ("F8_E4M3",)

Array: TypeAlias = NDArray[Any]


Axis: TypeAlias = tuple[Literal["outputs", "inputs"], int]
"""What an axis of a tensor counts, and how many of them an element stands for; 0: all, so that the axis is not cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One of the tensors of a matrix."""

    suffix: str
    """Suffix of its name in place of `.weight`, as in `.qweight`."""
    shape: tuple[int, ...] | Sequence[tuple[int, ...]]
    """Required shape; several: any of them."""
    dtypes: tuple[str, ...]
    is_optional: bool = False
    axes: Sequence[Axis] | None = None
    """Meaning of the first axes; others belong to each element. None: the tensor cannot be cut."""
    is_shape: bool = False
    """Whether it holds the numbers of outputs and inputs."""
    group: int | None = None
    """Inputs of a group, if it holds the number of the group of each input; None: it holds something else."""

    @property
    def shapes(self) -> Sequence[tuple[int, ...]]:
        """All shapes that are allowed."""
        alone = all(isinstance(size, int) for size in self.shape)
        return [self.shape] if alone else self.shape  # pyright: ignore[reportReturnType]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A matrix in the form in which it is kept."""

    weight: Weight
    why: str = ""
    """Why it is not in the smaller form that its numbers suggest; empty: the form holds these numbers exactly."""


class Format(Protocol):
    """A way to store a quantised matrix."""

    @property
    def name(self) -> str:
        """Name for messages, as in "gptq with 4 bits"."""
        ...

    def parts(self, rows: int, columns: int) -> Sequence[Part]:
        """Return the tensors of a matrix `[rows, columns]`.

        Raises:
            ValueError: no matrix of this shape can be stored in this way.
        """
        ...

    def read(self, found: Mapping[str, Array], rows: int, columns: int) -> Kept:
        """Return the matrix `[rows, columns]`.

        Args:
            found: the tensors that `parts` names, by suffix, in the shapes given there. Floating point numbers are
                float32, except those of 8 bits, which are bytes (uint8); whole numbers are as they are stored.
            rows: outputs.
            columns: inputs.

        Raises:
            ValueError: a tensor holds a forbidden value.
        """
        ...


def outputs(unit: int) -> Axis:
    """Return an axis whose elements stand for `unit` outputs each; 0: for all."""
    return "outputs", unit


def inputs(unit: int) -> Axis:
    """Return an axis whose elements stand for `unit` inputs each; 0: for all."""
    return "inputs", unit


def cut(
    parts: Sequence[Part],
    found: Mapping[str, Array],
    shape: tuple[int, int],
    rows: range,
    columns: range,
) -> Mapping[str, Array] | None:
    """Return the tensors of a part of a matrix; None: they cannot be cut so.

    Args:
        parts: of the whole matrix.
        found: the tensors by suffix.
        shape: of the whole matrix.
        rows: of the part.
        columns: of the part.
    """
    ranges = {"outputs": (rows, shape[0]), "inputs": (columns, shape[1])}
    kept: dict[str, Array] = {}
    for part in parts:
        array = found.get(part.suffix)
        if array is None:
            continue
        if part.axes is None:
            return None
        if part.group is not None and len(columns) < shape[1]:
            if (array != np.arange(shape[1]) // part.group).any() and (array != -1).any():
                return None
            continue  # groups are in order, which a part without this tensor has too
        if part.is_shape and tuple(array) == shape:  # otherwise reading it is an error
            array = np.array((len(rows), len(columns)), array.dtype)
        for axis, (what, unit) in enumerate(part.axes[: array.ndim]):
            own, size = ranges[what]
            if not unit or len(own) == size:
                continue
            if own.start % unit or (own.stop % unit and own.stop != size):
                return None
            length = array.shape[axis] // -(-size // unit)  # of a unit: more than 1 where elements are bytes
            first, last = own.start // unit * length, -(-own.stop // unit) * length
            array = np.ascontiguousarray(array[(slice(None),) * axis + (slice(first, last),)])
        kept[part.suffix] = array
    return kept


def part_names(parts: Sequence[Part]) -> str:
    """Return the suffixes of all tensors that must be there, for messages."""
    return ", ".join(part.suffix for part in parts if not part.is_optional)


def divided(columns: int, group: int, what: str) -> int:
    """Return the number of groups of `group` (-1: all) inputs.

    Raises:
        ValueError: they do not divide `columns`.
    """
    if group == -1:
        return 1
    if columns % group:
        raise ValueError(f"{what} must divide the {columns} inputs, got {group}")
    return columns // group
