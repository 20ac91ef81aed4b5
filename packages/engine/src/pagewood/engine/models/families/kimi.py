"""Kimi Linear; Kimi K2 has the class of DeepSeek V3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from pagewood.engine.models.families.deepseek import MIXTURE3
from pagewood.engine.models.families.family import Family
from pagewood.engine.models.families.stored_layout import StoredLayout
from pagewood.engine.models.parts.experts import ExpertNames
from pagewood.engine.models.parts.norm import NormConfig

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "KimiLinearForCausalLM": Family(
            mixer="latents",
            recurrence="channels",
            recurrent_name="self_attn",
            rotated_layers="none",
            norm=NormConfig(epsilon=1e-5),
            mixture=replace(MIXTURE3, names=ExpertNames(gate="w1", up="w3", down="w2")),
            field_names={
                "max_position_embeddings": "model_max_length", "norm_topk_prob": "moe_renormalize",
                "n_group": "num_expert_group", "num_experts_per_tok": "num_experts_per_token",
                "n_shared_experts": "num_shared_experts", "scoring_func": "moe_router_activation_func",
            },
            stored=StoredLayout(in_parts={"block_sparse_moe.": "mlp."}),
            defaults={
                "first_k_dense_replace": 1, "num_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1,
                "moe_intermediate_size": 1024, "routed_scaling_factor": 2.446, "max_position_embeddings": 1_048_576,
                "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "kv_lora_rank": 512,
            },
        ),
    }
)  # fmt: skip
