"""How much memory a model takes, before it is loaded and after."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pagewood.engine.api import EngineConfig
from pagewood.engine.assembly.host_pages import host_pages
from pagewood.engine.models.config import ModelConfig
from pagewood.engine.models.stored.checkpoint_files import checkpoint_files
from pagewood.server.messages import wire
from pagewood.server.metrics.processes import ProcessUsage

OVERHEAD_BYTES = 700_000_000
"""Memory of an engine process with torch and compiled kernels, and of its tokenizers and detokenizer."""
_RATIO = {"auto": 1.0, "float32": 2.0, "bfloat16": 1.0, "int8": 0.55, "int4": 0.35}
"""Bytes of weights in memory, by their form there, to bytes of their files, in which most have 16 bits."""


def estimated_bytes(config: EngineConfig, folder: Path) -> int:
    """Return about the bytes that a model will take: weights, the whole KV memory, and processes.

    Raises:
        ValueError: a file of the folder is damaged.
        OSError: a file is missing.
    """
    stored = sum(path.stat().st_size for path in checkpoint_files(folder))
    host = round((config.host_cache_gb or 0.0) * 1e9)
    return round(stored * _RATIO[config.weights]) + _kv_bytes(config, folder) + host + OVERHEAD_BYTES


def measured_bytes(model: wire.Model, usage: Iterable[ProcessUsage], config: EngineConfig) -> int:
    """Return the bytes that a model takes that has just been loaded: the system provides KV memory as it is used."""
    host = round((config.host_cache_gb or 0.0) * 1e9)
    return sum(one.resident_bytes for one in usage) + model.num_pages * model.page_bytes + host


def _kv_bytes(config: EngineConfig, folder: Path) -> int:
    """Return the bytes of KV memory; 0 for an architecture without a table, of which nothing is known."""
    try:
        model = ModelConfig.from_folder(folder)
    except ValueError:
        return 0
    groups = model.groups(max_length=1)
    dtype = "float32" if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    layout = model.memory_layout(page_size=config.page_size, dtype=dtype, order="HND", groups=groups)
    page_bytes = layout.bytes_per_page * len(groups.windows)
    if config.max_total_tokens is not None:
        return config.max_total_tokens // config.page_size * page_bytes
    try:
        return host_pages(config, model.max_position, groups, page_bytes)[0] * page_bytes
    except ValueError:  # it does not fit now; the engine says so when it is loaded
        return 0
