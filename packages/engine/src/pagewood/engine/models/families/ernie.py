"""ERNIE."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from pagewood.engine.models.families.family import Family
from pagewood.engine.models.families.mixture import Mixture
from pagewood.engine.models.parts.experts import ExpertNames
from pagewood.engine.models.parts.norm import NormConfig

_ERNIE = Family(
    mlp_bias=None,
    bias_fields=("use_bias", "use_bias", "use_bias"),
    has_neighbours=True,
    theta=5e5,
    norm=NormConfig(epsilon=1e-5),
    defaults={
        "num_key_value_heads": 2, "head_dim": 128, "tie_word_embeddings": True, "max_position_embeddings": 131_072,
    },
)  # fmt: skip

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "Ernie4_5ForCausalLM": _ERNIE,
        "Ernie4_5_MoeForCausalLM": replace(
            _ERNIE,
            logits_bias_field="use_bias",
            mixture=Mixture(
                names=ExpertNames(choice_bias="moe_statics.e_score_correction_bias", choice_bias_is_matrix=True),
                dense_layers="range",
                has_choice_bias=True,
                renormalises=True,
                least_sum="moe_norm_min",
                num_shared="moe_num_shared_experts",
            ),
            defaults={
                "num_key_value_heads": 4, "tie_word_embeddings": True, "max_position_embeddings": 131_072,
                "moe_num_experts": 64, "moe_k": 6, "moe_intermediate_size": 1536, "moe_num_shared_experts": 2,
                "moe_layer_start_index": 1,
            },
        ),
    }
)  # fmt: skip
