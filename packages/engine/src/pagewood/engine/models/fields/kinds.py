"""The fields that say what each layer of a model with recurrent layers has."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from pagewood.engine.json_fields import Fields, check_same, shown
from pagewood.engine.models.families.family import Family
from pagewood.engine.models.limits import read_size

Kind = Literal["attention", "recurrent", "beside", "feed_forward", "experts"]
"""What a layer has: one mixer and a feed-forward; both mixers beside each other, and a feed-forward; or, where layers
are single parts, one mixer, a feed-forward or experts alone."""
_NAMES: Mapping[str, Kind] = MappingProxyType(
    {
        "linear_attention": "recurrent", "mamba": "recurrent", "conv": "recurrent", "full_attention": "attention",
        "attention": "attention", "hybrid": "beside", "mlp": "feed_forward", "moe": "experts",
    }
)  # fmt: skip
"""Kinds by the names of `layer_types`; files have those of two ages."""
_LETTERS: Mapping[str, str] = MappingProxyType({"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"})
"""The same names by the letters of `hybrid_override_pattern`."""
_LISTS = ("layer_types", "layers_block_type", "hybrid_override_pattern")
_INTERVAL = 4
"""Each n-th layer has attention if neither a list nor `full_attention_interval` says which."""


def read_kinds(fields: Fields, family: Family) -> tuple[Kind, ...]:
    """Return the kind of each layer.

    Raises:
        ValueError: a field is missing, of another type or out of its range, or contradicts another one.
    """
    if family.recurrence == "none":
        return ("attention",) * read_size(fields, "num_hidden_layers", "num_layers")
    listed = _listed(fields, family)
    num_layers = read_size(fields, "num_hidden_layers", "num_layers", None if listed is None else len(listed))
    if listed is not None:
        known = _known(family)
        unknown = sorted(name for name in {*listed} if _NAMES.get(name) not in known)
        if unknown or len(listed) != num_layers:
            allowed = ", ".join(name for name, kind in _NAMES.items() if kind in known)
            raise ValueError(
                f"{fields.source}: layer_types must name one of {allowed} for each of {num_layers} layers, "
                f"got {shown(unknown or len(listed))}"
            )
        return tuple(_NAMES[name] for name in listed)
    if family.has_mixers_beside:
        return ("beside",) * num_layers
    with_attention = _with_attention(fields, family, num_layers)
    return tuple("attention" if layer in with_attention else "recurrent" for layer in range(num_layers))


def _known(family: Family) -> frozenset[Kind]:
    """Return the kinds of layers that a family may have."""
    if family.has_mixers_beside:
        return frozenset({"beside"})
    if family.has_single_parts:
        return frozenset({"attention", "recurrent", "feed_forward", "experts"})
    return frozenset({"attention", "recurrent"})


def _listed(fields: Fields, family: Family) -> tuple[str, ...] | None:
    """Return the names of the kinds of all layers, if a field lists them."""
    found = {name: fields.texts(name) for name in _LISTS[:2]}
    if family.has_single_parts:
        pattern = fields.text(_LISTS[2], "")
        found[_LISTS[2]] = tuple(_LETTERS.get(letter, letter) for letter in pattern) or None
    said = {name: names for name, names in found.items() if names}
    check_same(fields.source, [(name, [_NAMES.get(one, one) for one in names]) for name, names in said.items()])
    return next(iter(said.values()), None)


def _with_attention(fields: Fields, family: Family, num_layers: int) -> frozenset[int]:
    """Return which layers have attention where no field lists the kinds of all."""
    layers = range(num_layers)
    match family.recurrence:
        case "convolution":
            return frozenset(fields.integers("full_attn_idxs", high=num_layers - 1))
        case "space":
            return frozenset(fields.integers("attn_layer_indices", high=num_layers - 1))
        case "channels":
            own = fields.section("linear_attn_config")
            if own is None:
                return frozenset(layers[_INTERVAL::_INTERVAL])
            full, others = (own.integers(name, low=1, high=num_layers) for name in ("full_attn_layers", "kda_layers"))
            if sorted((*full, *others)) != [layer + 1 for layer in layers]:
                raise ValueError(
                    f"{own.source}: full_attn_layers and kda_layers must have each of 1 to {num_layers} once, "
                    f"got {shown([*full])} and {shown([*others])}"
                )
            return frozenset(layer - 1 for layer in full)
        case _:
            interval = fields.integer("full_attention_interval", _INTERVAL, low=1, high=1 << 20)
            return frozenset(layers[interval - 1 :: interval])
