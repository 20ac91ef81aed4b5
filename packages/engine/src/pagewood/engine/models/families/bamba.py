"""Bamba and Falcon-H1."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pagewood.engine.models.families.family import Family
from pagewood.engine.models.families.stored_layout import StoredLayout
from pagewood.engine.models.parts.layer import FrameConfig
from pagewood.engine.models.parts.norm import NormConfig

_STORED = StoredLayout(outside={"model.final_layernorm": "model.norm"})

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "BambaForCausalLM": Family(
            recurrence="space",
            recurrent_name="mamba",
            mlp_bias=None,
            rotary_share=0.5,
            norm=NormConfig(epsilon=1e-5),
            frame=FrameConfig(before_feed_forward="pre_ff_layernorm", feed_forward="feed_forward"),
            stored=_STORED,
            defaults={"num_key_value_heads": 8, "max_position_embeddings": 262_144},
        ),
        "FalconH1ForCausalLM": Family(
            recurrence="space",
            has_mixers_beside=True,
            mlp_bias=None,
            norm=NormConfig(epsilon=1e-5),
            frame=FrameConfig(mixer=None, before_feed_forward="pre_ff_layernorm", feed_forward="feed_forward"),
            stored=_STORED,
            field_names={"logit_scale": "lm_head_multiplier"},
            knows=frozenset({"embedding_multiplier"}),
            defaults={"num_key_value_heads": 8, "max_position_embeddings": 8192, "mamba_d_ssm": 1024},
        ),
    }
)
