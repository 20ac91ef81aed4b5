"""ModernBERT: an encoder with rotations and windows on both sides."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pagewood.engine.models.families.family import Family
from pagewood.engine.models.families.stored_layout import StoredLayout
from pagewood.engine.models.parts.layer import FrameConfig
from pagewood.engine.models.parts.norm import NormConfig

_FAMILY = Family(
    mlp_bias=None,
    windows="around",
    has_local_rope=True,
    theta=160_000.0,
    local_theta_field="local_rope_theta",
    is_encoder=True,
    begins_without_norm=True,
    field_names={"hidden_act": "hidden_activation", "rms_norm_eps": "norm_eps", "rope_theta": "global_rope_theta"},
    gate_is_fused=True,
    norm=NormConfig(epsilon=1e-5, is_centred=True),
    frame=FrameConfig(before_mixer="attn_norm", before_feed_forward="mlp_norm"),
    stored=StoredLayout(
        prefix="model.",
        layers="layers",
        outside={
            "embeddings.tok_embeddings": "model.embed_tokens", "embeddings.norm": "model.embed_norm",
            "final_norm": "model.norm",
        },
        in_layer={"attn.Wo": "self_attn.o_proj", "mlp.Wi": "mlp.gate_up_proj", "mlp.Wo": "mlp.down_proj"},
        fused={"attn.Wqkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")},
        unneeded_parts=("head.", "decoder.", "classifier."),
    ),
    defaults={"hidden_act": "gelu", "tie_word_embeddings": True},
)  # fmt: skip
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "ModernBertForMaskedLM": _FAMILY,
        "ModernBertForSequenceClassification": _FAMILY,
        "ModernBertModel": _FAMILY,
    }
)
