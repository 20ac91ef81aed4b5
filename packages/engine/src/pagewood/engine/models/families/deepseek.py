"""DeepSeek, Kimi K2, whose class has the name of DeepSeek V3's, and GLM with latents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
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
_MIXTURE3 = replace(
    _MIXTURE2,
    score="sigmoid",
    has_choice_bias=True,
    best_of_group=2,
    renormalises=None,
    renormalises_by_default=True,
    epsilon=1e-20,
)
_V3 = Family(mixer="latents", mixture=_MIXTURE3, defaults={"first_k_dense_replace": 3})

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "DeepseekV2ForCausalLM": Family(mixer="latents", mixture=_MIXTURE2, mlp_bias=None),
        "DeepseekV3ForCausalLM": _V3,
        "DeepseekV32ForCausalLM": replace(_V3, mixer="indexed latents"),
        "Glm4MoeLiteForCausalLM": replace(_V3, defaults={"first_k_dense_replace": 1, "rms_norm_eps": 1e-5}),
    }
)
