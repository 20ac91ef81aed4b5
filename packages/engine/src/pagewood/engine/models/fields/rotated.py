"""The fields that say which layers rotate queries and keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from pagewood.engine.json_fields import Fields, shown
from pagewood.engine.models.families.family import Family
from pagewood.engine.models.fields.agreement import must_be

_INTERVAL = 4
"""Each n-th layer is not rotated if `no_rope_layer_interval` is absent."""


def read_rotated(fields: Fields, family: Family, windows: Sequence[int | None]) -> Sequence[bool]:
    """Return whether each layer, with its window, rotates queries and keys.

    Raises:
        ValueError: a field is of another type, or does not fit the number of layers.
    """
    match family.rotated_layers:
        case "all" | "none":
            return [family.rotated_layers == "all"] * len(windows)
        case "based":
            ropes = fields.section("rope_parameters") or fields.empty("rope_parameters")
            return [any(one.values.get("rope_theta") is not None for one in (fields, ropes))] * len(windows)
        case "windows":
            has_windows = fields.values.get("sliding_window") is not None
            return [window is not None or not has_windows for window in windows]
        case "listed":
            return _listed(fields, len(windows))
        case "typed":
            must_be(fields, "position_embedding_type", "rope", "nope")
            return [fields.values.get("position_embedding_type") == "rope"] * len(windows)


def _listed(fields: Fields, num_layers: int) -> Sequence[bool]:
    listed = fields.values.get("no_rope_layers")
    if not listed:
        interval = fields.integer("no_rope_layer_interval", _INTERVAL, low=1, high=1 << 20)
        return [layer % interval != 0 for layer in range(1, num_layers + 1)]
    if not isinstance(listed, list):
        raise ValueError(f"{fields.source}: no_rope_layers must be a list, got {shown(listed)}")
    marks = cast("list[object]", listed)
    if len(marks) < num_layers or any(mark not in (0, 1) for mark in marks):
        raise ValueError(
            f"{fields.source}: no_rope_layers must have a 1 (rotated) or a 0 for each of {num_layers} layers, "
            f"got {shown(marks)}"
        )
    return [mark == 1 for mark in marks[:num_layers]]
