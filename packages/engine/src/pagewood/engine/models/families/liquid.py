"""LFM2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from pagewood.engine.models.families.family import Family
from pagewood.engine.models.families.mixture import Mixture
from pagewood.engine.models.families.stored_layout import StoredLayout
from pagewood.engine.models.parts.experts import ExpertNames
from pagewood.engine.models.parts.layer import FrameConfig
from pagewood.engine.models.parts.norm import NormConfig

_NAMES = {
    "operator_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "self_attn.out_proj": "self_attn.o_proj",
    "self_attn.q_layernorm": "self_attn.q_norm",
    "self_attn.k_layernorm": "self_attn.k_norm",
}
_ENDS = {"model.embedding_norm": "model.norm"}


def _dense_names(part: str) -> dict[str, str]:
    """Return the names of the projections of a feed-forward that is called `part` here."""
    return {f"feed_forward.w{i}": f"{part}.{name}_proj" for i, name in ((1, "gate"), (3, "up"), (2, "down"))}


_LFM2 = Family(
    qkv_bias=False,
    output_bias=False,
    recurrence="convolution",
    recurrent_name="conv",
    qk_norm="heads",
    theta=1e6,
    field_names={"rms_norm_eps": "norm_eps", "tie_word_embeddings": "tie_embedding"},
    norm=NormConfig(epsilon=1e-5),
    defaults={"tie_word_embeddings": True, "num_key_value_heads": 8},
)

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "Lfm2ForCausalLM": replace(
            _LFM2,
            widens_by_two_thirds=True,
            stored=StoredLayout(in_layer={**_NAMES, **_dense_names("mlp")}, outside=_ENDS),
        ),
        "Lfm2MoeForCausalLM": replace(
            _LFM2,
            mixture=Mixture(
                names=ExpertNames(choice_bias="expert_bias", gate="w1", up="w3", down="w2"),
                dense_layers="first",
                score="sigmoid",
                has_choice_bias=True,
                choice_bias_field="use_expert_bias",
                epsilon=1e-6,
                renormalises_by_default=True,
                factor="routed_scaling_factor",
            ),
            field_names={**_LFM2.field_names, "first_k_dense_replace": "num_dense_layers"},
            frame=FrameConfig(feed_forward="feed_forward"),
            stored=StoredLayout(in_layer={**_NAMES, **_dense_names("feed_forward")}, outside=_ENDS),
            defaults={
                **_LFM2.defaults, "first_k_dense_replace": 2, "num_experts": 32, "num_experts_per_tok": 4,
                "moe_intermediate_size": 1792, "intermediate_size": 7168, "max_position_embeddings": 128_000,
            },
        ),
    }
)  # fmt: skip
