"""Nemotron, with and without state spaces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from pagewood.engine.models.families.deepseek import MIXTURE3
from pagewood.engine.models.families.family import Family
from pagewood.engine.models.families.stored_layout import StoredLayout
from pagewood.engine.models.parts.layer import FrameConfig
from pagewood.engine.models.parts.norm import NormConfig

_ENDS = {"embeddings": "model.embed_tokens", "norm_f": "model.norm"}

NEMOTRON_H = Family(
    qkv_bias=False,
    output_bias=False,
    recurrence="space",
    sizes_by_heads=True,
    has_single_parts=True,
    rotated_layers="none",
    mlp_bias=None,
    is_gated=False,
    norm=NormConfig(epsilon=1e-5),
    frame=FrameConfig(
        before_mixer="norm", mixer="mixer", before_feed_forward=None, feed_forward="mixer", is_single=True
    ),
    mixture=replace(
        MIXTURE3,
        dense_layers="none",
        num_shared=None,
        shared_size="moe_shared_expert_intermediate_size",
        latent_size="moe_latent_size",
    ),
    field_names={
        "hidden_act": "mlp_hidden_act", "rms_norm_eps": "layer_norm_epsilon",
        "mamba_n_heads": "mamba_num_heads", "mamba_d_head": "mamba_head_dim", "mamba_n_groups": "n_groups",
        "mamba_d_state": "ssm_state_size", "mamba_d_conv": "conv_kernel", "mamba_conv_bias": "use_conv_bias",
        "mamba_proj_bias": "use_bias",
    },
    stored=StoredLayout(
        prefix="backbone.",
        layers="layers",
        outside={**_ENDS, **{f"model.{name}": own for name, own in _ENDS.items()}},
    ),
    other_parts=("mtp.",),
    defaults={
        "hidden_act": "relu2", "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 4096, "intermediate_size": 21_504, "mamba_n_heads": 128, "mamba_d_head": 64,
        "mamba_n_groups": 8, "mamba_d_state": 128, "n_routed_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 7688, "moe_shared_expert_intermediate_size": 7688,
    },
)  # fmt: skip

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "NemotronForCausalLM": Family(
            mlp_bias=None,
            rotary_share=0.5,
            field_names={"rms_norm_eps": "norm_eps"},
            is_gated=False,
            norm=NormConfig(epsilon=1e-5, offset=1.0, is_centred=True, has_bias=True),
            defaults={"hidden_act": "relu2"},
        ),
        "NemotronHForCausalLM": NEMOTRON_H,
    }
)
