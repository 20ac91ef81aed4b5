"""Mamba 2 alone, as Codestral Mamba has it: no layer has attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from pagewood.engine.models.families.family import Family
from pagewood.engine.models.families.nemotron import NEMOTRON_H

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "Mamba2ForCausalLM": replace(
            NEMOTRON_H,
            mixture=None,
            other_parts=(),
            stored=None if NEMOTRON_H.stored is None else replace(NEMOTRON_H.stored, outer="model."),
            ignores=frozenset({"num_heads"}),
            field_names={
                **NEMOTRON_H.field_names, "mamba_hidden_act": "hidden_act", "mamba_n_heads": "num_heads",
                "mamba_d_head": "head_dim", "mamba_d_state": "state_size",
            },
            defaults={
                "vocab_size": 32_768, "hidden_size": 4096, "num_hidden_layers": 64, "num_attention_heads": 1,
                "max_position_embeddings": 1 << 20, "mamba_n_heads": 128, "mamba_d_head": 64, "mamba_n_groups": 8,
                "mamba_d_state": 128,
            },
        ),
    }
)  # fmt: skip
