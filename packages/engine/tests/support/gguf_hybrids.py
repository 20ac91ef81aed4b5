"""What the converter of llama.cpp writes of models with recurrent layers: keys, and tensors as it arranges them.

Restated with loops over heads and rows, so that it shares nothing with the reader.
"""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

HYBRIDS = (
    "qwen3next", "qwen35", "qwen35moe", "granitehybrid", "falcon-h1", "nemotron_h", "nemotron_h_moe", "lfm2",
    "lfm2moe", "kimi-linear", "mamba2",
)  # fmt: skip
_LAYER = re.compile(r"(?:model|backbone)\.layers\.(\d+)\.(.*)")
_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_WITH_ATTENTION = ("full_attention", "attention")
_WITH_FEED_FORWARD = ("mlp", "moe")


def hybrid_keys(architecture: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys without the architecture's name, of those that other architectures do not have."""
    if architecture == "mamba2":
        absent = dict.fromkeys(
            ("attention.head_count_kv", "attention.key_length", "rope.dimension_count", "rope.freq_base")
        )
        return {
            **_space(config), **absent, "attention.head_count": 0, "feed_forward_length": 0,
            "attention.layer_norm_rms_epsilon": config["layer_norm_epsilon"], "context_length": 1 << 20,
        }  # fmt: skip
    kinds = _kinds(config)
    heads = [config["num_key_value_heads"] if kind in _WITH_ATTENTION else 0 for kind in kinds]
    match architecture:
        case "qwen3next" | "qwen35" | "qwen35moe":
            return {
                "rope.dimension_count": int(config["head_dim"] * config["rope_parameters"]["partial_rotary_factor"]),
                "full_attention_interval": kinds.index("full_attention") + 1,
                "ssm.conv_kernel": config["linear_conv_kernel_dim"],
                "ssm.state_size": config["linear_key_head_dim"],
                "ssm.group_count": config["linear_num_key_heads"],
                "ssm.time_step_rank": config["linear_num_value_heads"],
                "ssm.inner_size": config["linear_num_value_heads"] * config["linear_value_head_dim"],
                **({"rope.dimension_sections": [11, 11, 10, 0]} if architecture != "qwen3next" else {}),
            }
        case "granitehybrid":
            is_bamba = config["model_type"] == "bamba"
            factors = {
                "attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
                "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling",
            }  # fmt: skip
            return {
                **_space(config),
                **{key: config[name] for key, name in factors.items() if config.get(name)},
                "attention.head_count_kv": heads,
                "rope.scaling.finetuned": is_bamba,
                **({"rope.dimension_count": config["hidden_size"] // config["num_attention_heads"] // 2}
                   if is_bamba else {}),
            }  # fmt: skip
        case "falcon-h1":
            return _space(config)
        case "nemotron_h" | "nemotron_h_moe":
            size = config["moe_intermediate_size" if architecture.endswith("moe") else "intermediate_size"]
            found = {
                **_space(config),
                "block_count": len(kinds),
                "attention.layer_norm_rms_epsilon": config["layer_norm_epsilon"],
                "attention.head_count_kv": heads,
                "feed_forward_length": [size if kind in _WITH_FEED_FORWARD else 0 for kind in kinds],
                "rope.dimension_count": config["hidden_size"] // config["num_attention_heads"],
                "rope.scaling.finetuned": False,
            }
            if architecture == "nemotron_h":
                return {**found, "expert_count": None, "expert_used_count": None, "expert_shared_count": None}
            own = {
                "expert_weights_norm": config["norm_topk_prob"],
                "expert_shared_feed_forward_length": config["moe_shared_expert_intermediate_size"],
            }
            latent = config.get("moe_latent_size")
            return {**found, **own, **({"moe_latent_size": latent} if latent else {})}
        case "lfm2" | "lfm2moe":
            found = {
                "attention.layer_norm_rms_epsilon": config["norm_eps"],
                "attention.head_count_kv": heads,
                "shortconv.l_cache": config["conv_L_cache"],
            }
            if architecture == "lfm2moe":
                return {**found, "expert_gating_func": 2, "leading_dense_block_count": config["num_dense_layers"]}
            return {**found, "feed_forward_length": _two_thirds(config)}
        case _:
            full = config["linear_attn_config"]["full_attn_layers"]
            return {
                "attention.head_count_kv": [int(layer + 1 in full) for layer in range(config["num_hidden_layers"])],
                "ssm.conv_kernel": config["linear_attn_config"]["short_conv_kernel_size"],
                "kda.head_dim": config["linear_attn_config"]["head_dim"],
                "attention.kv_lora_rank": config["kv_lora_rank"],
                "rope.dimension_count": config["qk_rope_head_dim"],
                "attention.key_length": config["kv_lora_rank"] + config["qk_rope_head_dim"],
                "attention.key_length_mla": config["qk_nope_head_dim"] + config["qk_rope_head_dim"],
                "attention.value_length_mla": config["v_head_dim"],
                "context_length": config["model_max_length"],
                "expert_gating_func": 2,
                "expert_weights_norm": config["moe_renormalize"],
                "expert_used_count": config["num_experts_per_token"],
                "expert_shared_count": config["num_shared_experts"],
            }


def hybrid_tensors(architecture: str, weights: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors as they are stored, under names that begin with "blk." or that the package maps."""
    found: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        match = _LAYER.fullmatch(name)
        layer, own = (match[1], match[2]) if match else ("", name)
        last = own.rpartition(".")[2]
        if architecture.startswith("qwen35") and "linear_attn." in name:
            tensor = _values_in_turn(own, tensor, config)
        if architecture == "falcon-h1":
            tensor = _multiplied(name, tensor, config)
        if last == "A_log":
            rates = -torch.exp(tensor)
            found[f"blk.{layer}.ssm_a"] = rates if tensor.ndim > 1 or "linear_attn" in own else rates[:, None]
        elif last == "D":
            found[f"blk.{layer}.ssm_d"] = tensor[:, None]
        elif last == "dt_bias":
            found[f"blk.{layer}.ssm_dt.bias"] = tensor
        elif own.endswith(("mixer.norm.weight", "mamba.norm.weight")):
            found[f"blk.{layer}.ssm_norm.weight"] = tensor.reshape(_groups(config), -1)
        elif "linear_attn.norm" in own:
            found[f"blk.{layer}.ssm_norm.weight"] = tensor
        elif own.endswith("conv1d.weight") and architecture == "kimi-linear":
            kind = own.split(".")[-2][0]
            found[f"blk.{layer}.ssm_conv1d_{kind}.weight"] = tensor.reshape(1, len(tensor), 1, -1)
        elif own.endswith(("conv1d.weight", "conv.conv.weight")):
            module = "ssm_conv1d" if "conv1d" in own else "shortconv.conv"
            found[f"blk.{layer}.{module}.weight"] = tensor.squeeze(1)
        elif own.endswith("in_proj_qkvz.weight"):
            rows = _by_kind(config)
            mixed = [tensor[row] for kind in "qkv" for row in rows[kind]]
            found[f"blk.{layer}.attn_qkv.weight"] = torch.stack(mixed)
            found[f"blk.{layer}.attn_gate.weight"] = torch.stack([tensor[row] for row in rows["z"]])
        elif own.endswith("in_proj_ba.weight"):
            found[f"blk.{layer}.ssm_ba.weight"] = tensor
        elif ".feed_forward.experts." in name:
            found[name.removeprefix("model.")] = tensor
        elif ".mixer.experts." in name:
            found[f"model.layers.{layer}.{own.replace('mixer.', 'mlp.')}"] = tensor
        elif own.endswith("expert_bias"):
            found[f"blk.{layer}.exp_probs_b.bias"] = tensor
        elif architecture == "kimi-linear" and "block_sparse_moe." in own and ".experts." not in own:
            found[name.replace("block_sparse_moe.", "mlp.")] = tensor
        else:
            found[name] = tensor
    return found


def _kinds(config: Mapping[str, Any]) -> Sequence[str]:
    for name in ("layer_types", "layers_block_type"):
        if config.get(name):
            return config[name]
    if config.get("hybrid_override_pattern"):
        return [_LETTERS[letter] for letter in config["hybrid_override_pattern"]]
    with_attention = config.get("attn_layer_indices") or ()
    return ["attention" if layer in with_attention else "mamba" for layer in range(config["num_hidden_layers"])]


def _groups(config: Mapping[str, Any]) -> int:
    return config.get("mamba_n_groups") or config["n_groups"]


def _space(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of Mamba 2."""
    heads = config.get("mamba_n_heads") or config.get("mamba_num_heads") or config["num_heads"]
    head_dim = config.get("mamba_d_head") or config.get("mamba_head_dim") or config["head_dim"]
    inner = config.get("mamba_d_ssm") or heads * head_dim
    return {
        "ssm.conv_kernel": config.get("mamba_d_conv") or config["conv_kernel"],
        "ssm.state_size": config.get("mamba_d_state") or config.get("ssm_state_size") or config["state_size"],
        "ssm.group_count": _groups(config),
        "ssm.inner_size": inner,
        "ssm.time_step_rank": heads,
    }


def _two_thirds(config: Mapping[str, Any]) -> int:
    size = config["intermediate_size"]
    if not config["block_auto_adjust_ff_dim"]:
        return size
    multiple = config["block_multiple_of"]
    size = int(config["block_ffn_dim_multiplier"] * int(2 * size / 3))
    return (size + multiple - 1) // multiple * multiple


def _by_kind(config: Mapping[str, Any]) -> dict[str, list[int]]:
    """Return the rows of queries, keys, values and gates in the projection of Qwen 3 Next, in the order of heads."""
    heads, key = config["linear_num_key_heads"], config["linear_key_head_dim"]
    value = config["linear_num_value_heads"] // heads * config["linear_value_head_dim"]
    rows: dict[str, list[int]] = {kind: [] for kind in "qkvz"}
    row = 0
    for _ in range(heads):
        for kind, size in zip("qkvz", (key, key, value, value), strict=True):
            rows[kind] += range(row, row + size)
            row += size
    return rows


def _values_in_turn(name: str, tensor: Tensor, config: Mapping[str, Any]) -> Tensor:
    """Return a tensor of Qwen 3.5 with the first head of values of each head of keys first, then the second ones."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    size, share = config["linear_value_head_dim"], values // keys
    order = [key * share + number for number in range(share) for key in range(keys)]
    before = 2 * keys * config["linear_key_head_dim"]
    if name.endswith("out_proj.weight"):
        return torch.cat([tensor[:, head * size : (head + 1) * size] for head in order], dim=1)
    if name.endswith(("in_proj_qkv.weight", "conv1d.weight", "in_proj_z.weight")):
        start = 0 if name.endswith("in_proj_z.weight") else before
        parts = [tensor[start + head * size : start + (head + 1) * size] for head in order]
        return torch.cat([tensor[:start], *parts])
    if name.endswith(("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias")):
        return torch.stack([tensor[head] for head in order])
    return tensor


def _multiplied(name: str, tensor: Tensor, config: Mapping[str, Any]) -> Tensor:
    """Return a tensor of Falcon-H1 times its multipliers."""
    if "mamba.in_proj" in name:
        inner = config["mamba_d_ssm"]
        group = config["mamba_n_groups"] * config["mamba_d_state"]
        sizes = [inner, inner, group, group, config["mamba_n_heads"]]
        parts = zip(tensor.split(sizes), config["ssm_multipliers"], strict=True)
        return torch.cat([part * factor * config["ssm_in_multiplier"] for part, factor in parts])
    of_attention = config["attention_in_multiplier"]
    factors = {
        "down_proj": config["mlp_multipliers"][1], "gate_proj": config["mlp_multipliers"][0],
        "k_proj": config["key_multiplier"] * of_attention, "q_proj": of_attention, "v_proj": of_attention,
        "o_proj": config["attention_out_multiplier"], "out_proj": config["ssm_out_multiplier"],
        "lm_head": config["lm_head_multiplier"], "embed_tokens": config["embedding_multiplier"],
    }  # fmt: skip
    return tensor * factors.get(name.split(".")[-2], 1.0)
