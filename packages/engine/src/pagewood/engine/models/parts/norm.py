"""Norms of rows: over the root mean square, or around the mean over the standard deviation.

Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019; Ba et al., Layer Normalization, 2016.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pagewood.engine.models.ops import Norm
from pagewood.engine.models.parts.source import Source
from pagewood.engine.models.stored.head_order import RowOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class NormConfig:
    """The numbers of a norm.

    Raises:
        ValueError: the epsilon is out of its range.
    """

    epsilon: float
    offset: float = 0.0
    """Added to its weights: 1 if checkpoints store the weights minus one."""
    is_centred: bool = False
    """Whether the mean of a row is subtracted from it first."""
    has_weight: bool = True
    has_bias: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.epsilon <= 1:
            raise ValueError(f"norm_epsilon must be in (0, 1], got {self.epsilon}")
        if self.offset not in (0, 1):
            raise ValueError(f"norm_offset must be 0 or 1, got {self.offset}")
        if self.has_bias and not self.is_centred:
            raise ValueError("has_bias must be False in a norm without is_centred, got True")


def read_norm(config: NormConfig, source: Source[Any], name: str, size: int, *, order: RowOrder | None = None) -> Norm:
    """Take the norm `name` of `size` elements.

    An offset is added here if the weights are float32, or the norm is centred. Otherwise the device adds it, without
    rounding the sum.
    """
    weights, name = source.weights, f"{source.prefix}{name}"
    norm = Norm(
        weight=weights.stack([(f"{name}.weight", size)], order=order) if config.has_weight else None,
        bias=weights.stack([(f"{name}.bias", size)], order=order) if config.has_bias else None,
        epsilon=config.epsilon,
        offset=config.offset,
        is_centred=config.is_centred,
    )
    is_wide = norm.weight is not None and norm.weight.dtype.itemsize >= 4
    return norm.folded() if is_wide or norm.is_centred else norm
