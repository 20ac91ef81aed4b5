"""EXAONE."""

from __future__ import annotations

from families.case import Case

CASES = {
    "exaone4": Case(kind="Exaone4", extra={"sliding_window": 9, "sliding_window_pattern": 3}),
    "exaone4-no-window": Case(
        kind="Exaone4", extra={"sliding_window": None, "layer_types": ["full_attention"] * 3, "head_dim": 8}
    ),
}
