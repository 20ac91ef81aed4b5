"""Checks that fields of a config.json do not contradict each other, or the model that is computed here.

Two fields with different values for one number are an error, and so is a field for a feature that no supported
architecture has: the loaded model would differ from its file.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

from pagewood.engine.json_fields import Fields, check_same, shown

_OTHER_NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "hidden_act": ("hidden_activation", "activation_function"),
        "hidden_size": ("n_embd", "d_model"),
        "intermediate_size": ("ffn_hidden_size", "n_inner"),
        "max_position_embeddings": ("n_positions",),
        "num_attention_heads": ("num_heads", "n_head"),
        "num_hidden_layers": ("num_layers", "n_layer"),
        "num_key_value_heads": ("num_kv_heads", "n_head_kv"),
        "rms_norm_eps": ("norm_eps", "layer_norm_eps", "layer_norm_epsilon"),
    }
)
"""Other families' names of a field that is read. They may repeat the field, but do not replace it."""
NUM_MTP_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
"""Names of the number of layers for multi-token prediction; each of them is read."""
_NONE: Mapping[str, object] = MappingProxyType({})
_SYNONYMS = (NUM_MTP_LAYERS, ("dtype", "torch_dtype"))
_NEUTRAL: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "add_cross_attention": (False,),
        "alibi": (False,),
        "attention_chunk_size": (),
        "attention_k_eq_v": (False,),
        "attention_multiplier": (),
        "attn_logit_softcapping": (0,),
        "attn_temperature_tuning": (False,),
        "causal": (False,),
        "clip_qkv": (),
        "embedding_multiplier": (1,),
        "enable_moe_block": (False,),
        "final_logit_softcapping": (0,),
        "hidden_size_per_layer_input": (0,),
        "is_encoder_decoder": (False,),
        "logit_scale": (1,),
        "logits_scaling": (1,),
        "n_routed_experts": (0,),
        "no_rope_layers": ([],),
        "norm_bias": (False,),
        "num_experts": (0,),
        "num_kv_shared_layers": (0,),
        "num_local_experts": (0, 1),
        "parallel_block": (False,),
        "per_layer_config": ({},),
        "position_embedding_type": ("absolute",),
        "prenorm": (False,),
        "query_pre_attn_scalar": (),
        "residual_multiplier": (1,),
        "rope_interleave": (False,),
        "rotary_emb_fraction": (1,),
        "rotary_emb_interleaved": (False,),
        "rotary_emb_scale_base": (),
        "rotary_scaling_factor": (),
        "scale_attn_by_inverse_layer_idx": (False,),
        "scale_attn_weights": (True,),
        "scale_emb": (1,),
        "use_bidirectional_attention": (False,),
        "use_double_wide_mlp": (False,),
        "use_parallel_residual": (False,),
        "use_qk_norm": (False,),
    }
)
"""Fields that change the computation of other models, each with its values, besides null, that change nothing."""


def check_fields(
    fields: Fields, *, read: Collection[str] = (), ignored: Collection[str] = (), usual: Mapping[str, object] = _NONE
) -> None:
    """Check the fields of a config.json that all families read in the same way.

    Args:
        fields: of config.json.
        read: fields that the family reads itself.
        ignored: other names of fields that the family does not know as such.
        usual: values of absent fields; with such a value, another family's name may stand alone.

    Raises:
        ValueError: two fields have different values, a field has another family's name, or a field needs something that
            is not supported.
    """
    for name, all_others in _OTHER_NAMES.items():
        others = [other for other in all_others if other not in ignored]
        own = [name, *(other for other in others if other in read)]
        is_named = any(fields.values.get(each) is not None for each in own)
        for other in others:
            if other not in own and not is_named and fields.values.get(other) not in (None, usual.get(name)):
                raise ValueError(f"{fields.source}: {other} must be named {name}, got {other} alone")
        check_same(fields.source, [(each, fields.values.get(each)) for each in (name, *others)])
    for names in _SYNONYMS:
        check_same(fields.source, [(name, fields.values.get(name)) for name in names])
    for name, harmless in _NEUTRAL.items():
        if name not in read:
            must_be(fields, name, *harmless)


def must_be(fields: Fields, name: str, *harmless: object) -> None:
    """Check that a field is absent, null or one of `harmless`.

    Raises:
        ValueError: it is not.
    """
    value = fields.values.get(name)
    if value is not None and value not in harmless:
        allowed = " or ".join(("null", *map(shown, harmless)))
        raise ValueError(f"{fields.source}: {name} must be absent or {allowed}, got {shown(value)}")


def read_bias(fields: Fields, name: str, fixed: bool | None) -> bool:
    """Return whether a part has a bias: the flag `name` if `fixed` is None, otherwise `fixed`.

    Raises:
        ValueError: the flag contradicts `fixed`.
    """
    if fixed is None:
        return fields.flag(name, False)
    must_be(fields, name, fixed)
    return fixed
