"""GPT-2."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pagewood.engine.models.families.family import Family
from pagewood.engine.models.families.stored_layout import StoredLayout
from pagewood.engine.models.parts.norm import NormConfig

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "GPT2LMHeadModel": Family(
            qkv_bias=True,
            output_bias=True,
            mlp_bias=True,
            rotated_layers="none",
            has_learned_positions=True,
            field_names={
                "hidden_act": "activation_function", "hidden_size": "n_embd", "intermediate_size": "n_inner",
                "max_position_embeddings": "n_positions", "num_attention_heads": "n_head",
                "num_hidden_layers": "n_layer", "rms_norm_eps": "layer_norm_epsilon",
            },
            is_gated=False,
            norm=NormConfig(epsilon=1e-5, is_centred=True, has_bias=True),
            stored=StoredLayout(
                prefix="transformer.",
                layers="h",
                outside={"wte": "model.embed_tokens", "wpe": "model.embed_positions", "ln_f": "model.norm"},
                in_layer={
                    "ln_1": "input_layernorm", "ln_2": "post_attention_layernorm", "attn.c_proj": "self_attn.o_proj",
                    "mlp.c_fc": "mlp.up_proj", "mlp.c_proj": "mlp.down_proj",
                },
                fused={"attn.c_attn": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")},
                has_inputs_first=True,
                unneeded=(".attn.bias", ".attn.masked_bias"),
            ),
            defaults={"hidden_act": "gelu_new", "tie_word_embeddings": True},
        ),
    }
)  # fmt: skip
