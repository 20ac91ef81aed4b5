"""Matrices of 8-bit floating point numbers as they are stored, for devices with kernels for them."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

LEAST_GROUP = 16
"""Kernels add up this many products at least before they multiply the sum by a scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledCodes:
    """A matrix of N outputs and K inputs, in E4M3 numbers: value = code * scale.

    Every row has scales of its own, also where rows of a checkpoint share them, so the rows of a rank may begin and end
    anywhere in a block. Plain torch takes it as a tensor.

    Invariant: a group is a multiple of `LEAST_GROUP`, or there is only one.
    """

    codes: Tensor
    """`[N, K] float8_e4m3fn`"""
    scales: Tensor
    """`[N, G] float32`, of G groups."""
    group: int
    """Inputs that share a scale; the last group may have fewer."""

    @property
    def shape(self) -> torch.Size:
        """(N, K), or as `view` was given."""
        return self.codes.shape

    def __len__(self) -> int:
        """Return the size of the first axis."""
        return len(self.codes)

    def view(self, *shape: int) -> ScaledCodes:
        """Return the same rows with other axes before that of inputs, as a tensor does."""
        return replace(self, codes=self.codes.view(shape), scales=self.scales.view(*shape[:-1], self.scales.shape[-1]))

    def index_select(self, axis: int, places: Tensor) -> Tensor:
        """Return as float32 what a tensor of the numbers returns, of three axes."""
        codes = self.codes.view(torch.uint8).index_select(axis, places).view(self.codes.dtype).float()
        return codes * self.scales.index_select(axis, places).repeat_interleave(self.group, 2)[..., : codes.shape[2]]
