"""StarCoder 2."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pagewood.engine.models.families.family import Family
from pagewood.engine.models.families.stored_layout import StoredLayout
from pagewood.engine.models.parts.norm import NormConfig

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "Starcoder2ForCausalLM": Family(
            mlp_bias=None,
            windows="all",
            field_names={"attention_bias": "use_bias", "mlp_bias": "use_bias", "rms_norm_eps": "norm_epsilon"},
            ignores=frozenset({"activation_function", "layer_norm_epsilon"}),
            is_gated=False,
            norm=NormConfig(epsilon=1e-5, is_centred=True, has_bias=True),
            stored=StoredLayout(in_layer={"mlp.c_fc": "mlp.up_proj", "mlp.c_proj": "mlp.down_proj"}),
            defaults={
                "attention_bias": True, "hidden_act": "gelu_pytorch_tanh", "mlp_bias": True, "num_key_value_heads": 2,
                "sliding_window": None, "tie_word_embeddings": True,
            },
        ),
    }
)  # fmt: skip
