"""The memory of layers: which group's places they have, and where in them their keys and values lie.

Layers may have heads of several sizes. A place of a group is then as large as that of the largest layer, and is divided
into units: heads of a size that divides all others. Smaller layers share a place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import gcd

from pagewood.engine.models.parts.attention import AttentionConfig, Order
from pagewood.engine.models.parts.choice import AnyMixer, WithPages, paged_part, recurrent_part
from pagewood.kvpool import LatentLayout, LayerGroups, MultiHeadLayout, StateLayout

_LEAST_HEAD = 8
"""Elements of the only head of a model without attention, so that a few bytes stand for a token, which no layer reads:
pages are then an index of tokens, whose states are found by it."""


def layer_groups(layers: Sequence[AnyMixer], *, max_length: int = 1) -> LayerGroups:
    """Return the groups of layers whose memory can be given back apart, for sequences of at most `max_length`.

    For sequences of one position it is one group, which keeps all. Layers without pages stand in the place of another
    one.
    """
    paged = [paged_part(layer) for layer in layers]
    owners = {layer: config for layer, config in enumerate(paged) if config is not None and _source(config) is None}
    if not owners:
        return LayerGroups.divide([None], max_length=max_length).shared([0] * len(layers))
    unit, own = _unit(paged), list(owners.values())
    groups = LayerGroups.divide(
        [config.window for config in own],
        max_length=max_length,
        sizes=[config.kv_size // unit if isinstance(config, AttentionConfig) else 1 for config in own],
    )
    if len(owners) == len(layers):
        return groups
    numbers = {layer: number for number, layer in enumerate(owners)}
    sources = (next(iter(owners)) if config is None else _source(config) for config in paged)
    return groups.shared([numbers[layer if source is None else source] for layer, source in enumerate(sources)])


def memory_layout(
    layers: Sequence[AnyMixer], groups: LayerGroups, *, page_size: int, dtype: str, order: Order
) -> MultiHeadLayout | LatentLayout:
    """Return the layout of the places of a group; see `MultiHeadLayout` for the other arguments.

    Raises:
        ValueError: layers have latents of different sizes, or some have latents and others heads.
    """
    paged = [config for config in map(paged_part, layers) if config is not None]
    if not paged:
        return MultiHeadLayout(
            num_layers=1, num_kv_heads=1, head_dim=_LEAST_HEAD, page_size=page_size, dtype=dtype, order=order
        )
    first, *others = dict.fromkeys(config.memory(page_size=page_size, dtype=dtype, order=order) for config in paged)
    if not others:
        return replace(first, num_layers=groups.num_layers)
    heads = [config for config in paged if isinstance(config, AttentionConfig)]
    if len(heads) < len(paged):
        raise ValueError(f"layers must all have latents of the same size, or none, got {first} and {others[0]}")
    unit = _unit(paged)
    return MultiHeadLayout(
        num_layers=groups.num_layers,
        num_kv_heads=max(config.kv_size for config in heads) // unit,
        head_dim=unit,
        page_size=page_size,
        dtype=dtype,
        order=order,
    )


def state_layout(layers: Sequence[AnyMixer]) -> StateLayout | None:
    """Return the layout of the states of recurrent layers; None: there are none.

    Raises:
        ValueError: layers have states of different shapes.
    """
    states = [config.state for config in map(recurrent_part, layers) if config is not None]
    if len(set(states)) > 1:
        raise ValueError(f"recurrent layers must have states of one shape, got {states[0]} and {states[-1]}")
    return StateLayout(num_layers=len(states), arrays=states[0]) if states else None


def _unit(paged: Sequence[WithPages | None]) -> int:
    """Return the elements of a head that divide those of all heads."""
    return gcd(*(config.head_dim for config in paged if isinstance(config, AttentionConfig)))


def _source(config: WithPages) -> int | None:
    return config.source if isinstance(config, AttentionConfig) else None
