"""Converts numbers to the codes that a page stores, and back."""

from typing import Any

import torch

from pagewood.kvpool.scatter import ScatteredRows

_LARGEST_CODE = 127


class CodedRows:
    """A view of an array whose rows are encoded when they are written and decoded when they are read.

    Invariant: with scales, each row of codes has one scale, at the same index.
    """

    __slots__ = ("_codes", "_dtype", "_scales")

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor | None) -> None:
        """Make a view of existing memory.

        Args:
            codes: `[pages, page_size, ..., dim]` of the dtype to store.
            scales: `[pages, page_size, ...] float32` if `codes` is int8, else None.
        """
        self._dtype = codes.dtype
        self._codes = ScatteredRows(codes)
        self._scales = None if scales is None else ScatteredRows(scales)

    def write(self, index: Any, values: torch.Tensor) -> None:
        """Write rows `[n, ..., dim]`, in any floating dtype, at an index from `locate_slots`."""
        if self._scales is None:
            self._codes.write(index, encode(values, self._dtype))
            return
        codes, scales = quantise(values)
        self._scales.write(index, scales)
        self._codes.write(index, codes)

    def read(self, index: Any) -> torch.Tensor:
        """Return copies of rows `[n, ..., dim]`, in float32 if they have scales, else in the stored dtype."""
        codes = self._codes.read(index)
        return codes if self._scales is None else dequantise(codes, self._scales.read(index))


def encode(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return `values` in a floating dtype; for fp8, values out of range become its largest number with their sign."""
    if dtype.itemsize == 1:
        largest = torch.finfo(dtype).max
        values = values.clamp(-largest, largest)
    return values.to(dtype)


def quantise(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int8 codes and one scale for each row; `code * scale` differs from the value by at most half a scale.

    Args:
        values: `[..., dim]`, any floating dtype. A row that contains a NaN or an infinity does not come back finite.

    Returns:
        `[..., dim] int8`, in [-127, 127], and `[...] float32`, the largest magnitude in the row divided by 127.
    """
    values = values.float()
    scales = values.abs().amax(-1) / _LARGEST_CODE
    divisors = torch.where(scales > 0, scales, 1.0)
    codes = (values / divisors[..., None]).round_()
    # For a row of denormal numbers the scale is too coarse: the largest code could exceed 127.
    return codes.clamp_(-_LARGEST_CODE, _LARGEST_CODE).to(torch.int8), scales


def dequantise(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return `[..., dim] float32` from codes `[..., dim] int8` and scales `[...] float32`."""
    return codes.float() * scales[..., None]
