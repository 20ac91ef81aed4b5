"""OLMo."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from pagewood.engine.models.families.family import Family
from pagewood.engine.models.families.mixture import Mixture
from pagewood.engine.models.families.stored_layout import StoredLayout
from pagewood.engine.models.parts.layer import FrameConfig
from pagewood.engine.models.parts.norm import NormConfig

_OLMO2 = Family(
    qk_norm="whole",
    frame=FrameConfig(
        before_mixer=None,
        behind_mixer="post_attention_layernorm",
        before_feed_forward=None,
        behind_feed_forward="post_feedforward_layernorm",
    ),
    norm=NormConfig(epsilon=1e-5),
)

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "OlmoForCausalLM": Family(
            computed_elsewhere=frozenset({"clip_qkv"}),
            norm=NormConfig(epsilon=1e-5, is_centred=True, has_weight=False),
        ),
        "Olmo2ForCausalLM": _OLMO2,
        "Olmo3ForCausalLM": replace(
            _OLMO2,
            windows="periodic",
            has_local_rope=True,
            theta=5e5,
            local_theta=5e5,
            local_theta_field="rope_theta",
            defaults={"rms_norm_eps": 1e-5, "sliding_window_pattern": 4},
        ),
        "OlmoHybridForCausalLM": replace(
            _OLMO2,
            recurrence="delta",
            recurrent_frame=FrameConfig(),
            recurrent_epsilon=1e-5,
            delta_projections="apart",
            rotated_layers="based",
            norm=NormConfig(epsilon=1e-6),
            stored=StoredLayout(
                in_layer={
                    "attention_layer_norm": "input_layernorm", "feedforward_layer_norm": "post_attention_layernorm",
                }
            ),
            defaults={"max_position_embeddings": 65_536},
        ),
        "OlmoeForCausalLM": Family(
            qk_norm="whole",
            mixture=Mixture(size="intermediate_size"),
            norm=NormConfig(epsilon=1e-5),
            defaults={"num_experts": 64, "num_experts_per_tok": 8},
        ),
    }
)  # fmt: skip
