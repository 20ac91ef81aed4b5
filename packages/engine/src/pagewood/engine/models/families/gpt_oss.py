"""gpt-oss."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pagewood.engine.models.families.family import Family
from pagewood.engine.models.families.mixture import Mixture
from pagewood.engine.models.parts.experts import ExpertNames
from pagewood.engine.models.parts.norm import NormConfig

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "GptOssForCausalLM": Family(
            windows="periodic",
            has_sinks=True,
            theta=150_000.0,
            mixture=Mixture(
                names=ExpertNames(router="router"),
                size="intermediate_size",
                activation="clamped",
                scores_chosen_only=True,
                has_biases=True,
                renormalises=False,
            ),
            norm=NormConfig(epsilon=1e-5),
            defaults={
                "attention_bias": True, "head_dim": 64, "num_key_value_heads": 8, "sliding_window": 128,
                "sliding_window_pattern": 2, "num_experts_per_tok": 4,
            },
        ),
    }
)  # fmt: skip
