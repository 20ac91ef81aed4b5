"""The output projection, with a factor and a soft cap of its logits.

Legend: T tokens, E hidden_size, V vocab_size.
Source: Gemma Team, Gemma 2, 2024 (soft cap).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

from pagewood.engine.models.ops import A, Linear, Ops


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputConfig:
    """The numbers of an output projection.

    Raises:
        ValueError: a number is out of its range.
    """

    multiplier: float = 1.0
    """Multiplies logits."""
    soft_cap: float | None = None
    """Logits x become c tanh(x / c), where c is this number, after the multiplication; None: they stay."""

    def __post_init__(self) -> None:
        if not 0 < self.multiplier <= 1e6:
            raise ValueError(f"the multiplier of logits must be in (0, 1e6], got {self.multiplier}")
        if self.soft_cap is not None and not 0 < self.soft_cap <= 1e6:
            raise ValueError(f"the soft cap of logits must be in (0, 1e6], got {self.soft_cap}")


class Output(Generic[A]):
    """An output projection whose logits are changed before anything else reads them."""

    __slots__ = ("_config", "_ops", "_projection")

    def __init__(self, config: OutputConfig, projection: Linear[A], ops: Ops[A]) -> None:
        self._config = config
        self._projection = projection
        self._ops = ops

    def __call__(self, x: A) -> A:
        """Return the logits `[T, V]` of `[T, E]`."""
        logits = self._projection(x)
        if self._config.multiplier != 1:
            logits = self._ops.scale(logits, self._config.multiplier)
        if self._config.soft_cap is not None:
            logits = self._ops.soft_cap(logits, self._config.soft_cap)
        return logits


def make_output(config: OutputConfig, projection: Linear[A], ops: Ops[A]) -> Linear[A]:
    """Return the projection itself if its logits stay as they are."""
    return projection if config == OutputConfig() else Output(config, projection, ops)
