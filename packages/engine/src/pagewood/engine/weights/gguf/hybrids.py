"""The architectures of GGUF files with recurrent layers: what their keys and tensors mean in Hugging Face's decoders.

The converter stores -exp(A_log) for rates of decay, filters without their axis of length 1, and, of Qwen 3.5, the heads
of values in turn: the first of each head of keys, then the second of each.

Legend: H heads of values `[V]`, G heads of keys `[K]`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import numpy as np

from pagewood.engine.weights.gguf.architecture import Architecture, Config, Modules, Order, Piece
from pagewood.engine.weights.gguf.dense import granite_factors, qwen_vl
from pagewood.engine.weights.gguf.keys import Keys
from pagewood.engine.weights.gguf.mixtures import (
    GRANITE_MOE,
    LATENTS,
    SHARED_EXPERTS,
    experts,
    latents,
    must_be_sigmoid,
    of_shared_experts,
)

_FLAT, _FILTERS = (-1,), (-1, 1, 0)
_SHAPES = {
    "ssm_a": _FLAT, "ssm_d": _FLAT, "ssm_norm": _FLAT, "ssm_conv1d": _FILTERS, "shortconv.conv": _FILTERS,
    **{f"ssm_conv1d_{kind}": _FILTERS for kind in "qkv"},
}  # fmt: skip
_RECURRENT, _ATTENTION = "linear_attention", "full_attention"
_OTHER_PREDICTION = {name: f"mtp.layers.0.{name}" for name in SHARED_EXPERTS if name.startswith("nextn.")}
"""Names that no head has: these modules are not read."""
_PREDICTION = {
    **_OTHER_PREDICTION, "nextn.eh_proj": "mtp.fc", "nextn.enorm": "mtp.pre_fc_norm_embedding",
    "nextn.hnorm": "mtp.pre_fc_norm_hidden", "nextn.shared_head_norm": "mtp.norm",
}  # fmt: skip


def _space(name: str) -> dict[str, str]:
    """Return the modules of a state space that is called `name` in a layer."""
    return {
        "ssm_in": f"{name}.in_proj", "ssm_conv1d": f"{name}.conv1d", "ssm_dt": f"{name}.dt_bias",
        "ssm_a": f"{name}.A_log", "ssm_d": f"{name}.D", "ssm_norm": f"{name}.norm", "ssm_out": f"{name}.out_proj",
    }  # fmt: skip


_LIQUID = {f"shortconv.{name}": f"conv.{name}" for name in ("conv", "in_proj", "out_proj")}
_IN_FEED_FORWARD = {f"ffn_{kind}": f"feed_forward.{kind}_proj" for kind in ("gate", "up", "down")}
_LIQUID_EXPERTS = {
    **_LIQUID, **_IN_FEED_FORWARD, "exp_probs_b": "feed_forward.expert_bias", "ffn_gate_inp": "feed_forward.gate",
    "ffn_gate_exps": "feed_forward.experts.{}.w1", "ffn_up_exps": "feed_forward.experts.{}.w3",
    "ffn_down_exps": "feed_forward.experts.{}.w2",
}  # fmt: skip
_CHANNELS = {
    **{name: module for name, module in SHARED_EXPERTS.items() if not name.startswith("nextn.")}, **LATENTS,
    "ffn_gate_exps": "mlp.experts.{}.w1", "ffn_up_exps": "mlp.experts.{}.w3", "ffn_down_exps": "mlp.experts.{}.w2",
    "ssm_a": "self_attn.A_log", "ssm_dt": "self_attn.dt_bias", "ssm_beta": "self_attn.b_proj",
    "ssm_f_a": "self_attn.f_a_proj", "ssm_f_b": "self_attn.f_b_proj", "ssm_g_a": "self_attn.g_a_proj",
    "ssm_g_b": "self_attn.g_b_proj", "ssm_norm": "self_attn.o_norm",
    **{f"ssm_conv1d_{kind}": f"self_attn.{kind}_conv1d" for kind in "qkv"},
}  # fmt: skip
_SINGLE = {
    **_space("mixer"), "attn_norm": "norm", "attn_q": "mixer.q_proj", "attn_k": "mixer.k_proj",
    "attn_v": "mixer.v_proj", "attn_output": "mixer.o_proj", "ffn_up": "mixer.up_proj", "ffn_down": "mixer.down_proj",
}  # fmt: skip
_SINGLE_EXPERTS = {
    **_SINGLE, "ffn_gate_inp": "mixer.gate", "exp_probs_b": "mixer.gate.e_score_correction_bias",
    "ffn_up_exps": "mixer.experts.{}.up_proj", "ffn_down_exps": "mixer.experts.{}.down_proj",
    "ffn_up_shexp": "mixer.shared_experts.up_proj", "ffn_down_shexp": "mixer.shared_experts.down_proj",
    "ffn_latent_down": "mixer.fc1_latent_proj", "ffn_latent_up": "mixer.fc2_latent_proj",
}  # fmt: skip


def _decoder_layers(keys: Keys, config: Config) -> dict[str, Any]:
    """Return the number of layers of the decoder, behind which others may be for multi-token prediction."""
    num_layers = config["num_hidden_layers"]
    num_extra = keys.integer("nextn_predict_layers", 0, high=num_layers - 1)
    return {"num_hidden_layers": num_layers - num_extra, "mtp_num_hidden_layers": num_extra}


def _kinds(keys: Keys, num_layers: int) -> list[str]:
    """Return the kind of each layer: those with heads of keys have attention."""
    keys.only_size("attention.head_count")
    keys.only_size("attention.head_count_kv")
    have_heads = keys.are_set("attention.head_count_kv", num_layers)
    return [_ATTENTION if has_heads else _RECURRENT for has_heads in have_heads]


def _divided(keys: Keys, key: str, by: str) -> tuple[int, int]:
    """Return the number `by`, and how many of another number each has.

    Raises:
        ValueError: one does not divide the other.
    """
    whole, count = keys.size(key), keys.size(by)
    if whole % count:
        raise ValueError(f"{keys.source}: {keys.name}.{by} must divide {keys.name}.{key}, {whole}, got {count}")
    return count, whole // count


def _delta(keys: Keys, config: Config) -> dict[str, Any]:
    found = _decoder_layers(keys, config)
    keys.size("attention.head_count")
    keys.size("attention.head_count_kv")
    interval = keys.size("full_attention_interval", 4)
    num_heads, value_dim = _divided(keys, "ssm.inner_size", "ssm.time_step_rank")
    num_layers = found["num_hidden_layers"]
    if keys.size("ssm.group_count") > num_heads or num_heads % keys.size("ssm.group_count"):
        raise ValueError(
            f"{keys.source}: {keys.name}.ssm.group_count must divide {keys.name}.ssm.time_step_rank, {num_heads}, "
            f"got {keys.size('ssm.group_count')}"
        )
    return {
        **found,
        **qwen_vl(keys, config),
        "layer_types": [_RECURRENT if (layer + 1) % interval else _ATTENTION for layer in range(num_layers)],
        "linear_num_key_heads": keys.size("ssm.group_count"),
        "linear_num_value_heads": num_heads,
        "linear_key_head_dim": keys.size("ssm.state_size"),
        "linear_value_head_dim": value_dim,
        "linear_conv_kernel_dim": keys.size("ssm.conv_kernel"),
    }


def _qwen35(keys: Keys, config: Config) -> dict[str, Any]:
    keys.only_size("feed_forward_length")
    return _delta(keys, config)


def _delta_experts(keys: Keys, config: Config) -> dict[str, Any]:
    keys.integer("expert_shared_count", 0)  # the size says whether there are any
    return {
        **_delta(keys, config),
        **experts(keys, "num_experts", renormalises=True),
        "moe_intermediate_size": keys.size("expert_feed_forward_length"),
        "shared_expert_intermediate_size": keys.size("expert_shared_feed_forward_length"),
    }


def _delta_modules(config: Config, heads: Order) -> Modules:
    """Return the modules of a gated delta rule, whose heads of values are stored at `heads` `[H]`."""
    size: int = config["linear_value_head_dim"]
    num_keys: int = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = _rows(heads, size)
    mixed = np.concatenate([np.arange(num_keys), num_keys + values])
    return {
        "ssm_norm": "linear_attn.norm",
        "attn_qkv": (Piece("linear_attn.in_proj_qkv", mixed),),
        "attn_gate": (Piece("linear_attn.in_proj_z", values),),
        "ssm_conv1d": (Piece("linear_attn.conv1d", mixed),),
        "ssm_beta": (Piece("linear_attn.in_proj_b", heads),),
        "ssm_alpha": (Piece("linear_attn.in_proj_a", heads),),
        "ssm_a": (Piece("linear_attn.A_log", heads),),
        "ssm_dt": (Piece("linear_attn.dt_bias", heads),),
        "ssm_out": (Piece("linear_attn.out_proj", heads=heads),),
    }


def _in_turn(config: Config) -> Modules:
    """Return the modules of Qwen 3.5, of whose heads of values the first of each head of keys comes first."""
    groups: int = config["linear_num_key_heads"]
    shares: int = config["linear_num_value_heads"] // groups
    return _delta_modules(config, np.arange(shares * groups).reshape(shares, groups).T.reshape(-1))


def _by_key_head(config: Config) -> Modules:
    """Return the modules of Qwen 3 Next, which earlier converters left together for each head of keys."""
    groups: int = config["linear_num_key_heads"]
    num_heads: int = config["linear_num_value_heads"]
    key_dim: int = config["linear_key_head_dim"]
    shares = num_heads // groups
    of_values: int = shares * config["linear_value_head_dim"]
    queries, keys, values, gates = _kind_by_kind(groups, [key_dim, key_dim, of_values, of_values])
    strengths, decays = _kind_by_kind(groups, [shares, shares])
    return {
        **_delta_modules(config, np.arange(num_heads)),
        "ssm_ba": (Piece("linear_attn.in_proj_b", strengths), Piece("linear_attn.in_proj_a", decays)),
        "ssm_in": (
            Piece("linear_attn.in_proj_qkv", np.concatenate([queries, keys, values])),
            Piece("linear_attn.in_proj_z", gates),
        ),
    }


def _rows(units: Order, size: int) -> Order:
    """Return the rows of units of `size` rows."""
    return (units[:, None] * size + np.arange(size)).reshape(-1)


def _kind_by_kind(num_groups: int, sizes: Sequence[int]) -> list[Order]:
    """Return the rows of each kind, of groups that each have some rows of every kind."""
    starts = np.arange(num_groups)[:, None] * sum(sizes)
    ends = accumulate(sizes)
    return [(starts + np.arange(end - size, end)).reshape(-1) for size, end in zip(sizes, ends, strict=True)]


def _state_space(keys: Keys) -> dict[str, Any]:
    num_heads, head_dim = _divided(keys, "ssm.inner_size", "ssm.time_step_rank")
    return {
        "mamba_d_ssm": num_heads * head_dim,
        "mamba_n_heads": num_heads,
        "mamba_d_head": head_dim,
        "mamba_n_groups": keys.size("ssm.group_count"),
        "mamba_d_state": keys.size("ssm.state_size"),
        "mamba_d_conv": keys.size("ssm.conv_kernel"),
        "mamba_conv_bias": keys.has_in_layers("ssm_conv1d.bias"),
        "mamba_proj_bias": keys.has_in_layers("ssm_in.bias"),
    }


def _granite_hybrid(keys: Keys, config: Config) -> dict[str, Any]:
    """llama.cpp stores Bamba, which has a rope, as Granite 4, which has none and has factors.

    It rotates other pairs of Bamba's elements than its model does, of which a part is rotated.
    """
    kinds = _kinds(keys, config["num_hidden_layers"])
    found = {**_state_space(keys), "layer_types": kinds}
    if keys.flag("rope.scaling.finetuned", True):
        return {**found, "architectures": ["BambaForCausalLM"], "model_type": "bamba"}
    whole = keys.only_size("feed_forward_length")
    found |= {**granite_factors(keys, config), "position_embedding_type": "nope", "partial_rotary_factor": None}
    if not keys.integer("expert_count", 0):
        keys.integer("expert_shared_feed_forward_length", 0)  # the same size
        return {**found, "num_local_experts": 0, "shared_intermediate_size": whole, "gate_is_fused": False}
    chosen = experts(keys, "num_local_experts", renormalises=True)
    if not chosen.pop("norm_topk_prob"):
        raise ValueError(f"{keys.source}: {keys.name}.expert_weights_norm must be absent or true, got False")
    return {**found, **chosen, "shared_intermediate_size": keys.integer("expert_shared_feed_forward_length", 0)}


def _granite_modules(config: Config) -> Modules:
    if config["model_type"] != "bamba":
        return {}
    return {"ffn_norm": "pre_ff_layernorm", **_IN_FEED_FORWARD}


def _falcon_h1(keys: Keys, config: Config) -> dict[str, Any]:
    """Its multipliers are in its weights. llama.cpp gates results before their norm."""
    keys.size("attention.head_count")
    keys.size("feed_forward_length")
    return {
        **_state_space(keys),
        "mamba_rms_norm": keys.has_in_layers("ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        "projectors_bias": keys.has_in_layers("ssm_out.bias"),
    }


def _nemotron_h(keys: Keys, config: Config) -> dict[str, Any]:
    found = _decoder_layers(keys, config)
    num_layers = found["num_hidden_layers"]
    has_experts = keys.integer("expert_count", 0, high=1 << 16) > 0
    fed = keys.are_set("feed_forward_length", num_layers)
    of_feed_forward = "moe" if has_experts else "mlp"
    kinds = _kinds(keys, num_layers)
    if any(is_fed and kind == _ATTENTION for is_fed, kind in zip(fed, kinds, strict=True)):
        raise ValueError(
            f"{keys.source}: {keys.name}.feed_forward_length must be 0 in layers with attention, got {fed!r:.80}"
        )
    found |= {
        **_state_space(keys),
        "layer_types": [of_feed_forward if is_fed else kind for is_fed, kind in zip(fed, kinds, strict=True)],
        "partial_rotary_factor": None,
        "mlp_bias": keys.has_in_layers("ffn_up.bias") or keys.has_in_layers("ffn_up_shexp.bias"),
    }
    if not has_experts:
        return found
    must_be_sigmoid(keys)
    return {
        **found,
        **of_shared_experts(keys, config),
        "norm_topk_prob": keys.flag("expert_weights_norm", False),
        "moe_shared_expert_intermediate_size": keys.integer("expert_shared_feed_forward_length", 0),
        "moe_latent_size": keys.integer("moe_latent_size", 0) or None,
    }


def _mamba2(keys: Keys, config: Config) -> dict[str, Any]:
    """llama.cpp names no heads of attention; the sizes have Mamba's own names, where others mean attention."""
    found = _state_space(keys)
    names = {
        "num_heads": "mamba_n_heads", "head_dim": "mamba_d_head", "n_groups": "mamba_n_groups",
        "state_size": "mamba_d_state", "conv_kernel": "mamba_d_conv", "use_conv_bias": "mamba_conv_bias",
        "use_bias": "mamba_proj_bias",
    }  # fmt: skip
    return {name: found[own] for name, own in names.items()}


