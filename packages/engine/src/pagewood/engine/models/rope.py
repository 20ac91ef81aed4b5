"""What depends on positions only: the angles of rotary embeddings, for each kind of scaling, and temperatures.

A model with two sets of factors (longrope) has tables in which the positions of short requests come first and those of
long ones behind them. The place of a position is the position in a short request, and `long_shift` more in a long one.
So whatever reads a table reads one row for a token, whichever set its request has.

Legend: T tokens, F head_dim / 2 frequencies.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from pagewood.engine.models.parts.rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    PositionConfig,
    PositionNumbers,
    ProportionalScaling,
    RopeConfig,
    TemperatureConfig,
    YarnScaling,
)


class Rope:
    """Rotations by position. Invariant: the rotation of a position depends on that position only."""

    __slots__ = ("_amplitude", "_config", "_sets")

    def __init__(self, config: RopeConfig, *, device: torch.device) -> None:
        self._config = config
        self._sets = [one.to(device) for one in _frequencies(config)]
        """Each `[n] float32`, radians per position, for every set of factors."""
        own = config.scaling
        self._amplitude = own.attention_factor if isinstance(own, YarnScaling | LongScaling) else 1.0

    @property
    def width(self) -> int:
        """F."""
        return self._config.head_dim // 2

    def __call__(self, positions: torch.Tensor, *, is_short: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the cosines and sines, each `[T, F] float32`, of `positions` (`[T]`, any integer type).

        If there are two sets of factors, `is_short` chooses the first.
        """
        points = positions.to(torch.float32)[:, None]
        angles = points * self._frequencies_at(points, is_short=is_short)
        cosines, sines = angles.cos(), angles.sin()
        if self._amplitude != 1.0:
            cosines *= self._amplitude
            sines *= self._amplitude
        rest = self.width - cosines.shape[1]
        if rest:  # pairs that are not rotated
            cosines = torch.cat([cosines, cosines.new_ones(len(cosines), rest)], -1)
            sines = torch.cat([sines, sines.new_zeros(len(sines), rest)], -1)
        return cosines, sines

    def _frequencies_at(self, points: torch.Tensor, *, is_short: bool) -> torch.Tensor:
        """Return the frequencies of rotated pairs at positions `[T, 1]`: a row of `[T, n]` each, or `[n]` for all."""
        scaling = self._config.scaling
        if not isinstance(scaling, DynamicScaling):
            return self._sets[0 if is_short else -1]
        dim, factor = self._config.size, scaling.factor
        stretch = factor * (points + 1) / scaling.original_length - (factor - 1)
        bases = self._config.theta * stretch.clamp(min=1.0) ** (dim / (dim - 2))
        return 1.0 / bases ** _exponents(dim).to(points.device)


class Temperature:
    """Factors of queries by position, in the place of cosines."""

    __slots__ = ("_config",)

    def __init__(self, config: TemperatureConfig) -> None:
        self._config = config

    @property
    def width(self) -> int:
        """Columns."""
        return 1

    def __call__(self, positions: torch.Tensor, *, is_short: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the factors `[T, 1] float32` of `positions` `[T]`, and as many zeros."""
        own = self._config
        steps = torch.div(positions + own.offset, own.length, rounding_mode="floor")
        factors = 1 + own.scale * torch.log1p(steps.to(torch.float32))
        return factors[:, None], torch.zeros_like(factors)[:, None]


class Numbers:
    """Positions as int32, in the place of cosines."""

    __slots__ = ("_last",)

    def __init__(self, config: PositionNumbers) -> None:
        self._last = config.length - 1

    @property
    def width(self) -> int:
        """Columns."""
        return 1

    def __call__(self, positions: torch.Tensor, *, is_short: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `positions` `[T]`, each at most the last one, as the bits of `[T, 1] float32`, and as many zeros."""
        bits = positions.clamp(max=self._last).to(torch.int32)[:, None].view(torch.float32)
        return bits, torch.zeros_like(bits)


PositionTable = Rope | Temperature | Numbers


def position_table(config: PositionConfig, *, device: torch.device) -> PositionTable:
    """Return what computes the values of positions."""
    match config:
        case RopeConfig():
            return Rope(config, device=device)
        case TemperatureConfig():
            return Temperature(config)
        case PositionNumbers():
            return Numbers(config)


def long_shift(short_length: int | None) -> int:
    """Return how far the place of a position in a long request is behind the position.

    That is one place more than a short request has tokens, because a step may compute one more and drop its result.
    """
    return 0 if short_length is None else short_length + 1


def values_by_place(
    tables: Iterable[PositionTable], num_places: int, *, short_length: int | None, device: torch.device | None = None
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the values of the first `num_places` places, from each of a model's tables."""
    num_short = min(num_places, long_shift(short_length))
    short, long = (torch.arange(num, device=device) for num in (num_short, num_places - num_short))
    if not num_short:
        return [table(long) for table in tables]
    parts = [(table(short, is_short=True), table(long)) for table in tables]
    return [(torch.cat([a, c]), torch.cat([b, d])) for (a, b), (c, d) in parts]


def _exponents(dim: int) -> torch.Tensor:
    return torch.arange(0, dim, 2, dtype=torch.float32) / dim


def _frequencies(config: RopeConfig) -> list[torch.Tensor]:
    """Return the frequencies `[n] float32` of rotated pairs at positions inside the original length, for every set."""
    plain = 1.0 / config.theta ** _exponents(config.size)
    match config.scaling:
        case None | DynamicScaling():
            return [plain]
        case LinearScaling(factor=factor):
            return [plain / factor]
        case ProportionalScaling() as proportional:
            return [plain[: proportional.num_pairs] / proportional.factor]
        case LongScaling(sets=sets):
            return [1.0 / (torch.tensor(factors) * config.theta ** _exponents(config.size)) for factors in sets]
        case YarnScaling() as yarn:
            kept = 1.0 - _yarn_ramp(config, yarn)
            return [plain / yarn.factor * (1.0 - kept) + plain * kept]
        case Llama3Scaling() as llama3:
            return [_llama3_frequencies(plain, llama3)]


def _yarn_ramp(config: RopeConfig, yarn: YarnScaling) -> torch.Tensor:
    """Return `[n]`: 0 where a frequency is kept, 1 where it is divided."""
    dim = config.size

    def dimension_of(num_rotations: float) -> float:
        return dim * math.log(yarn.original_length / (num_rotations * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = dimension_of(yarn.beta_fast), dimension_of(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else 0.001
    return ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)


def _llama3_frequencies(plain: torch.Tensor, llama3: Llama3Scaling) -> torch.Tensor:
    rotations = llama3.original_length * plain / (2 * math.pi)  # turns of each frequency over the original length
    low, high = llama3.low_frequency_factor, llama3.high_frequency_factor
    kept = ((rotations - low) / (high - low)).clamp(0, 1) if low < high else (rotations >= low).float()
    return plain / llama3.factor * (1 - kept) + plain * kept
