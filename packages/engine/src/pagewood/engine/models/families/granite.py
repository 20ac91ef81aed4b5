"""Granite."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from pagewood.engine.models.families.family import Family
from pagewood.engine.models.families.mixture import Mixture
from pagewood.engine.models.families.stored_layout import StoredLayout
from pagewood.engine.models.parts.experts import ExpertNames
from pagewood.engine.models.parts.layer import FrameConfig

_DENSE = Family(
    mlp_bias=None,
    knows=frozenset({"attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier"}),
    defaults={"attention_multiplier": 1.0},
)
_MIXTURE = Mixture(
    names=ExpertNames(router="router.layer", shared="shared_mlp"),
    size="intermediate_size",
    scores_chosen_only=True,
    renormalises=False,
)
_EXPERTS = replace(
    _DENSE,
    mlp_bias=False,
    mixture=_MIXTURE,
    frame=FrameConfig(feed_forward="block_sparse_moe"),
    defaults={**_DENSE.defaults, "hidden_act": "silu", "num_local_experts": 8, "num_experts_per_tok": 2},
)
_SHARED = replace(_EXPERTS, mixture=replace(_MIXTURE, shared_size="shared_intermediate_size"))
_FOUR_DENSE = replace(
    _DENSE,
    mlp_bias=False,
    rotated_layers="typed",
    field_names={"intermediate_size": "shared_intermediate_size"},
    recurrence="space",
    recurrent_name="mamba",
    gate_is_fused=True,
    stored=StoredLayout(
        in_layer={"shared_mlp.input_linear": "mlp.gate_up_proj", "shared_mlp.output_linear": "mlp.down_proj"}
    ),
    defaults=_DENSE.defaults,
)
"""Granite 4 without experts."""
_FOUR = replace(
    _SHARED,
    rotated_layers="typed",
    recurrence="space",
    recurrent_name="mamba",
    knows=_SHARED.knows | {"num_local_experts"},
    without_experts=_FOUR_DENSE,
)

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "GraniteForCausalLM": _DENSE,
        "GraniteMoeForCausalLM": _EXPERTS,
        "GraniteMoeSharedForCausalLM": _SHARED,
        "GraniteMoeHybridForCausalLM": _FOUR,
    }
)