def _lfm2(keys: Keys, config: Config) -> dict[str, Any]:
    keys.only_size("feed_forward_length")
    return {
        "layer_types": _kinds(keys, config["num_hidden_layers"]),
        "conv_L_cache": keys.size("shortconv.l_cache"),
        "block_auto_adjust_ff_dim": False,
    }


def _lfm2_moe(keys: Keys, config: Config) -> dict[str, Any]:
    must_be_sigmoid(keys)
    return {
        **_lfm2(keys, config),
        **experts(keys, "num_experts", renormalises=True),
        "moe_intermediate_size": keys.size("expert_feed_forward_length"),
        "num_dense_layers": keys.integer("leading_dense_block_count", 0),
        "use_expert_bias": keys.has_in_layers("exp_probs_b.bias"),
        "routed_scaling_factor": keys.number("expert_weights_scale", 0.0, low=0, high=1e6) or 1.0,
    }


def _kimi_linear(keys: Keys, config: Config) -> dict[str, Any]:
    must_be_sigmoid(keys)
    heads = keys.only_size("attention.head_count")
    return {
        **of_shared_experts(keys, config, count="num_experts"),
        **latents(keys, config),
        "norm_topk_prob": keys.flag("expert_weights_norm", True),
        "layer_types": _kinds(keys, config["num_hidden_layers"]),
        "linear_num_heads": heads,
        "linear_head_dim": keys.size("kda.head_dim"),
        "linear_conv_kernel_dim": keys.size("ssm.conv_kernel"),
    }


