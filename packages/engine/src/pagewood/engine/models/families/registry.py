"""All families by the name of the class in config.json."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pagewood.engine.models.families import deepseek, gemma, llama, olmo, qwen
from pagewood.engine.models.families.family import Family

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {name: family for room in (llama, qwen, olmo, gemma, deepseek) for name, family in room.FAMILIES.items()}
)
