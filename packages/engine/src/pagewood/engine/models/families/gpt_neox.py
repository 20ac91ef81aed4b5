"""GPT-NeoX, and Pythia."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pagewood.engine.models.families.family import Family
from pagewood.engine.models.families.stored_layout import StoredLayout
from pagewood.engine.models.parts.layer import FrameConfig
from pagewood.engine.models.parts.norm import NormConfig

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "GPTNeoXForCausalLM": Family(
            mlp_bias=True,
            rotary_share=0.25,
            field_names={
                "partial_rotary_factor": "rotary_pct", "rms_norm_eps": "layer_norm_eps",
                "rope_theta": "rotary_emb_base",
            },
            knows=frozenset({"use_parallel_residual"}),
            is_gated=False,
            norm=NormConfig(epsilon=1e-5, is_centred=True, has_bias=True),
            frame=FrameConfig(is_parallel=True),
            stored=StoredLayout(
                prefix="gpt_neox.",
                layers="layers",
                outside={
                    "embed_in": "model.embed_tokens", "final_layer_norm": "model.norm", "embed_out": "lm_head",
                },
                in_layer={
                    "attention.dense": "self_attn.o_proj", "mlp.dense_h_to_4h": "mlp.up_proj",
                    "mlp.dense_4h_to_h": "mlp.down_proj",
                },
                fused={"attention.query_key_value": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")},
                fused_by_head=True,
                unneeded=(".attention.bias", ".attention.masked_bias"),
            ),
            defaults={"attention_bias": True},
        ),
    }
)  # fmt: skip
