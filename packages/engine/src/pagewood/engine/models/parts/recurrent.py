"""What the mixers of all recurrent layers have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from pagewood.engine.models.parts.linear import order_of_part
from pagewood.engine.models.parts.source import Source
from pagewood.engine.models.stored.head_order import RowOrder
from pagewood.kvpool import PageArray

if TYPE_CHECKING:
    from torch import Tensor


class RecurrentConfig:
    """The answers of a mixer that needs no positions and has no window."""

    __slots__ = ()

    @property
    def position_configs(self) -> tuple[()]:
        """Nothing: it needs to know no positions."""
        return ()

    @property
    def window(self) -> None:
        """None: it has no keys that could be behind a window."""
        return None

    def for_length(self, length: int) -> Self:
        """Return itself."""
        return self


def rows_of(*parts: tuple[int, range, int]) -> RowOrder:
    """Return the rows of some units of each part of a tensor.

    Args:
        parts: of the tensor, one below the other; of each the number of all units, which of them, and the rows of one.
    """
    found: list[RowOrder] = []
    start = 0
    for whole, units, size in parts:
        found.append(np.arange(start + units.start * size, start + units.stop * size))
        start += whole * size
    return np.concatenate(found)


def tail(channels: int, width: int) -> PageArray:
    """Return the state of a convolution: the last tokens that later ones read."""
    return PageArray(name="tail", dtype="float32", shape=(width - 1, channels))


def read_filters(
    source: Source[Any], parts: Sequence[tuple[str, int]], width: int, *, order: RowOrder | None = None
) -> Tensor:
    """Return the filters `[C, 1, W] float32` of convolutions `parts`, each with its number of channels, in their order.

    `order` names the channels of all that are here, part by part; None: all.
    """
    import torch  # configurations are read without it

    found: list[Tensor] = []
    start = 0
    for name, channels in parts:
        own = order_of_part(order, start, channels)
        found.append(source.weights.exact(f"{source.prefix}{name}.weight", channels, 1, width, order=own))
        start += channels
    return torch.cat(found)


def check_width(width: int) -> None:
    """Check how many tokens a convolution reads.

    Raises:
        ValueError: they are too few or too many.
    """
    if not 2 <= width <= 16:
        raise ValueError(f"the width of convolutions must be in [2, 16], got {width}")
