"""Phi."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pagewood.engine.models.families.family import Family

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "Phi3ForCausalLM": Family(
            qkv_bias=False,
            output_bias=False,
            qkv_is_fused=True,
            gate_is_fused=True,
            rotary_share=1.0,
            windows="all",
            defaults={"rms_norm_eps": 1e-5, "sliding_window": None},
        ),
    }
)
