"""GGUF files of Gemma 4, whose kinds of layers have heads, ropes and feed-forwards of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from pagewood.engine.weights.gguf.architecture import Architecture, Config
from pagewood.engine.weights.gguf.keys import Keys, some_windows
from pagewood.engine.weights.gguf.rope import FACTORS

_LARGEST_CAP = 1e6
_NOT_ROTATED = 1e20
"""Factors of elements that are not rotated are at least as large."""
_MODULES = {
    "ffn_norm": "pre_feedforward_layernorm",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "ffn_gate_exps": "experts.{}.gate_proj",
    "ffn_up_exps": "experts.{}.up_proj",
    "ffn_down_exps": "experts.{}.down_proj",
    "layer_output_scale": "layer_scalar",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}


def _gemma4(keys: Keys, config: Config) -> dict[str, Any]:
    num_layers = config["num_hidden_layers"]
    windows = some_windows(keys, num_layers, period=6)
    heads = keys.sizes("attention.head_count_kv", num_layers)
    large, small = config["head_dim"], keys.size("attention.key_length_swa")
    for key in ("attention.value_length_swa", "rope.dimension_count_swa"):
        if (size := keys.size(key, small)) != small:
            raise ValueError(f"{keys.source}: {keys.name}.{key} must be {small}, the size of a head, got {size}")
    num_shared = keys.integer("attention.shared_kv_layers", 0, high=num_layers - 1)
    kinds = windows["layer_types"]
    own = {
        str(layer): {
            "head_dim": large if kinds[layer] == "full_attention" else small,
            "num_key_value_heads": heads[layer],
        }
        for layer in range(num_layers)
    }
    return {
        **windows,
        **_experts(keys),
        "head_dim": small,
        "global_head_dim": large,
        "per_layer_config": own,
        "num_kv_shared_layers": num_shared,
        "attention_k_eq_v": _has_keys_for_values(keys, kinds[: num_layers - num_shared]),
        "use_double_wide_mlp": _is_wide(keys, keys.sizes("feed_forward_length", num_layers), num_shared),
        "hidden_size_per_layer_input": keys.integer("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": config["vocab_size"],
        "final_logit_softcapping": keys.number("final_logit_softcapping", 0.0, low=0, high=_LARGEST_CAP) or None,
        "hidden_act": "gelu_pytorch_tanh",
        "rope_theta": None,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": _share(keys, large),
                "rope_theta": config["rope_theta"],
            },
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": keys.number("rope.freq_base_swa", 1e4, low=2, high=1e12),
            },
        },
    }


def _share(keys: Keys, head_dim: int) -> float:
    """Return the share of a head that is rotated, of which the tensor of factors tells."""
    factors = keys.vector(FACTORS)
    num_rotated = sum(one == 1 for one in factors)
    others = factors[num_rotated:]
    if len(factors) != head_dim // 2 or not num_rotated or any(one < _NOT_ROTATED for one in others):
        raise ValueError(
            f"{keys.source}: {FACTORS} must have {head_dim // 2} numbers, 1 and then at least {_NOT_ROTATED:g}, "
            f"got {factors!r:.80}"
        )
    return num_rotated / len(factors)


def _has_keys_for_values(keys: Keys, kinds: Sequence[str]) -> bool:
    """Return whether layers that see all positions have no values of their own, all or none of them."""
    full = [layer for layer, kind in enumerate(kinds) if kind == "full_attention"]
    lacking = [layer for layer in full if not keys.has_tensor(f"blk.{layer}.attn_v.weight")]
    if lacking and lacking != full:
        raise ValueError(f"{keys.source} lacks the tensor blk.{lacking[0]}.attn_v.weight, which other layers have")
    return bool(lacking)


def _is_wide(keys: Keys, sizes: Sequence[int], num_shared: int) -> bool:
    """Return whether layers without keys of their own have feed-forwards of twice the size."""
    for is_wide in (False, True):
        num_own = len(sizes) - num_shared
        if list(sizes) == [sizes[0]] * num_own + [sizes[0] * (1 + is_wide)] * num_shared:
            return is_wide
    raise ValueError(
        f"{keys.source}: {keys.name}.feed_forward_length must be one number, or twice it in the last {num_shared} "
        f"layers, got {sizes!r:.80}"
    )


def _experts(keys: Keys) -> dict[str, Any]:
    count = keys.integer("expert_count", 0, high=1 << 16)
    if not count:
        return {"enable_moe_block": False}
    return {
        "enable_moe_block": True,
        "num_experts": count,
        "top_k_experts": keys.integer("expert_used_count", low=1, high=1 << 16),
        "moe_intermediate_size": keys.size("expert_feed_forward_length"),
    }


GEMMA4: Mapping[str, Architecture] = MappingProxyType(
    {
        "gemma4": Architecture(
            family="Gemma4ForCausalLM",
            model_type="gemma4_text",
            others=(
                "Gemma4ForConditionalGeneration",
                "Gemma4UnifiedForCausalLM",
                "Gemma4UnifiedForConditionalGeneration",
            ),
            more=_gemma4,
            has_own_kinds=True,
            modules=_MODULES,
        ),
    }
)
"""By `general.architecture`."""
