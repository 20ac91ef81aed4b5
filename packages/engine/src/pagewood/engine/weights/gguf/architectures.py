"""The architectures of GGUF files: what their keys and tensors are called and mean in Hugging Face's decoders.

Numbers that llama.cpp has in its code, and not in files, are those of its graphs: which layers have windows, the scale
of Gemma's attention, whether the weights of chosen experts are divided by their sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from pagewood.engine.weights.gguf.keys import Keys

_LARGEST_FACTOR = 1e6
_LARGEST_WINDOW = 1 << 28
Config = Mapping[str, Any]
_ReadKeys = Callable[[Keys, Config], dict[str, Any]]
"""From the keys and the fields that all architectures have to more fields, or other values."""


def _no_more(keys: Keys, config: Config) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """An architecture as llama.cpp knows it."""

    family: str
    """The class in Hugging Face's configurations."""
    model_type: str
    others: tuple[str, ...] = ()
    """Classes of other models with this name, which its keys tell apart; see `more`."""
    more: _ReadKeys = _no_more
    epsilon: str = "attention.layer_norm_rms_epsilon"
    """Key of the epsilon of its norms."""
    has_pairs: bool = False
    """Whether the converter reorders the rows of queries and keys, so that the elements that are rotated together are
    neighbours."""
    rotates_part: bool = False
    """Whether a part of each head may be rotated alone."""
    adds_one: bool = False
    """Whether norms are stored with the 1 added that the model adds."""
    modules: Mapping[str, str] = field(default_factory=dict[str, str])
    """Modules of a layer by llama.cpp's name, where they differ from `MODULES`; "{}" is the number of an expert."""


MODULES: Mapping[str, str] = MappingProxyType(
    {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
        "ffn_gate_inp": "mlp.gate",
        "ffn_gate_exps": "mlp.experts.{}.gate_proj",
        "ffn_up_exps": "mlp.experts.{}.up_proj",
        "ffn_down_exps": "mlp.experts.{}.down_proj",
        "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
        "ffn_up_shexp": "mlp.shared_expert.up_proj",
        "ffn_down_shexp": "mlp.shared_expert.down_proj",
    }
)
"""The modules of a layer by llama.cpp's name; "{}" is the number of an expert."""
_FOUR_NORMS = {"ffn_norm": "pre_feedforward_layernorm"}
_GLM4 = {
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
    "ffn_up": "mlp.gate_up_proj",
}
_GRANITE_MOE = {
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.gate_proj",
    "ffn_up_exps": "block_sparse_moe.experts.{}.up_proj",
    "ffn_down_exps": "block_sparse_moe.experts.{}.down_proj",
    "ffn_gate_shexp": "block_sparse_moe.shared_mlp.gate_proj",
    "ffn_up_shexp": "block_sparse_moe.shared_mlp.up_proj",
    "ffn_down_shexp": "block_sparse_moe.shared_mlp.down_proj",
}
_MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}


