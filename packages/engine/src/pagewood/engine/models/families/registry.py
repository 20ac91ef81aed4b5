"""All families by the name of the class in config.json."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pagewood.engine.models.families import apertus, deepseek, gemma, granite, llama, olmo, qwen, starcoder
from pagewood.engine.models.families.family import Family

_LINEAGES = (
    llama,
    qwen,
    olmo,
    gemma,
    granite,
    starcoder,
    apertus,
    deepseek,
)
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {name: family for lineage in _LINEAGES for name, family in lineage.FAMILIES.items()}
)
