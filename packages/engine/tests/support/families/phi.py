"""Phi."""

from __future__ import annotations

from families.case import Case
from families.ropes import rope

_LENGTH = "original_max_position_embeddings"
_FACTORS = {"short_factor": [1.1] * 6, "long_factor": [1.0, 1.5, 2.0, 3.0, 5.0, 9.0], "partial_rotary_factor": 0.75}
_END = {"eos_token_id": 0, "bos_token_id": 1}

CASES = {
    "phi3-window": Case(kind="Phi3", extra={**_END, "sliding_window": 9}),
    "phi4-both": Case(kind="Phi3", extra={**_END, **rope("longrope", **_FACTORS, **{_LENGTH: 64}), _LENGTH: 64}),
    "phi4-short": Case(kind="Phi3", extra={**_END, **rope("longrope", **_FACTORS, **{_LENGTH: 256}), _LENGTH: 256}),
}
