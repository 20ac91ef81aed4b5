"""All families by the name of the class in config.json."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pagewood.engine.models.families import (
    apertus,
    bamba,
    bert,
    cohere,
    deepseek,
    ernie,
    exaone,
    gemma,
    glm,
    gpt2,
    gpt_neox,
    gpt_oss,
    granite,
    kimi,
    liquid,
    llama,
    mamba,
    minimax,
    modern_bert,
    nemotron,
    olmo,
    phi,
    qwen,
    starcoder,
)
from pagewood.engine.models.families.family import Family

_LINEAGES = (
    llama,
    qwen,
    olmo,
    gemma,
    gpt_oss,
    granite,
    cohere,
    gpt_neox,
    gpt2,
    starcoder,
    nemotron,
    mamba,
    apertus,
    deepseek,
    exaone,
    glm,
    phi,
    ernie,
    minimax,
    liquid,
    bamba,
    kimi,
    bert,
    modern_bert,
)
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {name: family for lineage in _LINEAGES for name, family in lineage.FAMILIES.items()}
)
