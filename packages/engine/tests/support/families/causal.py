"""All causal models of `transformers` without a table here: how each is computed, and the fields of a tiny one."""

# pyright: basic
# transformers is typed in part only.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

import transformers

from families.case import SMALL

Way = Literal["interface", "cache", "refused"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CausalModel:
    """How a class is computed."""

    way: Way
    """Through the attention interface, over a cache in pages, or not at all."""
    reason: str = ""
    """A part of the message, if it is refused."""
    fields: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Fields of a tiny model's configuration beside those of `FIELDS` that it has."""


FIELDS: Mapping[str, Any] = MappingProxyType(
    {
        **SMALL,
        "is_decoder": True,
        "is_encoder_decoder": False,
        "max_seq_len": 256,
        "max_target_positions": 256,
        "head_dim": 16,
        "rotary_dim": 8,
        "d_model": 64,
        "embedding_size": 64,
        "word_embed_proj_dim": 64,
        "ffn_dim": 80,
        "num_heads": 4,
        "encoder_layers": 2,
        "decoder_layers": 3,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 80,
        "decoder_ffn_dim": 80,
        "num_encoder_layers": 2,
        "num_decoder_layers": 3,
        "num_encoder_attention_heads": 4,
        "num_decoder_attention_heads": 4,
        "num_experts": 4,
        "num_local_experts": 4,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 32,
        "dense_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "shared_experts_intermediate_size": 32,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 12,
        "index_topk": 8,
        "index_head_dim": 16,
        "index_n_heads": 12,  # with few, scores that are zero often meet
        "gated_norm_rank": 4,
        "global_head_dim": 16,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 97,
        "hc_mult": 2,
        "keep_window_size": 8,
        "sliding_window": 9,
        "window_size": 9,
        "pronunciation_vocab_size": 50,
        "shape_vocab_size": 50,
    }
)
"""Small values of fields that many classes have."""
_KINDS = "must have keys and values of all positions as its only cache"
_RECURRENT = CausalModel(way="refused", reason=_KINDS)
_INTERFACE, _CACHE = CausalModel(way="interface"), CausalModel(way="cache")
_HEADS = {"num_key_value_heads": 4}
_PART = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
_VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
_GEMMA = {
    **SMALL,
    "head_dim": 16,
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 97,
}
_SHARED = {**_GEMMA, "vocab_size_per_layer_input": 0, "num_kv_shared_layers": 3}


def _refused(reason: str, **fields: Any) -> CausalModel:
    return CausalModel(way="refused", reason=reason, fields=fields)


def _interface(**fields: Any) -> CausalModel:
    return CausalModel(way="interface", fields=fields)


def _cache(**fields: Any) -> CausalModel:
    return CausalModel(way="cache", fields=fields)


CAUSAL: Mapping[str, CausalModel] = MappingProxyType(
    {
        "AXK1ForCausalLM": _interface(**_HEADS),
        "AXK2ForCausalLM": _cache(**_HEADS),
        "AfmoeForCausalLM": _INTERFACE,
        "ArceeForCausalLM": _INTERFACE,
        "AriaTextForCausalLM": _INTERFACE,
        "BailingHybridForCausalLM": _RECURRENT,
        "BartForCausalLM": _CACHE,
        "BeamForCausalLM": _INTERFACE,
        "BertGenerationDecoder": _INTERFACE,
        "BertLMHeadModel": _INTERFACE,
        "BigBirdForCausalLM": _CACHE,
        "BigBirdPegasusForCausalLM": _CACHE,
        "BioGptForCausalLM": _INTERFACE,
        "BitNetForCausalLM": _INTERFACE,
        "BlenderbotForCausalLM": _CACHE,
        "BlenderbotSmallForCausalLM": _CACHE,
        "BloomForCausalLM": _CACHE,
        "BltForCausalLM": _refused(
            "got one of the model's own",
            encoder_hash_byte_group_vocab=100,
            patcher_config=_PART,
            global_config=_PART,
            encoder_config={**_PART, "hidden_size_global": 64},
            decoder_config={**_PART, "hidden_size_global": 64},
        ),
        "CTRLLMHeadModel": _INTERFACE,
        "CamembertForCausalLM": _CACHE,
        "CodeGenForCausalLM": _CACHE,
        "Cohere2MoeForCausalLM": _INTERFACE,
        "CohereCompassForCausalLM": _interface(
            rope_parameters={
                kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("full_attention", "sliding_attention")
            },
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
        "CpmAntForCausalLM": _refused("keys of a cache must have the shape"),
        "CwmForCausalLM": _INTERFACE,
        "Data2VecTextForCausalLM": _CACHE,
        "DbrxForCausalLM": _interface(
            ffn_config={"ffn_hidden_size": 32, "hidden_size": 64},
            attn_config={"kv_n_heads": 2, "clip_qkv": 3.0, "rope_theta": 1e4},
        ),
        "DeepseekV4ForCausalLM": _RECURRENT,
        "DiffLlamaForCausalLM": _INTERFACE,
        "DogeForCausalLM": _CACHE,
        "Dots1ForCausalLM": _INTERFACE,
        "Dots3NoteForCausalLM": _cache(
            **_HEADS,
            swa_num_attention_heads=4,
            swa_num_key_value_heads=4,
            swa_q_lora_rank=16,
            swa_kv_lora_rank=16,
            swa_head_dim=24,
            swa_qk_nope_head_dim=16,
            swa_v_head_dim=12,
        ),
        "ElectraForCausalLM": _INTERFACE,
        "Emu3ForCausalLM": _refused("must be one that Emu3ForCausalLM can be made of"),
        "ErnieForCausalLM": _INTERFACE,
        "ExaoneMoeForCausalLM": _INTERFACE,
        "FalconForCausalLM": _cache(alibi=True),
        "FalconMambaForCausalLM": _RECURRENT,
        "FlexOlmoForCausalLM": _INTERFACE,
        "FlintForCausalLM": _INTERFACE,
        "FuyuForCausalLM": _interface(text_config={**SMALL, "model_type": "persimmon"}),
        "GPTBigCodeForCausalLM": _INTERFACE,
        "GPTJForCausalLM": _CACHE,
        "GPTNeoForCausalLM": _cache(attention_types=[[["global", "local"], 1], [["local"], 1]]),
        "GPTNeoXJapaneseForCausalLM": _CACHE,
        "Gemma3nForCausalLM": _interface(
            num_hidden_layers=4,
            num_kv_shared_layers=2,
            layer_types=["sliding_attention", "full_attention"] * 2,
            intermediate_size=80,
            laurel_rank=8,
        ),
        "Gemma3nForConditionalGeneration": _refused("TimmWrapperModel requires the timm library"),
        "Gemma4AssistantForCausalLM": _refused("can be made of", text_config=_SHARED),
        "Gemma4ForCausalLM": _INTERFACE,
        "Gemma4ForConditionalGeneration": _interface(
            text_config=_GEMMA,
            vision_config={**_VISION, "position_embedding_size": 16},
            audio_config={**_VISION, "output_proj_dims": 16},
        ),
        "Gemma4UnifiedAssistantForCausalLM": _refused("can be made of", text_config=_SHARED),
        "Gemma4UnifiedForCausalLM": _INTERFACE,
        "Gemma4UnifiedForConditionalGeneration": _interface(
            text_config=_GEMMA,
            vision_config={"patch_size": 4, "mm_embed_dim": 16, "mm_posemb_size": 16, "output_proj_dims": 16},
            audio_config={"audio_embed_dim": 16},
        ),
        "GitForCausalLM": _cache(vision_config=_VISION),
        "GlmMoeDsaForCausalLM": _cache(**_HEADS),
        "GotOcr2ForConditionalGeneration": _interface(
            text_config={**SMALL, "model_type": "qwen2"},
            vision_config={
                **_VISION,
                "mlp_dim": 16,
                "output_channels": 16,
                "image_size": 64,
                "window_size": 2,
                "global_attn_indexes": [0],
            },
            image_token_index=90,
        ),
        "GraniteMoeSWAForCausalLM": _INTERFACE,
        "GraniteSWAForCausalLM": _INTERFACE,
        "HYV3ForCausalLM": _INTERFACE,
        "HYV4ForCausalLM": _CACHE,
        "HeliumForCausalLM": _INTERFACE,
        "HrmTextForCausalLM": _INTERFACE,
        "HunYuanMoEV1ForCausalLM": _INTERFACE,
        "HyperCLOVAXForCausalLM": _INTERFACE,
        "Inkling2ForCausalLM": _RECURRENT,
        "InklingForCausalLM": _RECURRENT,
        "Jais2ForCausalLM": _INTERFACE,
        "JambaForCausalLM": _RECURRENT,
        "JetMoeForCausalLM": _INTERFACE,
        "Kolibri1ForCausalLM": _interface(),
        "LagunaForCausalLM": _INTERFACE,
        "Lfm3ForCausalLM": _RECURRENT,
        "LongcatFlashForCausalLM": _interface(
            **_HEADS,
            num_layers=2,
            head_dim=8,
            ffn_hidden_size=32,
            expert_ffn_hidden_size=16,
            moe_topk=2,
            zero_expert_num=2,
        ),
        "MBartForCausalLM": _CACHE,
        "MambaForCausalLM": _RECURRENT,
        "MarianForCausalLM": _CACHE,
        "MegatronBertForCausalLM": _CACHE,
        "MellumForCausalLM": _INTERFACE,
        "MiMoV2FlashForCausalLM": _INTERFACE,
        "MiniCPM3ForCausalLM": _interface(**_HEADS),
        "MiniMaxForCausalLM": _RECURRENT,
        "MiniMaxM3VLForCausalLM": _cache(
            layer_types=["full_attention", *["minimax_m3_sparse"] * 2],
            index_n_heads=2,
            index_block_size=8,
            index_topk_blocks=2,
        ),
        "MinistralForCausalLM": _INTERFACE,
        "MllamaForCausalLM": _refused(
            "must be of a causal model that transformers has", text_config=dict(SMALL), vision_config={}
        ),
        "ModernBertDecoderForCausalLM": _INTERFACE,
        "MoshiForCausalLM": _INTERFACE,
        "MossTranscribeDiarizeForConditionalGeneration": _interface(
            text_config={**SMALL, "model_type": "qwen3", "head_dim": 16}, audio_config=_VISION, audio_token_id=90
        ),
        "MptForCausalLM": _CACHE,
        "MusicgenForCausalLM": _refused("must have one decoder"),
        "MusicgenMelodyForCausalLM": _refused("must have one decoder"),
        "MvpForCausalLM": _CACHE,
        "NanoChatForCausalLM": _INTERFACE,
        "OPTForCausalLM": _INTERFACE,
        "OpenAIGPTLMHeadModel": _refused("it takes no past_key_values"),
        "PLBartForCausalLM": _CACHE,
        "PegasusForCausalLM": _CACHE,
        "PersimmonForCausalLM": _INTERFACE,
        "Phi4MultimodalForCausalLM": _interface(
            vision_config={**_VISION, "image_size": 28, "patch_size": 14, "crop_size": 28, "image_token_id": 90},
            audio_config={
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_blocks": 1,
                "num_attention_heads": 2,
                "ext_pw_out_channel": 16,
                "nemo_conv_channels": 16,
                "audio_token_id": 91,
            },
        ),
        "PhiForCausalLM": _INTERFACE,
        "PhimoeForCausalLM": _INTERFACE,
        "ProphetNetForCausalLM": _refused("logits need more than the last states"),
        "Qwen4ExpForCausalLM": _RECURRENT,
        "RecurrentGemmaForCausalLM": _RECURRENT,
        "ReformerModelWithLMHead": _refused(
            "it takes no past_key_values", axial_pos_embds_dim=(32, 32), axial_pos_shape=(16, 16)
        ),
        "RemBertForCausalLM": _CACHE,
        "RoCBertForCausalLM": _INTERFACE,
        "RoFormerForCausalLM": _CACHE,
        "RobertaForCausalLM": _CACHE,
        "RobertaPreLayerNormForCausalLM": _CACHE,
        "RwkvForCausalLM": _RECURRENT,
        "SolarOpenForCausalLM": _INTERFACE,
        "StableLmForCausalLM": _INTERFACE,
        "TrOCRForCausalLM": _CACHE,
        "VaultGemmaForCausalLM": _INTERFACE,
        "WhisperForCausalLM": _INTERFACE,
        "XGLMForCausalLM": _CACHE,
        "XLMRobertaForCausalLM": _CACHE,
        "XLMRobertaXLForCausalLM": _CACHE,
        "XLMWithLMHeadModel": _refused("it takes no past_key_values"),
        "XLNetLMHeadModel": _refused("it takes no past_key_values", d_head=16),
        "XmodForCausalLM": _cache(default_language="en_XX"),
        "YoutuForCausalLM": _interface(**_HEADS),
        "Zamba2ForCausalLM": _refused(_KINDS, num_hidden_layers=54),
        "ZambaForCausalLM": _refused(_KINDS, num_hidden_layers=76),
        "ZayaForCausalLM": _refused(_KINDS, num_experts_per_tok=1),
        "xLSTMForCausalLM": _RECURRENT,
    }
)
"""By class, those of the mapping of `AutoModelForCausalLM` that have no table here."""


def config_of(name: str) -> Any:
    """Return the configuration of a tiny model of a class."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    kinds = [kind for kind, one in NAMES.items() if name in (one if isinstance(one, tuple) else (one,))]
    config: Any = CONFIG_MAPPING[kinds[-1]]
    known, mapped = config.__dataclass_fields__, config.attribute_map
    fields = {name: value for name, value in FIELDS.items() if name in known or mapped.get(name) in known}
    given = {mapped.get(name, name) for name in fields if name not in mapped}
    fields = {name: value for name, value in fields.items() if name not in mapped or mapped[name] not in given}
    return config(**{**fields, **CAUSAL[name].fields})


def summary() -> str:
    """Return a sentence below the table with the numbers of classes of each way."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    from pagewood.engine.models.families.registry import FAMILIES

    names = {name for one in NAMES.values() for name in (one if isinstance(one, tuple) else (one,))}
    rest = [CAUSAL[name].way for name in names - set(FAMILIES)]
    return (
        f"Of the {len(names)} causal classes of `transformers` {transformers.__version__}, "
        f"{len(names & set(FAMILIES))} are native, {rest.count('interface')} run through its attention interface, "
        f"{rest.count('cache')} over a cache in pages, and {rest.count('refused')} are refused."
    )
