"""The numbers of a rotation of positions."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """All angles are divided by `factor`."""

    factor: float
    original_length: int
    """Positions that the model was trained for before its context was stretched; the same below."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProportionalScaling:
    """Only the first pairs are rotated, by the frequencies that they have in a head that is rotated as a whole."""

    num_pairs: int
    """Pairs that are rotated: element i and i + head_dim / 2, for i below it."""
    factor: float = 1.0
    """Divides all angles."""


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
    """Like YaRN, with the ramp over wavelengths, the way Llama 3.1 does it; a step if both factors are equal."""

    factor: float
    original_length: int
    low_frequency_factor: float
    high_frequency_factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LongScaling:
    """Every frequency is divided by a factor of its own.

    Keys of two sets of factors cannot be mixed. So a request has one set, chosen by the longest that it can become.

    Source: Ding et al., LongRoPE, 2024.
    """

    sets: tuple[tuple[float, ...], ...]
    """The factors of all requests; or those of requests of at most the original length, and those of longer ones."""
    original_length: int
    attention_factor: float
    """Multiplies every cosine and sine."""


Scaling = LinearScaling | ProportionalScaling | DynamicScaling | YarnScaling | Llama3Scaling | LongScaling


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """The numbers that determine the rotation of a position.

    Element i of a head is rotated with element i + head_dim / 2. Where only a part of a head is rotated, these are the
    first pairs, and the frequencies of all others are zero.

    Raises:
        ValueError: a part of a head cannot be rotated.
    """

    head_dim: int
    theta: float
    scaling: Scaling | None = None
    rotated: int | None = None
    """Elements of a head that are rotated; None: all."""

    def __post_init__(self) -> None:
        if self.rotated is not None and not (2 <= self.rotated <= self.head_dim and self.rotated % 2 == 0):
            raise ValueError(f"rotated must be an even number in [2, {self.head_dim}], got {self.rotated}")

    @property
    def size(self) -> int:
        """Elements of a head that are rotated."""
        return self.head_dim if self.rotated is None else self.rotated

    @property
    def short_length(self) -> int | None:
        """The longest request that has the first of two sets of factors; None: there is one set."""
        own = self.scaling
        return own.original_length if isinstance(own, LongScaling) and len(own.sets) > 1 else None

    def for_length(self, length: int) -> RopeConfig:
        """Return the rope of a model whose requests have at most `length` tokens."""
        own = self.scaling
        if not isinstance(own, LongScaling) or length > own.original_length:
            return self
        return replace(self, scaling=replace(own, sets=own.sets[:1]))

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


@dataclass(frozen=True, slots=True, kw_only=True)
class TemperatureConfig:
    """A factor of queries that grows with their position: 1 + scale * ln(1 + floor((position + offset) / length)).

    Source: Nakanishi, Scalable-Softmax Is Superior for Attention, 2025.
    """

    scale: float
    length: int
    offset: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionNumbers:
    """The positions themselves, for embeddings of positions."""

    length: int
    """Positions that have an embedding. A step may compute one more and drop its result; it gets the last one's."""


PositionConfig = RopeConfig | TemperatureConfig | PositionNumbers
"""What depends on the position of a token only."""
