"""EXAONE."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pagewood.engine.models.families.family import Family
from pagewood.engine.models.parts.layer import FrameConfig

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "Exaone4ForCausalLM": Family(
            qkv_bias=False,
            output_bias=False,
            qk_norm="heads",
            windows="periodic",
            rotated_layers="windows",
            frame=FrameConfig(
                before_mixer=None,
                behind_mixer="post_attention_layernorm",
                before_feed_forward=None,
                behind_feed_forward="post_feedforward_layernorm",
            ),
            defaults={"num_key_value_heads": 32, "rms_norm_eps": 1e-5, "sliding_window_pattern": 4},
        ),
    }
)
