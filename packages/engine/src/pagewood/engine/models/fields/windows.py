"""The fields that say which layers see how many positions."""

from __future__ import annotations

from pagewood.engine.json_fields import Fields
from pagewood.engine.models.families.family import Family
from pagewood.engine.models.fields.agreement import must_be
from pagewood.engine.models.fields.rope import LAYER_TYPES
from pagewood.engine.models.fields.rotated import read_rotated

_LONGEST_WINDOW = (1 << 31) - 1
_PERIOD = 6
"""Each n-th layer sees all positions in a family with periodic windows if `sliding_window_pattern` is absent."""
_CHUNK, _CHUNKED = 8192, "chunked_attention"
"""The chunk of a family that has them if `attention_chunk_size` is absent, and the layers with it in `layer_types`."""
_OLD_NAME = "attention"
"""What files from before transformers 5 call full_attention in `layer_types`, where other layers have states."""
_DEFAULT_WINDOW = 4096
"""The window if a family has windows and `sliding_window` is absent; null means no windows."""


def read_windows(fields: Fields, family: Family, num_layers: int) -> tuple[int | None, ...]:
    """Return the window of each layer; None: a layer sees all positions.

    Raises:
        ValueError: a field is of another type or out of its range, or contradicts another one.
    """
    if family.windows == "chunks":
        return _chunks(fields, family, num_layers)
    kinds = _layer_types(fields, num_layers)
    if family.windows == "around":
        return _reaches(fields, kinds, num_layers)
    window = _window(fields, family)
    if family.is_encoder and window is not None:
        window //= 2  # on both sides
    if kinds is None and family.windows == "periodic" and (window is not None or family.has_local_rope):
        kinds = _periodic(fields, num_layers)
    if kinds is None:
        first = 0 if family.windows == "all" else fields.integer("max_window_layers", 28, high=_LONGEST_WINDOW)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if window is None and "sliding_attention" in kinds:
        if family.windows == "none":
            raise ValueError(f"{fields.source}: layer_types must not name sliding_attention in this architecture")
        asked = {
            name: fields.values[name] for name in ("sliding_window", "use_sliding_window") if name in fields.values
        }
        raise ValueError(
            f"{fields.source}: layer_types may name sliding_attention only where sliding_window is not null and "
            f"use_sliding_window is not false, got {asked!r:.80}"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _reaches(fields: Fields, kinds: tuple[str, ...] | None, num_layers: int) -> tuple[int | None, ...]:
    """Return how far the tokens of each layer of an encoder see on both sides."""
    reach = fields.integer("local_attention", 128, low=2, high=_LONGEST_WINDOW) // 2
    period = fields.integer("global_attn_every_n_layers", 3, low=1, high=_LONGEST_WINDOW)
    usual = tuple("sliding_attention" if layer % period else "full_attention" for layer in range(num_layers))
    if kinds is not None and "global_attn_every_n_layers" in fields.values and kinds != usual:
        raise ValueError(
            f"{fields.source}: layer_types must agree with global_attn_every_n_layers {period}, got {kinds!r:.80}"
        )
    return tuple(reach if kind == "sliding_attention" else None for kind in kinds or usual)


def _chunks(fields: Fields, family: Family, num_layers: int) -> tuple[int | None, ...]:
    """Return the windows of layers that rotate if their positions are in chunks."""
    rotated = read_rotated(fields, family, (None,) * num_layers)
    if fields.values.get("attention_chunk_size", 0) is None:
        return (None,) * num_layers
    size = fields.integer("attention_chunk_size", _CHUNK, low=1, high=_LONGEST_WINDOW)
    kinds = fields.texts("layer_types") or [_CHUNKED if one else "full_attention" for one in rotated]
    if len(kinds) != num_layers or set(kinds) - {_CHUNKED, "full_attention"}:
        raise ValueError(
            f"{fields.source}: layer_types must name {_CHUNKED} or full_attention for each of {num_layers} layers, "
            f"got {kinds!r:.80}"
        )
    return tuple(size if kind == _CHUNKED else None for kind in kinds)


def _periodic(fields: Fields, num_layers: int) -> tuple[str, ...]:
    """Return the kinds of layers that `sliding_window_pattern` describes: a period, or as in "LLLG"."""
    pattern = fields.values.get("sliding_window_pattern")
    if isinstance(pattern, str):
        if not pattern or set(pattern) - {"L", "G"}:
            raise ValueError(
                f"{fields.source}: sliding_window_pattern must consist of L and G, or be a number, got {pattern!r:.80}"
            )
        return tuple(
            "sliding_attention" if pattern[layer % len(pattern)] == "L" else "full_attention"
            for layer in range(num_layers)
        )
    period = fields.integer("sliding_window_pattern", _PERIOD, low=1, high=_LONGEST_WINDOW)
    return tuple("sliding_attention" if layer % period else "full_attention" for layer in range(1, num_layers + 1))


def _window(fields: Fields, family: Family) -> int | None:
    """Return the window of the layers that have one, or None if no layer has one."""
    if family.windows == "some" and not fields.flag("use_sliding_window", False):
        return None
    if family.windows == "none":
        if fields.flag("use_sliding_window", True):
            must_be(fields, "sliding_window")
        return None
    if "sliding_window" in fields.values and fields.values["sliding_window"] is None:
        return None
    return fields.integer("sliding_window", _DEFAULT_WINDOW, low=1, high=_LONGEST_WINDOW)


def _layer_types(fields: Fields, num_layers: int) -> tuple[str, ...] | None:
    named = fields.texts("layer_types")
    if named is None:
        return None
    kinds = tuple("full_attention" if kind == _OLD_NAME else kind for kind in named)
    unknown = sorted(set(kinds) - LAYER_TYPES)
    if unknown:
        raise ValueError(
            f"{fields.source}: layer_types must be full_attention or sliding_attention, got {unknown[0][:80]!r}"
        )
    if len(kinds) != num_layers:
        raise ValueError(f"{fields.source}: layer_types must have {num_layers} entries, got {len(kinds)}")
    return kinds
