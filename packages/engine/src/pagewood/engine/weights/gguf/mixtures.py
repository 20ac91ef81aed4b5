"""The architectures of GGUF files with experts: what their keys and tensors mean in Hugging Face's decoders.

Whether the weights of chosen experts are divided by their sum is llama.cpp's default if a file does not say it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from pagewood.engine.weights.gguf.architecture import Architecture, Config
from pagewood.engine.weights.gguf.dense import LARGEST_FACTOR, granite, qwen_vl
from pagewood.engine.weights.gguf.keys import LARGEST, Keys, some_windows

_SOFTMAX, _SIGMOID = 1, 2
"""Values of `expert_gating_func`."""
_LLAMA4_CHUNK = 8192
"""Positions of a chunk, in layers with a rope, and positions with the same temperature in the others."""
_GLM_LITE = {(47, 154_880), (48, 154_880)}
"""Layers and tokens of GLM-4.7 Flash, whose first files do not say how its experts are weighted."""
SHARED_EXPERTS = {
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    "nextn.eh_proj": "eh_proj",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.embed_tokens": "embed_tokens",
    "nextn.shared_head_head": "shared_head.head",
    "nextn.shared_head_norm": "shared_head.norm",
}
LATENTS = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
}
_ERNIE_MOE = {
    "exp_probs_b": "mlp.moe_statics.e_score_correction_bias",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
GRANITE_MOE = {
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.gate_proj",
    "ffn_up_exps": "block_sparse_moe.experts.{}.up_proj",
    "ffn_down_exps": "block_sparse_moe.experts.{}.down_proj",
    "ffn_gate_shexp": "block_sparse_moe.shared_mlp.gate_proj",
    "ffn_up_shexp": "block_sparse_moe.shared_mlp.up_proj",
    "ffn_down_shexp": "block_sparse_moe.shared_mlp.down_proj",
}
_LLAMA4 = {
    "ffn_gate": "feed_forward.gate_proj",
    "ffn_up": "feed_forward.up_proj",
    "ffn_down": "feed_forward.down_proj",
    "ffn_gate_inp": "feed_forward.router",
    "ffn_gate_exps": "feed_forward.experts.{}.gate_proj",
    "ffn_up_exps": "feed_forward.experts.{}.up_proj",
    "ffn_down_exps": "feed_forward.experts.{}.down_proj",
    "ffn_gate_shexp": "feed_forward.shared_expert.gate_proj",
    "ffn_up_shexp": "feed_forward.shared_expert.up_proj",
    "ffn_down_shexp": "feed_forward.shared_expert.down_proj",
}
_MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}


def _llama(keys: Keys, config: Config) -> dict[str, Any]:
    """llama.cpp stores Mistral's models, and Mixtral's, as Llama's."""
    window = keys.integer("attention.sliding_window", 0, high=LARGEST)
    if keys.integer("expert_count", 0, high=1 << 16):
        return {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "sliding_window": window or None,
            **experts(keys, "num_local_experts", renormalises=True),
        }
    if window:
        return {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
    return {}


def _llama4(keys: Keys, config: Config) -> dict[str, Any]:
    """A file does not say which layers have chunks and ropes, nor the temperature of the others' queries.

    llama.cpp has those of the published models, and none of them for a window of 0. It has norms of queries and keys
    for all numbers of experts but 128.
    """
    found = experts(keys, "num_local_experts", renormalises=False)
    if found.pop("norm_topk_prob"):
        raise ValueError(f"{keys.source}: {keys.name}.expert_weights_norm must be absent or false, got True")
    num_layers = config["num_hidden_layers"]
    window = keys.integer("attention.sliding_window", _LLAMA4_CHUNK, high=LARGEST)
    rotated = [int(window == 0 or (layer + 1) % 4 != 0) for layer in range(num_layers)]
    return {
        **found,
        "intermediate_size": keys.size("expert_feed_forward_length"),
        "intermediate_size_mlp": config["intermediate_size"],
        "interleave_moe_layer_step": keys.size("interleave_moe_layer_step"),
        "use_qk_norm": found["num_local_experts"] != 128,
        "no_rope_layers": rotated,
        "attention_chunk_size": _LLAMA4_CHUNK if window else None,
        "attn_temperature_tuning": window > 0,
        "floor_scale": _LLAMA4_CHUNK,
        "attn_scale": 0.1,
    }


def _qwen2_moe(keys: Keys, config: Config) -> dict[str, Any]:
    found = experts(keys, "num_experts", renormalises=False)
    whole = config["intermediate_size"]
    keys.integer("expert_shared_count", 0)  # the size says whether there are any
    return {
        **found,
        "moe_intermediate_size": keys.size("expert_feed_forward_length", whole // found["num_experts_per_tok"]),
        "shared_expert_intermediate_size": keys.size("expert_shared_feed_forward_length", whole),
    }


def _qwen3_moe(keys: Keys, config: Config) -> dict[str, Any]:
    found = experts(keys, "num_experts", renormalises=True)
    whole = config["intermediate_size"]
    size = keys.size("expert_feed_forward_length", whole // found["num_experts_per_tok"])
    return {**found, "moe_intermediate_size": size}


def _qwen3_vl_moe(keys: Keys, config: Config) -> dict[str, Any]:
    return {**qwen_vl(keys, config), **_qwen3_moe(keys, config)}


def _olmoe(keys: Keys, config: Config) -> dict[str, Any]:
    return experts(keys, "num_experts", renormalises=False)


def _granite_moe(keys: Keys, config: Config) -> dict[str, Any]:
    """The weights of experts are the softmax over the chosen ones, which is that over all, divided by their sum."""
    found = {**granite(keys, config), **experts(keys, "num_local_experts", renormalises=True)}
    if not found.pop("norm_topk_prob"):
        raise ValueError(f"{keys.source}: {keys.name}.expert_weights_norm must be absent or true, got False")
    shared = keys.integer("expert_shared_feed_forward_length", 0)
    if not shared:
        return found
    names = {"architectures": ["GraniteMoeSharedForCausalLM"], "model_type": "granitemoeshared"}
    return {**found, **names, "shared_intermediate_size": shared}


def _gpt_oss(keys: Keys, config: Config) -> dict[str, Any]:
    found = experts(keys, "num_local_experts", renormalises=False)
    if found.pop("norm_topk_prob"):
        raise ValueError(f"{keys.source}: {keys.name}.expert_weights_norm must be absent or false, got True")
    scaling = config["rope_scaling"]
    return {
        **found,
        **some_windows(keys, config["num_hidden_layers"], period=2),
        "intermediate_size": keys.size("expert_feed_forward_length", config["intermediate_size"]),
        # A file does not say that the bounds of its yarn are not rounded, as those of all gpt-oss are not.
        "rope_scaling": {**scaling, "truncate": False} if scaling and scaling["rope_type"] == "yarn" else scaling,
    }


def _glm4_moe(keys: Keys, config: Config) -> dict[str, Any]:
    must_be_sigmoid(keys)
    return {
        **of_shared_experts(keys, config),
        "norm_topk_prob": keys.flag("expert_weights_norm", False),
        "use_qk_norm": keys.has_tensor("blk.0.attn_q_norm.weight"),
    }


def _ernie_moe(keys: Keys, config: Config) -> dict[str, Any]:
    found = experts(keys, "moe_num_experts", renormalises=True)
    keys.integer("expert_shared_feed_forward_length", 0)  # follows from their number
    return {
        **found,
        "moe_k": found.pop("num_experts_per_tok"),
        "moe_intermediate_size": keys.size("expert_feed_forward_length"),
        "moe_num_shared_experts": keys.integer("expert_shared_count", 0),
        "moe_layer_start_index": keys.integer("leading_dense_block_count"),
        "moe_layer_interval": keys.size("interleave_moe_layer_step"),
        "use_bias": config["attention_bias"],
    }


def _minimax(keys: Keys, config: Config) -> dict[str, Any]:
    must_be_sigmoid(keys)
    size = keys.size("expert_feed_forward_length")
    return {**experts(keys, "num_local_experts", renormalises=True), "intermediate_size": size}


def _deepseek2(keys: Keys, config: Config) -> dict[str, Any]:
    """Earlier files name the sizes of a head with the usual keys, later ones those of a latent."""
    sizes = config["num_hidden_layers"], config["vocab_size"]
    score = _score(keys, usual=_SIGMOID if sizes in _GLM_LITE else _SOFTMAX)
    names = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "rope_interleave": True}
    return {
        **of_shared_experts(keys, config),
        **(names if score == _SIGMOID else {}),
        "norm_topk_prob": keys.flag("expert_weights_norm", False),
        **latents(keys, config),
    }


def latents(keys: Keys, config: Config) -> dict[str, Any]:
    """Return the fields of attention over latents; earlier files name the sizes of a head with the usual keys."""
    rotated, latent = config["head_dim"], keys.size("attention.kv_lora_rank")
    is_latent = keys.integer("attention.key_length_mla", 0) > 0
    key_size = keys.size("attention.key_length")
    value_size = keys.size("attention.value_length", latent if is_latent else None)
    if is_latent:
        for name, size, wanted in (("key", key_size, latent + rotated), ("value", value_size, latent)):
            if size != wanted:
                raise ValueError(
                    f"{keys.source}: {keys.name}.attention.{name}_length must be {wanted}, that of a latent, got {size}"
                )
        key_size, value_size = keys.size("attention.key_length_mla"), keys.size("attention.value_length_mla")
    if key_size <= rotated:
        raise ValueError(f"{keys.source}: the keys of a head must have more than {rotated} elements, got {key_size}")
    return {
        "num_key_value_heads": config["num_attention_heads"],
        "kv_lora_rank": latent,
        "q_lora_rank": keys.integer("attention.q_lora_rank", 0) or None,
        "qk_nope_head_dim": key_size - rotated,
        "qk_rope_head_dim": rotated,
        "v_head_dim": value_size,
    }


def _deepseek32(keys: Keys, config: Config) -> dict[str, Any]:
    """DeepSeek V3.2 sees all tokens of a text that is not longer than its indexer's choice."""
    must_be_sigmoid(keys)
    return {
        **_deepseek2(keys, config),
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "index_topk": keys.size("attention.indexer.top_k"),
        "index_n_heads": keys.size("attention.indexer.head_count"),
        "index_head_dim": keys.size("attention.indexer.key_length"),
    }


def must_be_sigmoid(keys: Keys) -> None:
    """Refuse another function from the router's logits to weights.

    Raises:
        ValueError: the file names another one.
    """
    if _score(keys, usual=_SIGMOID) != _SIGMOID:
        raise ValueError(f"{keys.source}: {keys.name}.expert_gating_func must be absent or {_SIGMOID}, got {_SOFTMAX}")


def _score(keys: Keys, *, usual: int) -> int:
    """Return which function makes weights of the router's logits, `usual` if the file does not say it."""
    return keys.integer("expert_gating_func", usual, high=_SIGMOID) or usual


def of_shared_experts(keys: Keys, config: Config, *, count: str = "n_routed_experts") -> dict[str, Any]:
    """Return the fields of mixtures with layers without experts at the beginning, and shared experts.

    The last layers of a file may be for multi-token prediction. `count` is the name of the number of experts.
    """
    num_layers = config["num_hidden_layers"]
    num_extra = keys.integer("nextn_predict_layers", 0, high=num_layers - 1)
    num_groups = keys.integer("expert_group_count", 0) or 1
    return {
        **experts(keys, count, renormalises=False),
        "num_hidden_layers": num_layers - num_extra,
        "num_nextn_predict_layers": num_extra,
        "moe_intermediate_size": keys.size("expert_feed_forward_length"),
        "first_k_dense_replace": keys.integer("leading_dense_block_count", 0),
        "n_shared_experts": keys.integer("expert_shared_count"),
        "routed_scaling_factor": keys.number("expert_weights_scale", 0.0, low=0, high=LARGEST_FACTOR) or 1.0,
        "n_group": num_groups,
        "topk_group": keys.size("expert_group_used_count") if num_groups > 1 else 1,
    }


def experts(keys: Keys, count: str, *, renormalises: bool) -> dict[str, Any]:
    """Return the fields of a mixture; `count` is its name of the number of experts."""
    return {
        count: keys.integer("expert_count", low=1, high=1 << 16),
        "num_experts_per_tok": keys.integer("expert_used_count", low=1, high=1 << 16),
        "norm_topk_prob": keys.flag("expert_weights_norm", renormalises),
    }


MIXTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "llama": Architecture(
            family="LlamaForCausalLM",
            model_type="llama",
            others=("MistralForCausalLM", "MixtralForCausalLM"),
            more=_llama,
            has_pairs=True,
            modules=_MIXTRAL,
        ),
        "llama4": Architecture(
            family="Llama4ForCausalLM",
            model_type="llama4_text",
            others=("Llama4ForConditionalGeneration",),
            more=_llama4,
            modules=_LLAMA4,
        ),
        "qwen2moe": Architecture(family="Qwen2MoeForCausalLM", model_type="qwen2_moe", more=_qwen2_moe),
        "qwen3moe": Architecture(family="Qwen3MoeForCausalLM", model_type="qwen3_moe", more=_qwen3_moe),
        "qwen3vlmoe": Architecture(
            family="Qwen3MoeForCausalLM",
            model_type="qwen3_moe",
            others=("Qwen3VLMoeForConditionalGeneration",),
            more=_qwen3_vl_moe,
        ),
        "granitemoe": Architecture(
            family="GraniteMoeForCausalLM",
            model_type="granitemoe",
            others=("GraniteMoeSharedForCausalLM",),
            more=_granite_moe,
            has_pairs=True,
            modules=GRANITE_MOE,
        ),
        "glm4moe": Architecture(
            family="Glm4MoeForCausalLM",
            model_type="glm4_moe",
            more=_glm4_moe,
            rotates_part=True,
            modules=SHARED_EXPERTS,
        ),
        "ernie4_5-moe": Architecture(
            family="Ernie4_5_MoeForCausalLM", model_type="ernie4_5_moe", more=_ernie_moe, modules=_ERNIE_MOE
        ),
        "minimax-m2": Architecture(
            family="MiniMaxM2ForCausalLM",
            model_type="minimax_m2",
            more=_minimax,
            rotates_part=True,
            modules={**_MIXTRAL, "exp_probs_b": "block_sparse_moe.e_score_correction_bias"},
        ),
        "deepseek2": Architecture(
            family="DeepseekV2ForCausalLM",
            model_type="deepseek_v2",
            others=("DeepseekV3ForCausalLM",),
            more=_deepseek2,
            has_latents=True,
            modules={**SHARED_EXPERTS, **LATENTS},
        ),
        "deepseek32": Architecture(
            family="DeepseekV32ForCausalLM",
            model_type="deepseek_v32",
            more=_deepseek32,
            has_latents=True,
            modules={**SHARED_EXPERTS, **LATENTS},
        ),
        "gpt-oss": Architecture(
            family="GptOssForCausalLM",
            model_type="gpt_oss",
            more=_gpt_oss,
            modules={"ffn_gate_inp": "mlp.router", "attn_sinks": "self_attn.sinks"},
        ),
        "olmoe": Architecture(family="OlmoeForCausalLM", model_type="olmoe", more=_olmoe),
    }
)
"""By `general.architecture`; llama.cpp has Llama, without experts, and Mixtral under one name."""
