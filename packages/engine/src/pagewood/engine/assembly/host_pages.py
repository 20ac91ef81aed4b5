"""The size of the KV memory on a machine's own memory."""

from __future__ import annotations

from pagewood.engine.api import EngineConfig
from pagewood.engine.assembly.available_memory import available_memory_bytes
from pagewood.engine.core.memory.page_groups import longest_request, num_frames_needed
from pagewood.kvpool import LayerGroups

_MEMORY_SHARE = 0.25
"""Part of the free memory that the KV cache may take unless the configuration sets its size."""
TYPICAL_LENGTH = 2048
"""Tokens for which every row has room unless the configuration sets the size of the KV memory."""


def host_pages(config: EngineConfig, max_position: int, groups: LayerGroups, page_bytes: int) -> tuple[int, int]:
    """Return (pages of KV memory, longest request in tokens), with pages of `page_bytes`: see `build_cpu_engine`."""
    longest = min(config.max_length or max_position, max_position)
    available, num_groups = available_memory_bytes(), len(groups.windows)
    sizes = {"page_size": config.page_size, "num_ahead": config.max_chunk_tokens}
    if config.max_total_tokens is not None:
        num_pages = config.max_total_tokens // config.page_size
        if num_pages * page_bytes > available:
            raise ValueError(
                f"max_total_tokens must be at most {available // page_bytes * config.page_size}, for which "
                f"there are {available / 1e9:.1f} GB of memory, got {config.max_total_tokens}"
            )
    else:
        per_row, for_longest = (
            -(-num_frames_needed(groups.windows, length, **sizes) // num_groups)
            for length in (min(longest, TYPICAL_LENGTH), longest)
        )
        useful = max(config.num_rows * per_row, for_longest)
        num_pages = min(useful, int(available * _MEMORY_SHARE) // page_bytes)
    max_length = longest_request(groups.windows, num_pages * num_groups, limit=longest, **sizes)
    if longest < 2:
        raise ValueError(f"max_position_embeddings must be >= 2, for a prompt and an output, got {max_position}")
    if max_length < 2:
        raise ValueError(f"KV memory must hold a request of 2 tokens, got {num_pages} pages of {config.page_size}")
    if config.max_length is not None and max_length < config.max_length:
        raise ValueError(
            f"max_length must be at most {max_length} "
            f"({num_pages} pages of {config.page_size} tokens, and the model allows {max_position}), "
            f"got {config.max_length}"
        )
    return num_pages, max_length
