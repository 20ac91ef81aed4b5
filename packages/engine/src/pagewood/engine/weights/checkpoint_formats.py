"""The interface of a quantised checkpoint's format: it names the tensors of a matrix, and makes a form from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from numpy.typing import NDArray

from pagewood.engine.weights.matrix_forms import Weight

FLOATS = ("F32", "BF16", "F16", "F64")
"""Dtypes of numbers without a scale, as headers of safetensors name them."""
HALVES = ("F32", "BF16", "F16")
WORDS = ("I32", "U32")
FLOAT8 = ("F8_E4M3",)

Array: TypeAlias = NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One of the tensors of a matrix."""

    suffix: str
    """Suffix of its name in place of `.weight`, as in `.qweight`."""
    shape: tuple[int, ...] | Sequence[tuple[int, ...]]
    """Required shape; several: any of them."""
    dtypes: tuple[str, ...]
    is_optional: bool = False

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
