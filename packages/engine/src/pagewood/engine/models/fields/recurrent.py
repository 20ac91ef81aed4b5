"""The fields of recurrent layers."""

from __future__ import annotations

from dataclasses import replace

from pagewood.engine.json_fields import Fields
from pagewood.engine.models.families.family import Family
from pagewood.engine.models.fields.agreement import must_be
from pagewood.engine.models.fields.multipliers import read_multiplier, read_multipliers
from pagewood.engine.models.limits import LARGEST, read_size
from pagewood.engine.models.parts.attention import AttentionConfig
from pagewood.engine.models.parts.channel_delta import ChannelDeltaConfig
from pagewood.engine.models.parts.choice import Recurrent
from pagewood.engine.models.parts.gated_delta import GatedDeltaConfig
from pagewood.engine.models.parts.mixers_beside import MixersBesideConfig
from pagewood.engine.models.parts.norm import NormConfig
from pagewood.engine.models.parts.short_convolution import ShortConvolutionConfig
from pagewood.engine.models.parts.state_space import StateSpaceConfig

_MOST_DIM = LARGEST["head_dim"]
_OF_CHANNELS = frozenset({"full_attn_layers", "kda_layers", "head_dim", "num_heads", "short_conv_kernel_size"})
"""Fields of `linear_attn_config`."""
_NUM_MULTIPLIERS = 5


def read_recurrent(fields: Fields, family: Family, *, hidden_size: int, norm: NormConfig) -> Recurrent:
    """Return what recurrent layers have.

    Args:
        fields: of config.json, with the defaults of the family.
        family: the fixed properties of the architecture, one with recurrent layers.
        hidden_size: of the model.
        norm: the numbers of the norms of layers.

    Raises:
        ValueError: see `read_layers`.
    """
    if family.recurrence == "convolution":
        return ShortConvolutionConfig(
            size=hidden_size,
            width=fields.integer("conv_L_cache", 3, low=2, high=16),
            has_bias=fields.flag("conv_bias", False),
        )
    must_be(fields, "hidden_act" if family.is_gated else "mamba_hidden_act", "silu", "swish")  # of convolutions
    own = NormConfig(epsilon=family.recurrent_epsilon or norm.epsilon)
    match family.recurrence:
        case "delta":
            return _read_delta(fields, family, own, hidden_size)
        case "channels":
            return _read_channels(fields, own)
        case _:
            return _read_space(fields, family, own, hidden_size)


def beside(fields: Fields, attention: AttentionConfig, recurrent: Recurrent) -> MixersBesideConfig:
    """Return two mixers beside each other.

    Raises:
        ValueError: a multiplier is no number, or out of its range.
    """
    assert isinstance(recurrent, StateSpaceConfig)
    return MixersBesideConfig(
        attention=attention,
        recurrent=recurrent,
        attention_input=read_multiplier(fields, "attention_in_multiplier"),
        attention_output=read_multiplier(fields, "attention_out_multiplier"),
        recurrent_input=read_multiplier(fields, "ssm_in_multiplier"),
        recurrent_output=read_multiplier(fields, "ssm_out_multiplier"),
    )


