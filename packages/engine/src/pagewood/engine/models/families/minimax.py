"""MiniMax."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pagewood.engine.models.families.family import Family
from pagewood.engine.models.families.mixture import Mixture
from pagewood.engine.models.parts.experts import ExpertNames
from pagewood.engine.models.parts.layer import FrameConfig

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "MiniMaxM2ForCausalLM": Family(
            qkv_bias=False,
            output_bias=False,
            qk_norm="whole",
            rotary_share=1.0,
            theta=5e6,
            frame=FrameConfig(feed_forward="block_sparse_moe"),
            mixture=Mixture(
                names=ExpertNames(gate="w1", up="w3", down="w2", choice_bias="e_score_correction_bias"),
                size="intermediate_size",
                score="sigmoid",
                has_choice_bias=True,
                renormalises=True,
            ),
            defaults={
                "num_key_value_heads": 8, "head_dim": 128, "num_local_experts": 256, "num_experts_per_tok": 8,
                "max_position_embeddings": 196_608,
            },
        ),
    }
)  # fmt: skip
