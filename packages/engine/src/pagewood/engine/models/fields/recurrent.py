"""The fields of recurrent layers."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pagewood.engine.json_fields import Fields, shown
from pagewood.engine.models.families.family import Family
from pagewood.engine.models.fields.agreement import must_be
from pagewood.engine.models.limits import LARGEST, read_size
from pagewood.engine.models.parts.choice import Recurrent
from pagewood.engine.models.parts.gated_delta import GatedDeltaConfig
from pagewood.engine.models.parts.norm import NormConfig
from pagewood.engine.models.parts.short_convolution import ShortConvolutionConfig
from pagewood.engine.models.parts.state_space import StateSpaceConfig

_KINDS: Mapping[str, bool] = MappingProxyType(
    {"linear_attention": True, "mamba": True, "conv": True, "full_attention": False, "attention": False}
)
"""Whether a kind of layer that `layer_types` names is recurrent; files have the names of two ages."""
_INTERVAL = 4
"""Each n-th layer has attention if neither `layer_types` nor `full_attention_interval` says which."""
_MOST_DIM = LARGEST["head_dim"]


def read_recurrent_layers(fields: Fields, family: Family, num_layers: int) -> tuple[bool, ...]:
    """Return which layers are recurrent.

    Raises:
        ValueError: a field is of another type or out of its range, or contradicts another one.
    """
    if family.recurrence == "none":
        return (False,) * num_layers
    kinds = fields.texts("layer_types") or fields.texts("layers_block_type")
    if kinds is not None:
        unknown = sorted(set(kinds) - _KINDS.keys())
        if unknown or len(kinds) != num_layers:
            raise ValueError(
                f"{fields.source}: layer_types must name one of {', '.join(_KINDS)} for each of {num_layers} layers, "
                f"got {shown(unknown or len(kinds))}"
            )
        return tuple(_KINDS[kind] for kind in kinds)
    if family.recurrence == "convolution":
        places = fields.integers("full_attn_idxs", high=num_layers - 1)
        return tuple(layer not in places for layer in range(num_layers))
    if family.recurrence == "space":
        return (True,) * num_layers
    interval = fields.integer("full_attention_interval", _INTERVAL, low=1, high=1 << 20)
    return tuple((layer + 1) % interval != 0 for layer in range(num_layers))


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
    own = NormConfig(epsilon=norm.epsilon)
    if family.recurrence == "convolution":
        return ShortConvolutionConfig(
            size=hidden_size,
            width=fields.integer("conv_L_cache", 3, low=2, high=16),
            has_bias=fields.flag("conv_bias", False),
        )
    if family.recurrence == "delta":
        return GatedDeltaConfig(
            num_heads=read_size(fields, "linear_num_value_heads", "num_heads", 32),
            num_key_heads=read_size(fields, "linear_num_key_heads", "num_heads", 16),
            key_dim=read_size(fields, "linear_key_head_dim", "head_dim", 128),
            value_dim=read_size(fields, "linear_value_head_dim", "head_dim", 128),
            width=fields.integer("linear_conv_kernel_dim", 4, low=2, high=16),
            norm=own,
            is_fused=family.recurrent_is_fused,
        )
    num_heads = read_size(fields, "mamba_n_heads", "num_heads", 128)
    size = fields.integer("mamba_expand", 2, low=1, high=64) * hidden_size
    if size % num_heads:
        raise ValueError(
            f"{fields.source}: mamba_n_heads must divide mamba_expand times hidden_size, {size}, got {num_heads}"
        )
    if fields.values.get("mamba_d_head") not in (None, "auto"):
        head_dim = fields.integer("mamba_d_head", low=1, high=_MOST_DIM)
        if head_dim * num_heads != size:
            raise ValueError(
                f"{fields.source}: mamba_d_head times mamba_n_heads {num_heads} must be mamba_expand times hidden_size "
                f"{size}, got {head_dim}"
            )
    must_be(fields, "time_step_limit", [0.0, float("inf")], [0.0, {"__float__": "Infinity"}])
    return StateSpaceConfig(
        num_heads=num_heads,
        num_groups=fields.integer("mamba_n_groups", 1, low=1, high=LARGEST["num_heads"]),
        state_dim=fields.integer("mamba_d_state", 256, low=1, high=_MOST_DIM),
        head_dim=size // num_heads,
        width=fields.integer("mamba_d_conv", 4, low=2, high=16),
        norm=own,
        has_conv_bias=fields.flag("mamba_conv_bias", True),
        has_bias=fields.flag("mamba_proj_bias", False),
    )