def _read_delta(fields: Fields, family: Family, norm: NormConfig, hidden_size: int) -> GatedDeltaConfig:
    num_key_heads, num_heads, key_dim, value_dim = 16, 32, 128, 128
    if family.delta_projections == "apart":
        num_key_heads = num_heads = read_size(fields, "num_attention_heads", "num_heads")
    num_key_heads = read_size(fields, "linear_num_key_heads", "num_heads", num_key_heads)
    if family.delta_projections == "apart":
        key_dim = max(1, 3 * hidden_size // (4 * num_key_heads))
    key_dim = read_size(fields, "linear_key_head_dim", "head_dim", key_dim)
    if family.delta_projections == "apart":
        value_dim = 2 * key_dim
    return GatedDeltaConfig(
        num_heads=read_size(fields, "linear_num_value_heads", "num_heads", num_heads),
        num_key_heads=num_key_heads,
        key_dim=key_dim,
        value_dim=read_size(fields, "linear_value_head_dim", "head_dim", value_dim),
        width=fields.integer("linear_conv_kernel_dim", 4, low=2, high=16),
        norm=norm,
        projections=family.delta_projections,
        most_strength=2 if family.delta_projections == "apart" and fields.flag("linear_allow_neg_eigval", True) else 1,
    )


def _read_channels(fields: Fields, norm: NormConfig) -> ChannelDeltaConfig:
    inner = fields.section("linear_attn_config") or fields.empty("linear_attn_config")
    unknown = sorted(inner.values.keys() - _OF_CHANNELS)
    if unknown:
        raise ValueError(
            f"{inner.source} must have no fields but {', '.join(sorted(_OF_CHANNELS))}, got {unknown[0][:80]!r}"
        )
    return ChannelDeltaConfig(
        num_heads=read_size(inner, "num_heads", "num_heads", read_size(fields, "linear_num_heads", "num_heads", 32)),
        head_dim=read_size(inner, "head_dim", "head_dim", read_size(fields, "linear_head_dim", "head_dim", 128)),
        width=inner.integer(
            "short_conv_kernel_size", fields.integer("linear_conv_kernel_dim", 4, low=2, high=16), low=2, high=16
        ),
        norm=norm,
    )


def _read_space(fields: Fields, family: Family, norm: NormConfig, hidden_size: int) -> StateSpaceConfig:
    num_heads = read_size(fields, "mamba_n_heads", "num_heads", 128)
    size, what = fields.integer("mamba_expand", 2, low=1, high=64) * hidden_size, "mamba_expand times hidden_size"
    if family.sizes_by_heads:
        size = num_heads * fields.integer("mamba_d_head", low=1, high=_MOST_DIM)
    elif fields.values.get("mamba_d_ssm") is not None:
        size, what = fields.integer("mamba_d_ssm", low=1, high=64 * LARGEST["hidden_size"]), "mamba_d_ssm"
    if size % num_heads:
        raise ValueError(f"{fields.source}: mamba_n_heads must divide {what}, {size}, got {num_heads}")
    if fields.values.get("mamba_d_head") not in (None, "auto"):
        head_dim = fields.integer("mamba_d_head", low=1, high=_MOST_DIM)
        if head_dim * num_heads != size:
            raise ValueError(
                f"{fields.source}: mamba_d_head times mamba_n_heads {num_heads} must be {what} {size}, got {head_dim}"
            )
    must_be(fields, "time_step_limit", [0.0, float("inf")], [0.0, {"__float__": "Infinity"}])
    has_bias = fields.flag("mamba_proj_bias", False)
    own = StateSpaceConfig(
        num_heads=num_heads,
        num_groups=fields.integer("mamba_n_groups", 1, low=1, high=LARGEST["num_heads"]),
        state_dim=fields.integer("mamba_d_state", 256, low=1, high=_MOST_DIM),
        head_dim=size // num_heads,
        width=fields.integer("mamba_d_conv", 4, low=2, high=16),
        norm=norm,
        has_conv_bias=fields.flag("mamba_conv_bias", True),
        has_bias=has_bias,
        has_output_bias=has_bias,
    )
    return _beside_attention(fields, own) if family.has_mixers_beside else own


def _beside_attention(fields: Fields, own: StateSpaceConfig) -> StateSpaceConfig:
    """Return a state space that may have no norm, and multipliers."""
    must_be(fields, "mamba_use_mlp", True)
    gate, values, keys, queries, decays = read_multipliers(fields, "ssm_multipliers", _NUM_MULTIPLIERS)
    return replace(
        own,
        norm=own.norm if fields.flag("mamba_rms_norm", False) else None,
        norms_first=fields.flag("mamba_norm_before_gate", True),
        has_output_bias=fields.flag("projectors_bias", False),
        multipliers=(gate, values, keys, queries, decays),
    )