_BASE = Architecture(family="", model_type="", has_recurrence=True, shapes=_SHAPES)


def _own(family: str, model_type: str, **fields: Any) -> Architecture:
    return replace(_BASE, family=family, model_type=model_type, **fields)


HYBRIDS: Mapping[str, Architecture] = MappingProxyType(
    {
        "qwen3next": _own(
            "Qwen3_5MoeForCausalLM",
            "qwen3_5_moe_text",
            others=("Qwen3NextForCausalLM",),
            more=_delta_experts,
            rotates_part=True,
            adds_one=True,
            modules_of=_by_key_head,
            prediction=_PREDICTION,
        ),
        "qwen35": _own(
            "Qwen3_5ForCausalLM",
            "qwen3_5_text",
            others=("Qwen3_5ForConditionalGeneration",),
            more=_qwen35,
            rotates_part=True,
            adds_one=True,
            modules_of=_in_turn,
            prediction=_PREDICTION,
        ),
        "qwen35moe": _own(
            "Qwen3_5MoeForCausalLM",
            "qwen3_5_moe_text",
            others=("Qwen3_5MoeForConditionalGeneration",),
            more=_delta_experts,
            rotates_part=True,
            adds_one=True,
            modules_of=_in_turn,
            prediction=_PREDICTION,
        ),
        "granitehybrid": _own(
            "GraniteMoeHybridForCausalLM",
            "granitemoehybrid",
            others=("BambaForCausalLM",),
            more=_granite_hybrid,
            has_pairs=True,
            rotates_part=True,
            modules={**GRANITE_MOE, **_space("mamba")},
            modules_of=_granite_modules,
        ),
        "falcon-h1": _own(
            "FalconH1ForCausalLM",
            "falcon_h1",
            more=_falcon_h1,
            modules={**_space("mamba"), **_IN_FEED_FORWARD, "ffn_norm": "pre_ff_layernorm"},
        ),
        "nemotron_h": _own(
            "NemotronHForCausalLM",
            "nemotron_h",
            more=_nemotron_h,
            has_pairs=True,
            rotates_part=True,
            modules=_SINGLE,
            prediction=_OTHER_PREDICTION,
        ),
        "nemotron_h_moe": _own(
            "NemotronHForCausalLM",
            "nemotron_h",
            more=_nemotron_h,
            has_pairs=True,
            rotates_part=True,
            modules=_SINGLE_EXPERTS,
            prediction=_OTHER_PREDICTION,
        ),
        "mamba2": _own(
            "Mamba2ForCausalLM", "mamba2", more=_mamba2, modules={**_space("mixer"), "attn_norm": "norm"}
        ),
        "lfm2": _own("Lfm2ForCausalLM", "lfm2", more=_lfm2, modules=_LIQUID),
        "lfm2moe": _own("Lfm2MoeForCausalLM", "lfm2_moe", more=_lfm2_moe, modules=_LIQUID_EXPERTS),
        "kimi-linear": _own(
            "KimiLinearForCausalLM",
            "kimi_linear",
            more=_kimi_linear,
            has_latents=True,
            modules=_CHANNELS,
            shapes={**_SHAPES, "ssm_a": (1, 1, -1, 1)},
        ),
    }
)  # fmt: skip
"""By `general.architecture`."""
