"""The fields of the rotation of positions."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from types import MappingProxyType

from pagewood.engine.json_fields import Fields, check_same, contradiction
from pagewood.engine.models.families.family import Family
from pagewood.engine.models.fields.agreement import must_be
from pagewood.engine.models.limits import MAX_POSITION
from pagewood.engine.models.parts.rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    ProportionalScaling,
    RopeConfig,
    Scaling,
    TemperatureConfig,
    YarnScaling,
)

LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
"""The kinds of layers that `layer_types` may name."""
_MAX_FACTOR = 4096.0
_TEMPERATURE = frozenset({"llama_4_scaling_beta"})
"""Fields of the rope that a family with a temperature reads."""
_STATIC = frozenset({"alpha", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"})
"""Fields that a family with a static `alpha` has, and of which it reads that one only."""
_WITHOUT_EFFECT = frozenset({"mrope_section", "mrope_interleaved"})
"""Fields of ropes whose positions have three axes: those of text are equal on all."""
_SECTIONS = ("rope_parameters", "rope_scaling")
_KINDS: Mapping[str, str] = MappingProxyType({"mrope": "default", "su": "longrope"})
"""Other names of kinds of scaling."""
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
        "proportional": frozenset({"factor"}),
        "longrope": frozenset({"factor", "attention_factor", "short_factor", "long_factor"}),
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


def read_rope(fields: Fields, family: Family, *, head_dim: int) -> RopeConfig:
    """Read `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (earlier versions).

    A file may have both styles only if they agree.

    Args:
        fields: of config.json.
        family: the fixed properties of the architecture.
        head_dim: elements of a head.

    Raises:
        ValueError: the kind of scaling is not supported, a number is missing or out of its range, two fields have
            different values, or a field has no meaning for the kind of scaling.
    """
    max_position = fields.integer("max_position_embeddings", low=1, high=MAX_POSITION)
    own = _rope_section(fields, known=_known(family))
    kind = own.text("rope_type", "default")
    rotated = head_dim if kind == "proportional" else _rotated(fields, own, family, head_dim)
    theta = own.number("rope_theta", family.theta, low=2, high=1e12)
    alpha = own.number("alpha", 0.0, low=0, high=1e6) if family.has_static_alpha else 0.0
    if kind == "dynamic" and alpha:
        theta, kind = theta * alpha ** (rotated / (rotated - 2)), "default"
    original = own.integer("original_max_position_embeddings", max_position, low=1, high=MAX_POSITION)
    rope = RopeConfig(
        head_dim=head_dim,
        theta=theta,
        scaling=_read_scaling(own, kind, max_position, original, rotated=rotated),
        rotated=None if rotated == head_dim else rotated,
    )
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


def read_temperature(fields: Fields, family: Family, *, is_rotated: bool) -> TemperatureConfig | None:
    """Return the temperature of a layer that rotates queries and keys, or not; None: it has none.

    Raises:
        ValueError: see `read_rope`.
    """
    if family.temperature == "none":
        return None
    if family.temperature == "unrotated":
        if is_rotated or not _is_tuned(fields):
            return None
        length = fields.integer("floor_scale", 8192, low=1, high=MAX_POSITION)
        return TemperatureConfig(scale=fields.number("attn_scale", 0.1, low=0, high=1e3), length=length, offset=1)
    own = _rope_section(fields, known=_TEMPERATURE)
    scale = own.number("llama_4_scaling_beta", 0.0, low=0, high=1e3)
    if not scale:
        return None
    length = own.integer("original_max_position_embeddings", low=1, high=MAX_POSITION)
    return TemperatureConfig(scale=scale, length=length)


def _is_tuned(fields: Fields) -> bool:
    """Return whether `attn_temperature_tuning` is true; the first files of Llama 4 have a number instead."""
    name = "attn_temperature_tuning"
    if isinstance(fields.values.get(name), bool | None):
        return fields.flag(name, True)
    return fields.integer(name, high=MAX_POSITION) > 0


def _known(family: Family) -> frozenset[str]:
    """Return the fields of a rope that a family has, whatever the kind of scaling is."""
    known: frozenset[str] = _TEMPERATURE if family.temperature == "all" else frozenset()
    return known | _STATIC if family.has_static_alpha else known


def _rotated(fields: Fields, own: Fields, family: Family, head_dim: int) -> int:
    """Return how many elements of a head are rotated."""
    usual = 1.0 if family.rotary_share is None else family.rotary_share
    if family.rotary_share is not None and fields.values.get("rotary_dim") is not None:
        usual = fields.integer("rotary_dim", low=2, high=head_dim) / head_dim
    share = own.number("partial_rotary_factor", usual, low=0, high=1)
    if share != 1.0 and family.rotary_share is None:
        raise ValueError(f"{fields.source}: partial_rotary_factor must be 1, got {share}")
    if share == 1.0:
        return head_dim
    rotated = int(head_dim * share)
    if rotated < 2 or rotated % 2:
        raise ValueError(
            f"{fields.source}: partial_rotary_factor must leave an even number of at least 2 of the {head_dim} "
            f"elements of a head, got {share}"
        )
    return rotated


def local_ropes(fields: Fields, family: Family) -> tuple[Fields, Fields]:
    """Return the fields for `read_rope` of layers that see all positions, and of those with a window.

    Their ropes are objects of `rope_parameters` (transformers 5), or `rope_theta` with `rope_scaling`, and
    `local_theta_field` of the family (earlier versions).
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

    full = view("full_attention", "rope_theta", family.theta)
    local = view("sliding_attention", family.local_theta_field, family.local_theta)
    return Fields(fields.source, full), Fields(fields.source, {**local, "rope_scaling": None})


def _rope_section(fields: Fields, *, known: Collection[str] = ()) -> Fields:
    """Return the fields of the rope of a config.json in one object, with `rope_type` for `type`.

    Args:
        fields: of config.json.
        known: fields that the family reads, whatever the kind of scaling is.

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
        kind, old_kind = (_KINDS.get(str(one), one) for one in (kind, old_kind))
        check_same(section.source, [("rope_type", kind), ("type", old_kind)])
        own["rope_type"] = old_kind if kind is None else kind
        outer = "max_position_embeddings"
        check_same(fields.source, [(outer, fields.values.get(outer)), (f"{name}.{outer}", own.pop(outer, None))])
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
    _check_keys(own, known)
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


def _check_keys(own: Fields, known: Collection[str]) -> None:
    """Raise ValueError if the kind of scaling does not read a field whose value would change something."""
    kind = own.values.get("rope_type", "default")
    known = {"rope_type", *_ALSO_OUTSIDE, *_WITHOUT_EFFECT, *known}
    for key in sorted(own.values.keys() - _KEYS.get(str(kind), own.values.keys()) - known):
        must_be(own, key, *_HARMLESS.get(key, ()))


def _read_scaling(own: Fields, kind: str, max_position: int, original_length: int, *, rotated: int) -> Scaling | None:
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
            if low > high:
                raise ValueError(f"{own.source}: low_freq_factor must be at most high_freq_factor {high}, got {low}")
            return Llama3Scaling(
                factor=_factor(own),
                original_length=original_length,
                low_frequency_factor=low,
                high_frequency_factor=high,
            )
        case "proportional":
            num_pairs = int(own.number("partial_rotary_factor", 1.0, low=0, high=1) * rotated // 2)
            if num_pairs < 1:
                raise ValueError(
                    f"{own.source}: partial_rotary_factor must leave at least one pair of the {rotated} elements of a "
                    f"head, got {own.values['partial_rotary_factor']}"
                )
            return ProportionalScaling(num_pairs=num_pairs, factor=own.number("factor", 1.0, low=1, high=_MAX_FACTOR))
        case "longrope":
            return _long_scaling(own, max_position, original_length, num_factors=rotated // 2)
        case _:
            raise ValueError(
                f"{own.source}: rope_type must be default, linear, dynamic, yarn, llama3, proportional or longrope, "
                f"got {kind!r}"
            )


def _long_scaling(own: Fields, max_position: int, original_length: int, *, num_factors: int) -> LongScaling:
    factor = own.number("factor", max_position / original_length, low=1e-3, high=_MAX_FACTOR)
    usual = math.sqrt(1 + math.log(factor) / math.log(original_length)) if factor > 1 and original_length > 1 else 1.0
    sets = [own.numbers(name, num_factors, low=1e-3, high=1e6) for name in ("short_factor", "long_factor")]
    return LongScaling(
        sets=tuple(sets if max_position > original_length else sets[:1]),
        original_length=original_length,
        attention_factor=own.number("attention_factor", usual, low=1e-3, high=1e3),
    )


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