def _llama(keys: Keys, config: Config) -> dict[str, Any]:
    """llama.cpp stores Mistral's models, and Mixtral's, as Llama's."""
    window = keys.integer("attention.sliding_window", 0, high=_LARGEST_WINDOW)
    if keys.integer("expert_count", 0, high=1 << 16):
        return {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "sliding_window": window or None,
            **_experts(keys, "num_local_experts", renormalises=True),
        }
    if window:
        return {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
    return {}


def _window(keys: Keys, config: Config) -> dict[str, Any]:
    window = keys.integer("attention.sliding_window", 0, high=_LARGEST_WINDOW)
    return {"sliding_window": window} if window else {}


def _optional_window(keys: Keys, config: Config) -> dict[str, Any]:
    return {"sliding_window": None, **_window(keys, config)}


def _qwen(keys: Keys, config: Config) -> dict[str, Any]:
    found = _window(keys, config)
    return {**found, "use_sliding_window": True, "max_window_layers": 0} if found else {}


def _qwen2_moe(keys: Keys, config: Config) -> dict[str, Any]:
    found = _experts(keys, "num_experts", renormalises=False)
    whole = config["intermediate_size"]
    keys.integer("expert_shared_count", 0)  # the size says whether there are any
    return {
        **found,
        "moe_intermediate_size": keys.size("expert_feed_forward_length", whole // found["num_experts_per_tok"]),
        "shared_expert_intermediate_size": keys.size("expert_shared_feed_forward_length", whole),
    }


def _qwen3_moe(keys: Keys, config: Config) -> dict[str, Any]:
    found = _experts(keys, "num_experts", renormalises=True)
    whole = config["intermediate_size"]
    size = keys.size("expert_feed_forward_length", whole // found["num_experts_per_tok"])
    return {**found, "moe_intermediate_size": size}


def _olmoe(keys: Keys, config: Config) -> dict[str, Any]:
    return _experts(keys, "num_experts", renormalises=False)


def _gemma3(keys: Keys, config: Config) -> dict[str, Any]:
    full = {"rope_theta": config["rope_theta"], **(config["rope_scaling"] or {"rope_type": "default"})}
    local = {"rope_theta": keys.number("rope.freq_base_swa", 10000.0, low=2, high=1e12), "rope_type": "default"}
    cap = keys.number("final_logit_softcapping", 0.0, low=0, high=_LARGEST_FACTOR)
    return {
        **_some_windows(keys, config["num_hidden_layers"], period=6),
        "rope_theta": None,
        "rope_scaling": None,
        "rope_parameters": {"full_attention": full, "sliding_attention": local},
        "query_pre_attn_scalar": _gemma_scalar(config, largest=62),
        "final_logit_softcapping": cap or None,
    }


def _gemma2(keys: Keys, config: Config) -> dict[str, Any]:
    # A file without a window, or without caps, has those of llama.cpp.
    windows = _some_windows(keys, config["num_hidden_layers"], period=2, window=4096)
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    return {
        **windows,
        "query_pre_attn_scalar": _gemma_scalar(config, largest=46),
        **{name: keys.number(name, usual, low=0, high=_LARGEST_FACTOR) or None for name, usual in caps.items()},
    }


def _olmo2(keys: Keys, config: Config) -> dict[str, Any]:
    """llama.cpp stores OLMo 3, which has windows, as OLMo 2; positions in a window are not stretched."""
    if not keys.integer("attention.sliding_window", 0, high=_LARGEST_WINDOW):
        return {}
    theta = config["rope_theta"]
    full = {"rope_theta": theta, **(config["rope_scaling"] or {"rope_type": "default"})}
    local = {"rope_theta": keys.number("rope.freq_base_swa", theta, low=2, high=1e12), "rope_type": "default"}
    return {
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        **_some_windows(keys, config["num_hidden_layers"], period=4),
        "rope_theta": None,
        "rope_scaling": None,
        "rope_parameters": {"full_attention": full, "sliding_attention": local},
    }


def _smollm3(keys: Keys, config: Config) -> dict[str, Any]:
    return {"no_rope_layers": [int((layer + 1) % 4 != 0) for layer in range(config["num_hidden_layers"])]}


def _exaone4(keys: Keys, config: Config) -> dict[str, Any]:
    """Its model of 64 layers has windows."""
    window = 4096 if config["num_hidden_layers"] == 64 else 0
    return _some_windows(keys, config["num_hidden_layers"], period=4, window=window)


def _seed(keys: Keys, config: Config) -> dict[str, Any]:
    return {"attention_out_bias": False}


def _ernie(keys: Keys, config: Config) -> dict[str, Any]:
    return {"use_bias": config["attention_bias"]}


def _command_r(keys: Keys, config: Config) -> dict[str, Any]:
    return {"logit_scale": keys.number("logit_scale", low=0, high=_LARGEST_FACTOR) or 1.0}


def _cohere2(keys: Keys, config: Config) -> dict[str, Any]:
    return {**_command_r(keys, config), **_some_windows(keys, config["num_hidden_layers"], period=4)}


def _granite(keys: Keys, config: Config) -> dict[str, Any]:
    if not keys.flag("rope.scaling.finetuned", True):
        raise ValueError(f"{keys.source}: {keys.name}.rope.scaling.finetuned must be true, got False: without a rope")

    def factor(key: str, usual: float) -> float:
        return keys.number(key, 0.0, low=0, high=_LARGEST_FACTOR) or usual

    return {
        "attention_multiplier": factor("attention.scale", config["head_dim"] ** -0.5),
        "embedding_multiplier": factor("embedding_scale", 1.0),
        "logits_scaling": factor("logit_scale", 1.0),
        "residual_multiplier": factor("residual_scale", 1.0),
    }


def _granite_moe(keys: Keys, config: Config) -> dict[str, Any]:
    """The weights of experts are the softmax over the chosen ones, which is that over all, divided by their sum."""
    found = {**_granite(keys, config), **_experts(keys, "num_local_experts", renormalises=True)}
    if not found.pop("norm_topk_prob"):
        raise ValueError(f"{keys.source}: {keys.name}.expert_weights_norm must be absent or true, got False")
    shared = keys.integer("expert_shared_feed_forward_length", 0)
    if not shared:
        return found
    names = {"architectures": ["GraniteMoeSharedForCausalLM"], "model_type": "granitemoeshared"}
    return {**found, **names, "shared_intermediate_size": shared}


def _gpt_oss(keys: Keys, config: Config) -> dict[str, Any]:
    found = _experts(keys, "num_local_experts", renormalises=False)
    if found.pop("norm_topk_prob"):
        raise ValueError(f"{keys.source}: {keys.name}.expert_weights_norm must be absent or false, got True")
    scaling = config["rope_scaling"]
    return {
        **found,
        **_some_windows(keys, config["num_hidden_layers"], period=2),
        "intermediate_size": keys.size("expert_feed_forward_length", config["intermediate_size"]),
        # A file does not say that the bounds of its yarn are not rounded, as those of all gpt-oss are not.
        "rope_scaling": {**scaling, "truncate": False} if scaling and scaling["rope_type"] == "yarn" else scaling,
    }


def _experts(keys: Keys, count: str, *, renormalises: bool) -> dict[str, Any]:
    """Return the fields of a mixture; `count` is its name of the number of experts."""
    return {
        count: keys.integer("expert_count", low=1, high=1 << 16),
        "num_experts_per_tok": keys.integer("expert_used_count", low=1, high=1 << 16),
        "norm_topk_prob": keys.flag("expert_weights_norm", renormalises),
    }


def _some_windows(keys: Keys, num_layers: int, *, period: int, window: int = 0) -> dict[str, Any]:
    """Return the fields of windows in all but each n-th layer; a file may name n, or all layers that have one."""
    window = keys.integer("attention.sliding_window", window, high=_LARGEST_WINDOW)
    named = keys.integers("attention.sliding_window_pattern")
    if len(named) <= 1:
        period = named[0] if named else period
        named = [period == 0 or layer % period < period - 1 for layer in range(num_layers)]
    if len(named) != num_layers:
        raise ValueError(
            f"{keys.source}: {keys.name}.attention.sliding_window_pattern must be a number or have {num_layers} "
            f"items, got {len(named)}"
        )
    kinds = ["sliding_attention" if window and has_one else "full_attention" for has_one in named]
    return {"sliding_window": window or None, "layer_types": kinds}


def _gemma_scalar(config: Config, *, largest: int) -> int:
    """Return the number whose inverse square root scales the attention; that of `largest` layers has another one."""
    if config["num_hidden_layers"] == largest:
        return config["hidden_size"] // config["num_attention_heads"]
    return config["head_dim"]


ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "llama": Architecture(
            family="LlamaForCausalLM",
            model_type="llama",
            others=("MistralForCausalLM", "MixtralForCausalLM"),
            more=_llama,
            has_pairs=True,
            modules=_MIXTRAL,
        ),
        "mistral": Architecture(family="MistralForCausalLM", model_type="mistral", more=_window),
        "qwen2": Architecture(family="Qwen2ForCausalLM", model_type="qwen2", more=_qwen),
        "qwen3": Architecture(family="Qwen3ForCausalLM", model_type="qwen3", more=_qwen),
        "qwen2moe": Architecture(family="Qwen2MoeForCausalLM", model_type="qwen2_moe", more=_qwen2_moe),
        "qwen3moe": Architecture(family="Qwen3MoeForCausalLM", model_type="qwen3_moe", more=_qwen3_moe),
        "gemma": Architecture(family="GemmaForCausalLM", model_type="gemma", adds_one=True),
        "gemma2": Architecture(
            family="Gemma2ForCausalLM", model_type="gemma2", more=_gemma2, adds_one=True, modules=_FOUR_NORMS
        ),
        "gemma3": Architecture(
            family="Gemma3ForCausalLM", model_type="gemma3_text", more=_gemma3, adds_one=True, modules=_FOUR_NORMS
        ),
        "granite": Architecture(family="GraniteForCausalLM", model_type="granite", more=_granite, has_pairs=True),
        "granitemoe": Architecture(
            family="GraniteMoeForCausalLM",
            model_type="granitemoe",
            others=("GraniteMoeSharedForCausalLM",),
            more=_granite_moe,
            has_pairs=True,
            modules=_GRANITE_MOE,
        ),
        "gpt-oss": Architecture(
            family="GptOssForCausalLM",
            model_type="gpt_oss",
            more=_gpt_oss,
            modules={"ffn_gate_inp": "mlp.router", "attn_sinks": "self_attn.sinks"},
        ),
        "olmo": Architecture(
            family="OlmoForCausalLM", model_type="olmo", epsilon="attention.layer_norm_epsilon", has_pairs=True
        ),
        "olmo2": Architecture(family="Olmo2ForCausalLM", model_type="olmo2", others=("Olmo3ForCausalLM",), more=_olmo2),
        "smollm3": Architecture(family="SmolLM3ForCausalLM", model_type="smollm3", more=_smollm3, has_pairs=True),
        "exaone4": Architecture(family="Exaone4ForCausalLM", model_type="exaone4", more=_exaone4),
        "seed_oss": Architecture(family="SeedOssForCausalLM", model_type="seed_oss", more=_seed),
        "ernie4_5": Architecture(family="Ernie4_5ForCausalLM", model_type="ernie4_5", more=_ernie),
        "hunyuan-dense": Architecture(
            family="HunYuanDenseV1ForCausalLM",
            model_type="hunyuan_v1_dense",
            modules={"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"},
        ),
        "glm4": Architecture(family="Glm4ForCausalLM", model_type="glm4", rotates_part=True, modules=_GLM4),
        "phi3": Architecture(
            family="Phi3ForCausalLM",
            model_type="phi3",
            more=_optional_window,
            rotates_part=True,
            modules={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        ),
        "nemotron": Architecture(
            family="NemotronForCausalLM",
            model_type="nemotron",
            epsilon="attention.layer_norm_epsilon",
            rotates_part=True,
            adds_one=True,
        ),
        "command-r": Architecture(
            family="CohereForCausalLM",
            model_type="cohere",
            more=_command_r,
            epsilon="attention.layer_norm_epsilon",
        ),
        "cohere2": Architecture(
            family="Cohere2ForCausalLM",
            model_type="cohere2",
            more=_cohere2,
            epsilon="attention.layer_norm_epsilon",
        ),
        "olmoe": Architecture(family="OlmoeForCausalLM", model_type="olmoe", more=_olmoe),
        "starcoder2": Architecture(
            family="Starcoder2ForCausalLM",
            model_type="starcoder2",
            more=_optional_window,
            epsilon="attention.layer_norm_epsilon",
        ),
        "apertus": Architecture(
            family="ApertusForCausalLM",
            model_type="apertus",
            modules={"attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"},
        ),
    }
)
"""By `general.architecture`."""
