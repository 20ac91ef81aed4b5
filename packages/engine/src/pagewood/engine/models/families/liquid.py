"""LFM2."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pagewood.engine.models.families.family import Family
from pagewood.engine.models.families.stored_layout import StoredLayout

_NAMES = {
    "operator_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "self_attn.out_proj": "self_attn.o_proj",
    "self_attn.q_layernorm": "self_attn.q_norm",
    "self_attn.k_layernorm": "self_attn.k_norm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
}

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "Lfm2ForCausalLM": Family(
            recurrence="convolution",
            recurrent_name="conv",
            qk_norm="heads",
            widens_by_two_thirds=True,
            theta=1e6,
            field_names={"rms_norm_eps": "norm_eps"},
            stored=StoredLayout(in_layer=_NAMES, outside={"model.embedding_norm": "model.norm"}),
            defaults={"rms_norm_eps": 1e-5, "tie_word_embeddings": True, "num_key_value_heads": 8},
        )
    }
)
