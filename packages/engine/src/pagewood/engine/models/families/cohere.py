"""Cohere's Command R."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from pagewood.engine.models.families.family import Family
from pagewood.engine.models.parts.layer import FrameConfig
from pagewood.engine.models.parts.norm import NormConfig

_COHERE = Family(
    has_neighbours=True,
    field_names={"rms_norm_eps": "layer_norm_eps"},
    knows=frozenset({"logit_scale", "position_embedding_type"}),
    norm=NormConfig(epsilon=1e-5, is_centred=True),
    frame=FrameConfig(before_feed_forward=None, is_parallel=True),
    defaults={"logit_scale": 0.0625, "tie_word_embeddings": True},
)

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "CohereForCausalLM": replace(_COHERE, computed_elsewhere=frozenset({"use_qk_norm"})),
        "Cohere2ForCausalLM": replace(
            _COHERE,
            windows="periodic",
            rotated_layers="windows",
            defaults={**_COHERE.defaults, "sliding_window": 4096, "sliding_window_pattern": 4},
        ),
    }
)
