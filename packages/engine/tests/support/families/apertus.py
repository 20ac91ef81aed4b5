"""Apertus."""

from __future__ import annotations

from families.case import Case
from families.ropes import rope

CASES = {
    "apertus": Case(
        kind="Apertus",
        extra=rope(
            "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
        ),
    ),
}
