"""The numbers of a rotation of positions."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """All angles are divided by `factor`."""

    factor: float
    original_length: int
    """Positions that the model was trained for before its context was stretched; the same below."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicScaling:
    """NTK scaling, whose base grows with the position from `original_length` on.

    A position is rotated as if it were the last one of its sequence, so its key does not depend on later positions, and
    a cached prefix stays valid. This is what `transformers` computes when it generates token by token with its cache. A
    prompt that `transformers` computes in one pass differs: it is rotated as a whole by the frequencies of its end.
    """

    factor: float
    original_length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """High frequencies are kept, low ones are divided by `factor`, with a ramp between them.

    Source: Peng et al., YaRN, 2023.
    """

    factor: float
    original_length: int
    beta_fast: float
    beta_slow: float
    truncate: bool
    attention_factor: float
    """Multiplies every cosine and sine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Like YaRN, with the ramp over wavelengths, the way Llama 3.1 does it."""

    factor: float
    original_length: int
    low_frequency_factor: float
    high_frequency_factor: float


Scaling = LinearScaling | DynamicScaling | YarnScaling | Llama3Scaling


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """The numbers that determine the rotation of a position."""

    head_dim: int
    theta: float
    scaling: Scaling | None = None

    def longest(self, max_position: int) -> int:
        """Return the number of usable positions.

        That is `max_position`, or the original length times the factor of a linear, dynamic or YaRN scaling if that is
        more: configurations name the stretched length, the original one, or both. Llama 3's name the stretched length.
        """
        match self.scaling:
            case LinearScaling() | DynamicScaling() | YarnScaling() as scaling:
                return max(max_position, int(scaling.original_length * scaling.factor))
            case _:
                return max_position
