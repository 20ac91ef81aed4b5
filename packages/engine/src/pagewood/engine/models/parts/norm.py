"""Root mean square norms."""

from __future__ import annotations

from dataclasses import dataclass

from pagewood.engine.models.head_order import RowOrder
from pagewood.engine.models.ops import Norm, Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class NormConfig:
    """The numbers of a norm.

    Raises:
        ValueError: the epsilon is out of its range.
    """

    epsilon: float
    offset: float = 0.0
    """Added to its weights: 1 if checkpoints store the weights minus one."""

    def __post_init__(self) -> None:
        if not 0 < self.epsilon <= 1:
            raise ValueError(f"norm_epsilon must be in (0, 1], got {self.epsilon}")
        if self.offset not in (0, 1):
            raise ValueError(f"norm_offset must be 0 or 1, got {self.offset}")


def read_norm(config: NormConfig, weights: Weights, name: str, size: int, *, order: RowOrder | None = None) -> Norm:
    """Take the norm `name` of `size` elements from `weights`.

    An offset is added here if the weights are float32. With narrower weights the device adds it, without rounding the
    sum.
    """
    weight = weights.stack([(f"{name}.weight", size)], order=order)
    norm = Norm(weight=weight, epsilon=config.epsilon, offset=config.offset)
    return norm.folded() if weight.dtype.itemsize >= 4 else norm
