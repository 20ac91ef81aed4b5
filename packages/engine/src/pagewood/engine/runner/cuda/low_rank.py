"""What adapters add to products on a device: rows by their matrices, times A (shrink), times B (expand).

Legend: T rows of a product, K inputs, N outputs, C modules of a projection, S adapter slots, E experts of a layer (1
beside experts), G matrices, S times E, R columns of A of a module (the largest rank, rounded up).
"""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupedRows:
    """Rows by the matrices that change them."""

    groups: Tensor
    """`[T] int32`, the matrices of each row, slot by slot and within a slot by expert; G: the model alone computes
    it."""
    order: Tensor
    """`[T] int32`, the rows by group."""
    tiles: Tensor | None = None
    """`[tiles, 3] int32`, group, first place in `order` and end of the group's places, for kernels that need them; a
    tile that there is not begins at an end."""
    tile_rows: int = 0
    """Rows of a tile."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Site:
    """What the slots have for one projection, or for the same one of all experts of a layer."""

    a: Tensor
    """`[G, C R, K]`; of an embedding `[G, K, C R]`."""
    b: Tensor
    """`[G, N, R]`, scaled."""
    factors: Tensor
    """`[G, N] float32`, of what the model computes."""
    bias: Tensor
    """`[G, N] float32`"""
    sizes: Sequence[int]
    """Outputs of each module."""
    num_experts: int = 1
    """E."""
    takes_tokens: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(one.nbytes for one in (self.a, self.b, self.factors, self.bias))


class LowRankKernels(Protocol):
    """Compute what adapters add. Invariant: a row's bits depend neither on other rows nor on its place."""

    def arrange(self, groups: Tensor, num_groups: int) -> GroupedRows:
        """Return rows by their groups `[T] int32`."""
        ...

    def shrink(self, x: Tensor, site: Site, rows: GroupedRows) -> Tensor:
        """Return `[T, C R] float32`, the inputs of rows times A of their groups, in `rows.order`.

        `x` is `[T, K]`, or `[T / n, K]`, of which n rows that follow each other have the same.
        """
        ...

    def expand(self, shrunk: Tensor, out: Tensor, site: Site, rows: GroupedRows) -> None:
        """Change the rows of `out` `[T, N]` that have a group; `shrunk` is the result of `shrink`."""
        ...


def adapt(kernels: LowRankKernels, x: Tensor, out: Tensor, site: Site, rows: GroupedRows) -> None:
    """Add to `out` `[T, N]`, the results for `x`, see `LowRankKernels.shrink`, or for tokens `[T]`."""
    shrunk = _picked(x, site, rows) if site.takes_tokens else kernels.shrink(x, site, rows)
    kernels.expand(shrunk, out, site, rows)


def _picked(tokens: Tensor, site: Site, rows: GroupedRows) -> Tensor:
    """Return what `shrink` does for an embedding: the rows of A of the tokens' slots, in `rows.order`."""
    num_slots, num_tokens, columns = site.a.shape
    slots = rows.groups.clamp(max=num_slots - 1).long()
    places = (slots * num_tokens + tokens).index_select(0, rows.order)
    return site.a.view(-1, columns).index_select(0, places).float()


class TorchLowRank:
    """`LowRankKernels` in plain torch, group by group: for devices without Triton, and as the reference.

    Args:
        multiply: computes products in float32, see `ops.Multiply`; rows have the bits that they have there.
    """

    __slots__ = ("_multiply",)

    def __init__(self, multiply: Callable[[Tensor, Tensor, Tensor | None], Tensor] = functional.linear) -> None:
        self._multiply = multiply

    def arrange(self, groups: Tensor, num_groups: int) -> GroupedRows:
        """Sort rows."""
        return GroupedRows(groups=groups, order=groups.argsort(stable=True).int())

    def shrink(self, x: Tensor, site: Site, rows: GroupedRows) -> Tensor:
        """Multiply all rows by A of every group."""
        own = x.index_select(0, rows.order // (len(rows.order) // len(x))).float()
        groups = rows.groups.index_select(0, rows.order)
        shrunk = own.new_zeros(len(own), site.a.shape[1])
        for group, a in enumerate(site.a.float()):
            shrunk = torch.where((groups == group)[:, None], self._multiply(own, a, None), shrunk)
        return shrunk

    def expand(self, shrunk: Tensor, out: Tensor, site: Site, rows: GroupedRows) -> None:
        """Multiply all rows by B of every group."""
        order, by_row = rows.order.long(), torch.empty_like(shrunk)
        by_row.index_copy_(0, order, shrunk)
        before, changed = out.float(), out.float()
        parts = by_row.split(site.b.shape[2], dim=1)
        for group, b in enumerate(site.b.float()):
            matrices = b.split(list(site.sizes))
            products = [self._multiply(own, matrix, None) for own, matrix in zip(parts, matrices, strict=True)]
            own = before * site.factors[group] + torch.cat(products, 1) + site.bias[group]
            changed = torch.where((rows.groups == group)[:, None], own, changed)
        out.copy_(changed)
