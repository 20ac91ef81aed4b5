"""The supported architectures: which fields of config.json become which parts, and how tensors are called."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from pagewood.engine.models.parts.layer import FrameConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What an architecture fixes, where its config.json has no field for it."""

    qkv_bias: bool | None = False
    """None: `attention_bias` decides."""
    output_bias: bool | None = False
    """None: `attention_bias` decides."""
    mlp_bias: bool | None = False
    """None: `mlp_bias` decides."""
    qk_norm: Literal["none", "heads", "whole"] = "none"
    """Whether q and k have norms, of each head or of all heads together."""
    windows: Literal["none", "all", "some"] = "none"
    """Which layers have the window of `sliding_window`; "some": those that `use_sliding_window` says."""
    frame: FrameConfig = field(default_factory=FrameConfig)
    defaults: Mapping[str, object] = field(default_factory=dict[str, object])
    """Values of fields that are absent."""


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "LlamaForCausalLM": Family(qkv_bias=None, output_bias=None, mlp_bias=None),
        "MistralForCausalLM": Family(windows="all", defaults={"num_key_value_heads": 8}),
        "Qwen2ForCausalLM": Family(qkv_bias=True, windows="some", defaults={"num_key_value_heads": 32}),
        "MiMoForCausalLM": Family(qkv_bias=True, windows="some", defaults={"num_key_value_heads": 32}),
        "Qwen3ForCausalLM": Family(
            qkv_bias=None,
            output_bias=None,
            qk_norm="heads",
            windows="some",
            defaults={"num_key_value_heads": 32, "head_dim": 128},
        ),
        "Olmo2ForCausalLM": Family(
            qkv_bias=None,
            output_bias=None,
            qk_norm="whole",
            frame=FrameConfig(
                before_mixer=None,
                behind_mixer="post_attention_layernorm",
                before_feed_forward=None,
                behind_feed_forward="post_feedforward_layernorm",
            ),
            defaults={"rms_norm_eps": 1e-5},
        ),
    }
)
"""By the name of the class in config.json."""
