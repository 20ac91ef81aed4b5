"""How a model rotates positions, and how that is read from its config.json."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pagewood.engine.models.fields import Fields


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """All angles divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicScaling:
    """NTK scaling whose base grows with the position, from `original_length` on.

    A position is rotated as if it were the last one of its sequence, so its key does not depend on what follows and a
    cached prefix stays valid. That is what `transformers` computes when it generates token by token with its cache;
    a prompt that it computes in one pass is rotated as a whole by the frequencies of the prompt's end.
    """

    factor: float
    original_length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """High frequencies kept, low ones divided by `factor`, a ramp between them.

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
    """As YaRN with a ramp over wavelengths, the way Llama 3.1 does it."""

    factor: float
    original_length: int
    low_frequency_factor: float
    high_frequency_factor: float


Scaling = LinearScaling | DynamicScaling | YarnScaling | Llama3Scaling


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """What decides the rotation of a position."""

    head_dim: int
    theta: float
    scaling: Scaling | None = None


def read_rope(fields: Fields, *, head_dim: int, max_position: int) -> RopeConfig:
    """Read `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before).

    Raises:
        ValueError: the kind of scaling is not known here, or one of its numbers is missing.
    """
    own = fields.section("rope_parameters") or fields.section("rope_scaling") or fields.empty("rope_scaling")
    share = own.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    if share != 1.0:
        raise ValueError(f"{fields.source}: partial_rotary_factor must be 1, got {share}")
    theta = own.number("rope_theta", fields.number("rope_theta", 10000.0))
    kind = own.text("rope_type", own.text("type", "default"))
    return RopeConfig(head_dim=head_dim, theta=theta, scaling=_read_scaling(own, kind, max_position))


def _read_scaling(own: Fields, kind: str, max_position: int) -> Scaling | None:
    original_length = own.integer("original_max_position_embeddings", max_position)
    match kind:
        case "default":
            return None
        case "linear":
            return LinearScaling(factor=own.number("factor"))
        case "dynamic":
            return DynamicScaling(factor=own.number("factor"), original_length=max_position)
        case "yarn":
            factor = own.number("factor")
            return YarnScaling(
                factor=factor,
                original_length=original_length,
                beta_fast=own.number("beta_fast", 32.0),
                beta_slow=own.number("beta_slow", 1.0),
                truncate=own.flag("truncate", True),
                attention_factor=own.number("attention_factor", _yarn_attention_factor(own, factor)),
            )
        case "llama3":
            return Llama3Scaling(
                factor=own.number("factor"),
                original_length=original_length,
                low_frequency_factor=own.number("low_freq_factor"),
                high_frequency_factor=own.number("high_freq_factor"),
            )
        case _:
            raise ValueError(f"{own.source}: rope_type must be default, linear, dynamic, yarn or llama3, got {kind!r}")


def _yarn_attention_factor(own: Fields, factor: float) -> float:
    """Return the factor that the paper suggests, or the ratio of two of them where the model names both."""

    def suggested(scale: float) -> float:
        return 1.0 if factor <= 1.0 else 0.1 * scale * math.log(factor) + 1.0

    scale, scale_all = own.number("mscale", 0.0), own.number("mscale_all_dim", 0.0)
    return suggested(scale) / suggested(scale_all) if scale and scale_all else suggested(1.0)
