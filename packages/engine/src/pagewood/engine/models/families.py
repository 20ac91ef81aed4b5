"""The supported architectures: how fields of config.json become parts, and the names of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

from pagewood.engine.models.parts.layer import FrameConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Properties of an architecture that have no field in config.json."""

    qkv_bias: bool | None = False
    """None: `attention_bias` decides."""
    output_bias: bool | None = False
    """None: `attention_bias` decides."""
    mlp_bias: bool | None = False
    """None: `mlp_bias` decides."""
    qk_norm: Literal["none", "heads", "whole"] = "none"
    """Whether q and k have norms, of each head or of all heads together."""
    windows: Literal["none", "all", "some", "periodic"] = "none"
    """The layers with the window of `sliding_window`; "some": those that `use_sliding_window` selects; "periodic": all
    but each n-th, where n is `sliding_window_pattern`."""
    has_local_rope: bool = False
    """Whether layers with a window have a rope of their own."""
    scale_field: str | None = None
    """Field whose inverse square root is the scale of the attention; None: the size of a head."""
    activation_field: str = "hidden_act"
    norm_offset: float = 0.0
    """See `NormConfig`."""
    scales_embeddings: bool = False
    """Whether embeddings are multiplied by the square root of their size."""
    other_parts: tuple[str, ...] = ()
    """Prefixes of tensors of other models in the checkpoint; with any, the decoder's fields are in `text_config`."""
    frame: FrameConfig = field(default_factory=FrameConfig)
    defaults: Mapping[str, object] = field(default_factory=dict[str, object])
    """Values of fields that are absent."""

    @property
    def reads(self) -> frozenset[str]:
        """Fields that other families refuse, or know by another name."""
        return frozenset({self.activation_field, self.scale_field or self.activation_field})


_GEMMA3 = Family(
    qkv_bias=None,
    output_bias=None,
    qk_norm="heads",
    windows="periodic",
    has_local_rope=True,
    scale_field="query_pre_attn_scalar",
    activation_field="hidden_activation",
    norm_offset=1.0,
    scales_embeddings=True,
    frame=FrameConfig(
        behind_mixer="post_attention_layernorm",
        before_feed_forward="pre_feedforward_layernorm",
        behind_feed_forward="post_feedforward_layernorm",
    ),
    defaults={
        "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131_072,
        "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "tie_word_embeddings": True,
    },
)  # fmt: skip


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "LlamaForCausalLM": Family(qkv_bias=None, output_bias=None, mlp_bias=None),
        "MistralForCausalLM": Family(windows="all", defaults={"num_key_value_heads": 8}),
        "Qwen2ForCausalLM": Family(qkv_bias=True, windows="some", defaults={"num_key_value_heads": 32}),
        "MiMoForCausalLM": Family(qkv_bias=True, windows="some", defaults={"num_key_value_heads": 32}),
        "Qwen3ForCausalLM": Family(
            qkv_bias=None,
            output_bias=None,
            qk_norm="heads",
            windows="some",
            defaults={"num_key_value_heads": 32, "head_dim": 128},
        ),
        "Olmo2ForCausalLM": Family(
            qkv_bias=None,
            output_bias=None,
            qk_norm="whole",
            frame=FrameConfig(
                before_mixer=None,
                behind_mixer="post_attention_layernorm",
                before_feed_forward=None,
                behind_feed_forward="post_feedforward_layernorm",
            ),
            defaults={"rms_norm_eps": 1e-5},
        ),
        "Gemma3ForCausalLM": _GEMMA3,
        "Gemma3ForConditionalGeneration": replace(
            _GEMMA3,
            other_parts=(
                "vision_tower.",
                "multi_modal_projector.",
                "model.vision_tower.",
                "model.multi_modal_projector.",
            ),
        ),
    }
)
"""By the name of the class in config.json."""
