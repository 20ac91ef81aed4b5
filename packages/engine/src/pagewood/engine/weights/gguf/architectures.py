"""All architectures of GGUF files that are read."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pagewood.engine.weights.gguf.architecture import Architecture
from pagewood.engine.weights.gguf.dense import DENSE
from pagewood.engine.weights.gguf.gemma4 import GEMMA4
from pagewood.engine.weights.gguf.hybrids import HYBRIDS
from pagewood.engine.weights.gguf.mixtures import MIXTURES

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType({**MIXTURES, **DENSE, **GEMMA4, **HYBRIDS})
"""By `general.architecture`."""
