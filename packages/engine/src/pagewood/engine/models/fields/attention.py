"""The fields of attentions."""

from __future__ import annotations

from collections.abc import Sequence

from pagewood.engine.json_fields import Fields
from pagewood.engine.models.families.family import Family
from pagewood.engine.models.fields.agreement import must_be, read_bias
from pagewood.engine.models.fields.multipliers import read_cap, read_multiplier
from pagewood.engine.models.fields.rope import local_ropes, read_rope, read_temperature
from pagewood.engine.models.fields.rotated import read_rotated
from pagewood.engine.models.limits import read_size
from pagewood.engine.models.parts.attention import AttentionConfig
from pagewood.engine.models.parts.distances import NUM_BUCKETS
from pagewood.engine.models.parts.norm import NormConfig


def read_attention(
    fields: Fields, family: Family, windows: Sequence[int | None], *, hidden_size: int, norm: NormConfig
) -> tuple[AttentionConfig, ...]:
    """Return the attention of each layer.

    Args:
        fields: of config.json, with the defaults of the family.
        family: the fixed properties of the architecture.
        windows: of each layer.
        hidden_size: of the model.
        norm: the numbers of norms of q and k.

    Raises:
        ValueError: see `read_layers`.
    """
    if family.is_encoder:
        must_be(fields, "is_decoder", False)
        must_be(fields, "use_bidirectional_attention", True)
    if family.has_distances:
        must_be(fields, "relative_attention_num_buckets", NUM_BUCKETS)
        must_be(fields, "pad_token_id", 1)  # before the first position, whatever the file says
    num_heads = read_size(fields, "num_attention_heads", "num_heads")
    head_dim = read_size(fields, "head_dim", "head_dim", _even_share(fields, hidden_size, num_heads))
    views = local_ropes(fields, family) if family.has_local_rope else (fields, fields)
    ropes = [read_rope(view, family, head_dim=head_dim) for view in views]
    num_kv_heads = read_size(fields, "num_key_value_heads", "num_kv_heads", num_heads)
    qkv_bias = read_bias(fields, family.bias_fields[0], family.qkv_bias)
    output_bias = fields.flag(family.bias_fields[1], False) if family.output_bias is None else family.output_bias
    qk_norm = norm if family.qk_norm != "none" and _has_qk_norm(fields, family) else None
    scalar = head_dim if family.scale_field is None else fields.number(family.scale_field, low=1e-3, high=1e6)
    scale = read_multiplier(fields, "attention_multiplier", scalar**-0.5)
    if family.has_mixers_beside:
        scale *= read_multiplier(fields, "key_multiplier")
    return tuple(
        AttentionConfig(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rope=ropes[window is not None] if is_rotated else None,
            scale=scale,
            soft_cap=read_cap(fields, "attn_logit_softcapping"),
            window=None if family.is_encoder else window,
            is_chunked=family.windows == "chunks" and window is not None,
            qkv_bias=qkv_bias,
            output_bias=output_bias,
            qkv_is_fused=family.qkv_is_fused,
            has_neighbours=family.has_neighbours,
            temperature=read_temperature(fields, family, is_rotated=is_rotated),
            qk_norm=None if family.qk_norm == "plain" and not is_rotated else qk_norm,
            qk_norm_names=family.qk_norm_names,
            qk_norm_is_whole=family.qk_norm == "whole" and qk_norm is not None,
            qk_norm_follows=family.qk_norm_follows,
            qk_norm_is_plain=family.qk_norm == "plain",
            sinks=family.has_sinks,
            has_output_gate=family.has_output_gate,
            sees_later=family.is_encoder,
            has_distances=family.has_distances,
            reach=window if family.is_encoder else None,
        )
        for window, is_rotated in zip(windows, read_rotated(fields, family, windows), strict=True)
    )


def _has_qk_norm(fields: Fields, family: Family) -> bool:
    """Return whether queries and keys are normed; a family whose every model has norms has a flag that says so."""
    if family.qk_norm_flag is not None:
        return fields.flag(family.qk_norm_flag, False)
    if family.qk_norm != "none":
        must_be(fields, "use_qk_norm", True)
    return True


def _even_share(fields: Fields, hidden_size: int, num_heads: int) -> int | None:
    """Return the size of a head if no field names it; None if it would not be a whole number.

    Raises:
        ValueError: no field names it, and it cannot be derived.
    """
    if hidden_size % num_heads and fields.values.get("head_dim") is None:
        raise ValueError(
            f"{fields.source}: hidden_size must be a multiple of num_attention_heads {num_heads} where head_dim is "
            f"absent, got {hidden_size}"
        )
    return hidden_size // num_heads or None
