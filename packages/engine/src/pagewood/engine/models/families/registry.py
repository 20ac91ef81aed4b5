"""All families by the name of the class in config.json."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pagewood.engine.models.families import apertus, gemma, granite, llama, olmo, qwen, starcoder
from pagewood.engine.models.families.family import Family

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        name: family
        for room in (llama, qwen, olmo, gemma, granite, starcoder, apertus)
        for name, family in room.FAMILIES.items()
    }
)
