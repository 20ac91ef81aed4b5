"""DeepSeek, Kimi K2, whose class has the name of DeepSeek V3's, and GLM with latents."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pagewood.engine.models.families.family import Family
from pagewood.engine.models.families.mixture import Mixture

_MIXTURE2 = Mixture(
    dense_layers="first",
    has_groups=True,
    renormalises=False,
    factor="routed_scaling_factor",
    num_shared="n_shared_experts",
)
MIXTURE3 = Mixture(
    dense_layers="first",
    score="sigmoid",
    has_choice_bias=True,
    has_groups=True,
    best_of_group=2,
    epsilon=1e-20,
    renormalises_by_default=True,
    factor="routed_scaling_factor",
    num_shared="n_shared_experts",
)
_DEFAULTS3 = {
    "first_k_dense_replace": 3, "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
    "n_group": 8, "topk_group": 4, "n_shared_experts": 1, "routed_scaling_factor": 2.5,
}  # fmt: skip

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "DeepseekV2ForCausalLM": Family(mixer="latents", mlp_bias=None, mixture=_MIXTURE2),
        "DeepseekV3ForCausalLM": Family(mixer="latents", mixture=MIXTURE3, defaults=_DEFAULTS3),
        "DeepseekV32ForCausalLM": Family(mixer="indexed latents", mixture=MIXTURE3, defaults=_DEFAULTS3),
        "Glm4MoeLiteForCausalLM": Family(
            mixer="latents",
            mixture=MIXTURE3,
            defaults={"first_k_dense_replace": 1, "n_shared_experts": 1, "rms_norm_eps": 1e-5},
        ),
    }
)
