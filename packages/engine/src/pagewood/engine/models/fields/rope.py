"""The fields of the rotation of positions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

from pagewood.engine.json_fields import Fields, check_same, contradiction
from pagewood.engine.models.fields.agreement import must_be
from pagewood.engine.models.parts.rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    RopeConfig,
    Scaling,
    YarnScaling,
)

MAX_POSITION = 1 << 28
"""The longest sequence that a configuration may ask for."""
LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
"""The kinds of layers that `layer_types` may name."""
_MAX_FACTOR = 4096.0
_GLOBAL_THETA, _LOCAL_THETA = 1e6, 1e4
"""Bases of the two ropes of a family if the fields with the bases are absent."""
_SECTIONS = ("rope_parameters", "rope_scaling")
_ALSO_OUTSIDE = frozenset({"rope_theta", "partial_rotary_factor", "original_max_position_embeddings"})
"""Fields of a section that may stand beside it."""
_KEYS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "default": frozenset(),
        "linear": frozenset({"factor"}),
        "dynamic": frozenset({"factor"}),
        "yarn": frozenset(
            {"factor", "beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim"}
        ),
        "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor"}),
    }
)
"""Fields by the kind of scaling that reads them, without those of `_ALSO_OUTSIDE`."""
_HARMLESS: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "factor": (1,), "finetuned": (True, False), "attn_factor": (1,), "extrapolation_factor": (1,),
        "attention_factor": (1,),
    }
)  # fmt: skip
"""Values that are allowed in a field that the kind of scaling does not read."""


def read_rope(fields: Fields, *, head_dim: int, max_position: int) -> RopeConfig:
    """Read `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (earlier versions).

    A file may have both styles only if they agree.

    Args:
        fields: of config.json.
        head_dim: elements of a head.
        max_position: `max_position_embeddings`.

    Raises:
        ValueError: the kind of scaling is not supported, a number is missing or out of its range, two fields have
            different values, or a field has no meaning for the kind of scaling.
    """
    own = _rope_section(fields)
    share = own.number("partial_rotary_factor", 1.0, low=0, high=1)
    if share != 1.0:
        raise ValueError(f"{fields.source}: partial_rotary_factor must be 1, got {share}")
    theta = own.number("rope_theta", 10000.0, low=2, high=1e12)
    kind = own.text("rope_type", "default")
    original = own.integer("original_max_position_embeddings", max_position, low=1, high=MAX_POSITION)
    rope = RopeConfig(head_dim=head_dim, theta=theta, scaling=_read_scaling(own, kind, max_position, original))
    if rope.longest(max_position) > MAX_POSITION:
        raise ValueError(
            f"{own.source}: factor times the original length must be at most {MAX_POSITION}, "
            f"got {rope.longest(max_position)}"
        )
    return rope


def attention_multiplier(fields: Fields) -> float:
    """Return what a family that reads `mscale_all_dim` multiplies the scale of its attention with.

    Raises:
        ValueError: see `read_rope`.
    """
    own = _rope_section(fields)
    if own.values.get("rope_type", "default") == "default":
        return 1.0
    return _suggested_factor(own.number("mscale_all_dim", 0.0, low=0, high=1e3), _factor(own)) ** 2


def local_ropes(fields: Fields) -> tuple[Fields, Fields]:
    """Return the fields for `read_rope` of layers that see all positions, and of those with a window.

    Their ropes are objects of `rope_parameters` (transformers 5), or `rope_theta` with `rope_scaling`, and
    `rope_local_base_freq` (earlier versions).
    """
    own = fields.section("rope_parameters") or fields.empty("rope_parameters")
    if own.values.keys() - LAYER_TYPES:
        raise ValueError(
            f"{own.source} must hold an object for each of the layer types {', '.join(sorted(LAYER_TYPES))}, "
            f"got {min(own.values.keys() - LAYER_TYPES)[:80]!r}"
        )

    def view(kind: str, outside: str, theta: float) -> dict[str, object]:
        section = own.section(kind)
        inside = None if section is None else section.values.get("rope_theta")
        base = fields.values.get(outside)
        return {
            **fields.values,
            "rope_parameters": None if section is None else section.values,
            "rope_theta": theta if base is None and inside is None else base,
        }

    full = view("full_attention", "rope_theta", _GLOBAL_THETA)
    local = view("sliding_attention", "rope_local_base_freq", _LOCAL_THETA)
    return Fields(fields.source, full), Fields(fields.source, {**local, "rope_scaling": None})


def _rope_section(fields: Fields) -> Fields:
    """Return the fields of the rope of a config.json in one object, with `rope_type` for `type`.

    Raises:
        ValueError: two places have different values.
    """
    found: list[Fields] = []
    for name in _SECTIONS:
        section = fields.section(name)
        if section is None:
            continue
        own = dict(_flat(section).values)
        kind, old_kind = own.pop("rope_type", None), own.pop("type", None)
        check_same(section.source, [("rope_type", kind), ("type", old_kind)])
        own["rope_type"] = old_kind if kind is None else kind
        for key in _ALSO_OUTSIDE:
            outside = fields.values.get(key)
            check_same(fields.source, [(key, outside), (f"{name}.{key}", own.get(key))])
            own[key] = own.get(key) if outside is None else outside
        found.append(Fields(section.source, {key: value for key, value in own.items() if value is not None}))
    if not found:
        return Fields(fields.source, {key: fields.values.get(key) for key in _ALSO_OUTSIDE})
    own, *others = found
    for other in others:
        for key in sorted(own.values.keys() | other.values.keys()):
            said = [(f"{name}.{key}", one.values.get(key)) for name, one in zip(_SECTIONS, found, strict=True)]
            if said[0][1] != said[1][1]:
                raise contradiction(fields.source, *said)
    _check_keys(own)
    return own


def _flat(section: Fields) -> Fields:
    """Return an object of the rope, or that of every layer type if it holds one for each of them.

    Raises:
        ValueError: the layer types have different ones, or other fields stand beside them.
    """
    kinds = [kind for kind, value in section.values.items() if isinstance(value, dict)]
    if not kinds:
        return section
    others = sorted((section.values.keys() - kinds) | (set(kinds) - LAYER_TYPES))
    if others:
        raise ValueError(
            f"{section.source} must hold the fields of one rope, or an object for each of the layer types "
            f"{', '.join(sorted(LAYER_TYPES))}, got {others[0][:80]!r} beside {kinds[0][:80]!r}"
        )
    check_same(section.source, [(kind, section.values[kind]) for kind in kinds])
    return section.section(kinds[0]) or section.empty(kinds[0])


def _check_keys(own: Fields) -> None:
    """Raise ValueError if the kind of scaling does not read a field whose value would change something."""
    kind = own.values.get("rope_type", "default")
    for key in sorted(own.values.keys() - _KEYS.get(str(kind), own.values.keys()) - _ALSO_OUTSIDE - {"rope_type"}):
        must_be(own, key, *_HARMLESS.get(key, ()))


def _read_scaling(own: Fields, kind: str, max_position: int, original_length: int) -> Scaling | None:
    match kind:
        case "default":
            return None
        case "linear":
            return LinearScaling(factor=_factor(own), original_length=original_length)
        case "dynamic":
            return DynamicScaling(factor=_factor(own), original_length=max_position)
        case "yarn":
            factor = _factor(own)
            beta_fast = own.number("beta_fast", 32.0, low=1e-3, high=1e6)
            beta_slow = own.number("beta_slow", 1.0, low=1e-3, high=1e6)
            if beta_slow > beta_fast:
                raise ValueError(f"{own.source}: beta_slow must be at most beta_fast {beta_fast}, got {beta_slow}")
            return YarnScaling(
                factor=factor,
                original_length=original_length,
                beta_fast=beta_fast,
                beta_slow=beta_slow,
                truncate=own.flag("truncate", True),
                attention_factor=own.number(
                    "attention_factor", _yarn_attention_factor(own, factor), low=1e-3, high=1e3
                ),
            )
        case "llama3":
            low = own.number("low_freq_factor", low=1e-3, high=1e6)
            high = own.number("high_freq_factor", low=1e-3, high=1e6)
            if low >= high:
                raise ValueError(f"{own.source}: low_freq_factor must be below high_freq_factor {high}, got {low}")
            return Llama3Scaling(
                factor=_factor(own),
                original_length=original_length,
                low_frequency_factor=low,
                high_frequency_factor=high,
            )
        case _:
            raise ValueError(f"{own.source}: rope_type must be default, linear, dynamic, yarn or llama3, got {kind!r}")


def _factor(own: Fields) -> float:
    return own.number("factor", low=1, high=_MAX_FACTOR)


def _yarn_attention_factor(own: Fields, factor: float) -> float:
    """Return the factor that the paper suggests, or the ratio of two such factors if the model names both."""
    scale, scale_all = (own.number(name, 0.0, low=0, high=1e3) for name in ("mscale", "mscale_all_dim"))
    if scale and scale_all:
        return _suggested_factor(scale, factor) / _suggested_factor(scale_all, factor)
    return _suggested_factor(1.0, factor)


def _suggested_factor(scale: float, factor: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * scale * math.log(factor) + 1.0
