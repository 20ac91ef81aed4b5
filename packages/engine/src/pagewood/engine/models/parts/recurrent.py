"""What the mixers of all recurrent layers have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

from pagewood.engine.models.ops import Weights
from pagewood.engine.models.shard import Shard
from pagewood.kvpool import PageArray

if TYPE_CHECKING:
    from torch import Tensor


class RecurrentConfig:
    """The answers of a mixer that needs no positions, has no window, and is not divided among ranks."""

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

    def for_shard(self, shard: Shard) -> Self:
        """Return itself, for a model of one rank.

        Raises:
            ValueError: there are several ranks.
        """
        if not shard.is_whole:
            raise ValueError(f"tensor_parallel_size must be 1 for models with recurrent layers, got {shard.count}")
        return self


def tail(channels: int, width: int) -> PageArray:
    """Return the state of a convolution: the last tokens that later ones read."""
    return PageArray(name="tail", dtype="float32", shape=(width - 1, channels))


def read_filters(weights: Weights, prefix: str, parts: Sequence[tuple[str, int]], width: int) -> Tensor:
    """Return the filters `[C, 1, W] float32` of convolutions `parts`, each with its number of channels, in their order.

    `prefix` of their names has the dot at its end.
    """
    import torch  # configurations are read without it

    return torch.cat([weights.exact(f"{prefix}{name}.weight", channels, 1, width) for name, channels in parts])


def check_width(width: int) -> None:
    """Check how many tokens a convolution reads.

    Raises:
        ValueError: they are too few or too many.
    """
    if not 2 <= width <= 16:
        raise ValueError(f"the width of convolutions must be in [2, 16], got {width}")
