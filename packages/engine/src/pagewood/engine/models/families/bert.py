"""BERT, RoBERTa and XLM-RoBERTa, DistilBERT, MPNet and Nomic's BERT: encoders with norms of sums."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from pagewood.engine.models.families.family import Family
from pagewood.engine.models.families.stored_layout import StoredLayout
from pagewood.engine.models.parts.layer import FrameConfig
from pagewood.engine.models.parts.norm import NormConfig

_NORM = NormConfig(epsilon=1e-12, is_centred=True, has_bias=True)
_FRAME = FrameConfig(
    before_mixer=None,
    behind_mixer="post_attention_layernorm",
    before_feed_forward=None,
    behind_feed_forward="post_feedforward_layernorm",
    norms_sums=True,
)
_OUTSIDE = {
    "embeddings.word_embeddings": "model.embed_tokens", "embeddings.position_embeddings": "model.embed_positions",
    "embeddings.token_type_embeddings": "model.embed_types", "embeddings.LayerNorm": "model.embed_norm",
}  # fmt: skip
_IN_LAYER = {
    "attention.self.query": "self_attn.q_proj", "attention.self.key": "self_attn.k_proj",
    "attention.self.value": "self_attn.v_proj", "attention.output.dense": "self_attn.o_proj",
    "attention.output.LayerNorm": "post_attention_layernorm", "intermediate.dense": "mlp.up_proj",
    "output.dense": "mlp.down_proj", "output.LayerNorm": "post_feedforward_layernorm",
}  # fmt: skip


def _stored(prefix: str) -> StoredLayout:
    return StoredLayout(
        prefix=prefix,
        layers="encoder.layer",
        outside=_OUTSIDE,
        in_layer=_IN_LAYER,
        unneeded=(".position_ids",),
        unneeded_parts=("pooler.", "cls.", "lm_head.", "classifier."),
    )


def _bert(prefix: str, *, positions_follow_padding: bool = False) -> Family:
    return Family(
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        rotated_layers="none",
        has_learned_positions=True,
        is_encoder=True,
        has_last_norm=False,
        positions_follow_padding=positions_follow_padding,
        field_names={"rms_norm_eps": "layer_norm_eps"},
        is_gated=False,
        norm=_NORM,
        frame=_FRAME,
        stored=_stored(prefix),
        defaults={"hidden_act": "gelu", "tie_word_embeddings": True, "type_vocab_size": 2},
    )


_BERT = _bert("bert.")
_ROBERTA = _bert("roberta.", positions_follow_padding=True)
_DISTILBERT = Family(
    qkv_bias=True,
    output_bias=True,
    mlp_bias=True,
    rotated_layers="none",
    has_learned_positions=True,
    is_encoder=True,
    has_last_norm=False,
    field_names={
        "hidden_act": "activation", "hidden_size": "dim", "intermediate_size": "hidden_dim",
        "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers",
    },
    is_gated=False,
    norm=_NORM,
    frame=_FRAME,
    stored=StoredLayout(
        prefix="distilbert.",
        layers="transformer.layer",
        outside=_OUTSIDE,
        in_layer={
            "attention.q_lin": "self_attn.q_proj", "attention.k_lin": "self_attn.k_proj",
            "attention.v_lin": "self_attn.v_proj", "attention.out_lin": "self_attn.o_proj",
            "sa_layer_norm": "post_attention_layernorm", "ffn.lin1": "mlp.up_proj", "ffn.lin2": "mlp.down_proj",
            "output_layer_norm": "post_feedforward_layernorm",
        },
        unneeded=(".position_ids",),
        unneeded_parts=("vocab_transform.", "vocab_layer_norm.", "vocab_projector.", "pre_classifier.", "classifier."),
    ),
    defaults={"hidden_act": "gelu", "tie_word_embeddings": True},
)  # fmt: skip
_MPNET = replace(
    _bert("mpnet.", positions_follow_padding=True),
    has_distances=True,
    knows=frozenset({"relative_attention_num_buckets"}),
    stored=StoredLayout(
        prefix="mpnet.",
        layers="encoder.layer",
        outside={
            "embeddings.word_embeddings": "model.embed_tokens",
            "embeddings.position_embeddings": "model.embed_positions",
            "embeddings.LayerNorm": "model.embed_norm", "encoder.relative_attention_bias": "model.distances",
        },
        in_layer={
            "attention.attn.q": "self_attn.q_proj", "attention.attn.k": "self_attn.k_proj",
            "attention.attn.v": "self_attn.v_proj", "attention.attn.o": "self_attn.o_proj",
            "attention.LayerNorm": "post_attention_layernorm", "intermediate.dense": "mlp.up_proj",
            "output.dense": "mlp.down_proj", "output.LayerNorm": "post_feedforward_layernorm",
        },
        unneeded=(".position_ids",),
        unneeded_parts=("pooler.", "lm_head."),
    ),
    defaults={"hidden_act": "gelu", "tie_word_embeddings": True},
)  # fmt: skip
_NOMIC = Family(
    mlp_bias=None,
    bias_fields=("qkv_proj_bias", "qkv_proj_bias", "mlp_fc1_bias"),
    theta=1e3,
    is_encoder=True,
    has_last_norm=False,
    field_names={
        "hidden_act": "activation_function", "hidden_size": "n_embd", "intermediate_size": "n_inner",
        "layer_norm_eps": "layer_norm_epsilon", "max_position_embeddings": "max_trained_positions",
        "num_attention_heads": "n_head", "num_hidden_layers": "n_layer", "rms_norm_eps": "layer_norm_eps",
        "rope_theta": "rotary_emb_base",
    },
    ignores=frozenset({"activation_function", "n_positions"}),
    knows=frozenset({"rotary_scaling_factor"}),  # beyond the positions of the training, which are refused
    activations={"swiglu": "silu"},
    norm=_NORM,
    frame=_FRAME,
    stored=StoredLayout(
        layers="encoder.layers",
        outside={
            "embeddings.word_embeddings": "model.embed_tokens", "embeddings.token_type_embeddings": "model.embed_types",
            "emb_ln": "model.embed_norm",
        },
        in_layer={
            "attn.out_proj": "self_attn.o_proj", "mlp.fc11": "mlp.up_proj", "mlp.fc12": "mlp.gate_proj",
            "mlp.fc2": "mlp.down_proj", "norm1": "post_attention_layernorm", "norm2": "post_feedforward_layernorm",
        },
        fused={"attn.Wqkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")},
    ),
    defaults={
        "hidden_act": "silu", "max_position_embeddings": 2048, "tie_word_embeddings": True, "type_vocab_size": 2,
    },
)  # fmt: skip
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "BertForMaskedLM": _BERT,
        "BertForSequenceClassification": replace(_BERT, has_typed_tokens=True),
        "BertModel": _BERT,
        "DistilBertForMaskedLM": _DISTILBERT,
        "DistilBertForSequenceClassification": _DISTILBERT,
        "DistilBertModel": _DISTILBERT,
        "MPNetForMaskedLM": _MPNET,
        "MPNetModel": _MPNET,
        "NomicBertModel": _NOMIC,
        "RobertaForMaskedLM": _ROBERTA,
        "RobertaForSequenceClassification": _ROBERTA,
        "RobertaModel": _ROBERTA,
        "XLMRobertaForMaskedLM": _ROBERTA,
        "XLMRobertaForSequenceClassification": _ROBERTA,
        "XLMRobertaModel": _ROBERTA,
    }
)
