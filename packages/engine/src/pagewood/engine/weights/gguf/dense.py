"""The architectures of GGUF files without experts: what their keys and tensors mean in Hugging Face's decoders.

Numbers that llama.cpp has in its code, and not in files, are those of its graphs: which layers have windows, the scale
of Gemma's attention, the activation of GPT-NeoX.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from pagewood.engine.weights.gguf.architecture import Architecture, Config
from pagewood.engine.weights.gguf.keys import LARGEST, Keys, some_windows

LARGEST_FACTOR = 1e6
_FOUR_NORMS = {"ffn_norm": "pre_feedforward_layernorm"}
_GLM4 = {
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
    "ffn_up": "mlp.gate_up_proj",
}


def _window(keys: Keys, config: Config) -> dict[str, Any]:
    window = keys.integer("attention.sliding_window", 0, high=LARGEST)
    return {"sliding_window": window} if window else {}


def _optional_window(keys: Keys, config: Config) -> dict[str, Any]:
    return {"sliding_window": None, **_window(keys, config)}


def _qwen(keys: Keys, config: Config) -> dict[str, Any]:
    found = _window(keys, config)
    return {**found, "use_sliding_window": True, "max_window_layers": 0} if found else {}


def qwen_vl(keys: Keys, config: Config) -> dict[str, Any]:
    """Positions of text are equal on all axes, and what is added to layers comes from images."""
    keys.integers("rope.dimension_sections")
    keys.integer("n_deepstack_layers", 0)
    return {}


def _mistral3(keys: Keys, config: Config) -> dict[str, Any]:
    """llama.cpp has one name for Mistral Small 3 beside images and Ministral 3, whose queries have a temperature."""
    temperature = keys.number("attention.temperature_scale", 0.0, low=0, high=LARGEST_FACTOR)
    scaling = config["rope_scaling"]
    if not temperature:
        return {"sliding_window": None}
    if scaling is None:
        raise ValueError(
            f"{keys.source}: {keys.name}.rope.scaling.type must be yarn beside {keys.name}.attention.temperature_scale"
        )
    return {
        "architectures": ["Ministral3ForCausalLM"],
        "model_type": "ministral3",
        "rope_scaling": None,
        "rope_parameters": {**scaling, "rope_theta": config["rope_theta"], "llama_4_scaling_beta": temperature},
    }


def _gemma3(keys: Keys, config: Config) -> dict[str, Any]:
    full = {"rope_theta": config["rope_theta"], **(config["rope_scaling"] or {"rope_type": "default"})}
    local = {"rope_theta": keys.number("rope.freq_base_swa", 10000.0, low=2, high=1e12), "rope_type": "default"}
    cap = keys.number("final_logit_softcapping", 0.0, low=0, high=LARGEST_FACTOR)
    return {
        **some_windows(keys, config["num_hidden_layers"], period=6),
        "rope_theta": None,
        "rope_scaling": None,
        "rope_parameters": {"full_attention": full, "sliding_attention": local},
        "query_pre_attn_scalar": _gemma_scalar(config, largest=62),
        "final_logit_softcapping": cap or None,
    }


def _gemma2(keys: Keys, config: Config) -> dict[str, Any]:
    # A file without a window, or without caps, has those of llama.cpp.
    windows = some_windows(keys, config["num_hidden_layers"], period=2, window=4096)
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    return {
        **windows,
        "query_pre_attn_scalar": _gemma_scalar(config, largest=46),
        **{name: keys.number(name, usual, low=0, high=LARGEST_FACTOR) or None for name, usual in caps.items()},
    }


def _olmo2(keys: Keys, config: Config) -> dict[str, Any]:
    """llama.cpp stores OLMo 3, which has windows, as OLMo 2; positions in a window are not stretched."""
    if not keys.integer("attention.sliding_window", 0, high=LARGEST):
        return {}
    theta = config["rope_theta"]
    full = {"rope_theta": theta, **(config["rope_scaling"] or {"rope_type": "default"})}
    local = {"rope_theta": keys.number("rope.freq_base_swa", theta, low=2, high=1e12), "rope_type": "default"}
    return {
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        **some_windows(keys, config["num_hidden_layers"], period=4),
        "rope_theta": None,
        "rope_scaling": None,
        "rope_parameters": {"full_attention": full, "sliding_attention": local},
    }


def _smollm3(keys: Keys, config: Config) -> dict[str, Any]:
    return {"no_rope_layers": [int((layer + 1) % 4 != 0) for layer in range(config["num_hidden_layers"])]}


def _exaone4(keys: Keys, config: Config) -> dict[str, Any]:
    """Its model of 64 layers has windows."""
    window = 4096 if config["num_hidden_layers"] == 64 else 0
    return some_windows(keys, config["num_hidden_layers"], period=4, window=window)


def _seed(keys: Keys, config: Config) -> dict[str, Any]:
    return {"attention_out_bias": False}


def _ernie(keys: Keys, config: Config) -> dict[str, Any]:
    return {"use_bias": config["attention_bias"]}


def _command_r(keys: Keys, config: Config) -> dict[str, Any]:
    return {"logit_scale": keys.number("logit_scale", low=0, high=LARGEST_FACTOR) or 1.0}


def _cohere2(keys: Keys, config: Config) -> dict[str, Any]:
    return {**_command_r(keys, config), **some_windows(keys, config["num_hidden_layers"], period=4)}


def granite(keys: Keys, config: Config) -> dict[str, Any]:
    """Return the factors of Granite with a rope."""
    if not keys.flag("rope.scaling.finetuned", True):
        raise ValueError(f"{keys.source}: {keys.name}.rope.scaling.finetuned must be true, got False: without a rope")
    return granite_factors(keys, config)


def granite_factors(keys: Keys, config: Config) -> dict[str, Any]:
    """Return the factors of Granite; llama.cpp takes a factor of 0 for the usual one."""

    def factor(key: str, usual: float) -> float:
        return keys.number(key, 0.0, low=0, high=LARGEST_FACTOR) or usual

    return {
        "attention_multiplier": factor("attention.scale", config["head_dim"] ** -0.5),
        "embedding_multiplier": factor("embedding_scale", 1.0),
        "logits_scaling": factor("logit_scale", 1.0),
        "residual_multiplier": factor("residual_scale", 1.0),
    }


def _gpt2(keys: Keys, config: Config) -> dict[str, Any]:
    return {"hidden_act": "gelu_new"}


def _gpt_neox(keys: Keys, config: Config) -> dict[str, Any]:
    """A file does not say which gelu it has; llama.cpp computes the one with a hyperbolic tangent for all."""
    return {"hidden_act": "gelu_new", "use_parallel_residual": keys.flag("use_parallel_residual", True)}


def _gemma_scalar(config: Config, *, largest: int) -> int:
    """Return the number whose inverse square root scales the attention; that of `largest` layers has another one."""
    if config["num_hidden_layers"] == largest:
        return config["hidden_size"] // config["num_attention_heads"]
    return config["head_dim"]


DENSE: Mapping[str, Architecture] = MappingProxyType(
    {
        "mistral": Architecture(family="MistralForCausalLM", model_type="mistral", more=_window),
        "qwen2": Architecture(family="Qwen2ForCausalLM", model_type="qwen2", more=_qwen),
        "qwen3": Architecture(family="Qwen3ForCausalLM", model_type="qwen3", more=_qwen),
        "qwen2vl": Architecture(
            family="Qwen2ForCausalLM",
            model_type="qwen2",
            others=("Qwen2_5_VLForConditionalGeneration",),
            more=qwen_vl,
        ),
        "qwen3vl": Architecture(
            family="Qwen3ForCausalLM",
            model_type="qwen3",
            others=("Qwen3VLForConditionalGeneration",),
            more=qwen_vl,
        ),
        "mistral3": Architecture(
            family="MistralForCausalLM",
            model_type="mistral",
            others=("Ministral3ForCausalLM", "Mistral3ForConditionalGeneration"),
            more=_mistral3,
            has_pairs=True,
            has_growth=True,
        ),
        "gemma": Architecture(family="GemmaForCausalLM", model_type="gemma", adds_one=True),
        "gemma2": Architecture(
            family="Gemma2ForCausalLM", model_type="gemma2", more=_gemma2, adds_one=True, modules=_FOUR_NORMS
        ),
        "gemma3": Architecture(
            family="Gemma3ForCausalLM", model_type="gemma3_text", more=_gemma3, adds_one=True, modules=_FOUR_NORMS
        ),
        "granite": Architecture(
            family="GraniteForCausalLM",
            model_type="granite",
            others=("GraniteMoeHybridForCausalLM",),
            more=granite,
            has_pairs=True,
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
        "chatglm": Architecture(
            family="GlmForCausalLM", model_type="glm", rotates_part=True, modules={"ffn_up": "mlp.gate_up_proj"}
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
        "gpt2": Architecture(
            family="GPT2LMHeadModel",
            model_type="gpt2",
            more=_gpt2,
            epsilon="attention.layer_norm_epsilon",
        ),
        "gptneox": Architecture(
            family="GPTNeoXForCausalLM",
            model_type="gpt_neox",
            more=_gpt_neox,
            epsilon="attention.layer_norm_epsilon",
            rotates_part=True,
        ),
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
