"""How many states of recurrent layers there are: one for each request that runs, and those that the cache keeps."""

from __future__ import annotations

from dataclasses import dataclass

from pagewood.engine.api import EngineConfig
from pagewood.engine.models.config import ModelConfig
from pagewood.kvpool import StateLayout

_MEMORY_SHARE = 0.25
"""Part of the free memory that states may take unless the configuration sets their number."""
_PLACES_PER_ROW = 5
_LEAST_INTERVAL = 256
"""Fewest positions between the states that the cache keeps within a prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSizes:
    """How many states a rank has, and the positions between those within a prompt, see `EngineInfo`."""

    num_places: int = 0
    interval: int = 0


def state_sizes(
    config: EngineConfig, model: ModelConfig, *, page_bytes: int, state_bytes: int, available: int
) -> StateSizes:
    """Return how many states have a place, and how far apart those within a prompt are; see `EngineConfig`.

    States within a prompt take no more memory than its pages, if layers have pages.

    Args:
        config: of the engine.
        model: all of it.
        page_bytes: of a page on a rank.
        state_bytes: of a state on a rank; 0: no layer of its stage is recurrent.
        available: bytes of memory for the states of a rank, and for its pages.

    Raises:
        ValueError: a state of each request that may run does not fit, or the configuration cannot be combined with
            recurrent layers.
    """
    if model.states is None:
        if config.state_places is not None:
            raise ValueError(
                f"state_places must be None for models without recurrent layers, got {config.state_places}"
            )
        return StateSizes()
    if config.host_cache_gb is not None and config.decision_log is not None:  # a replay would not know when copies end
        raise ValueError(
            "host_cache_gb must be None for models with recurrent layers with a decision log, "
            f"got {config.host_cache_gb}"
        )
    size, num_pools = state_bytes, config.num_pools
    num_rows = -(-config.num_rows // num_pools)
    if config.speculative != "off" and config.device != "cuda":  # a CUDA device measures what rows keep
        drafted_bytes = (
            _drafted_bytes(model.states, config.speculative_num_tokens) * size // model.states.bytes_per_page
        )
        available = max(0, available - config.num_rows * drafted_bytes)
    given = None if config.state_places is None else config.state_places // num_pools
    least = num_rows if given is None else given
    of_rank = " of each rank" * (num_pools > 1)
    if least < num_rows:
        raise ValueError(f"state_places{of_rank} must be at least max_running{of_rank} {num_rows}, got {least}")
    if least * size > available:
        name = "max_running" if given is None else "state_places"
        raise ValueError(
            f"{name}{of_rank} must be at most {available // size} for states of {size / 1e6:.1f} MB in "
            f"{available / 1e9:.1f} GB of memory, got {least}"
        )
    num_places = given or max(num_rows, min(_PLACES_PER_ROW * num_rows, int(available * _MEMORY_SHARE) // max(1, size)))
    num_pages = max(-(-size // page_bytes) if model.paged else 0, -(-_LEAST_INTERVAL // config.page_size))
    return StateSizes(num_places=num_places, interval=num_pages * config.page_size)


def described_states(sizes: StateSizes, config: EngineConfig, layout: StateLayout) -> str:
    """Return the sizes in words."""
    return (
        f"recurrent layers: {sizes.num_places * config.num_pools} states of {layout.bytes_per_page / 1e6:.1f} MB, one "
        f"for each of {config.num_rows} requests and the others for cached prefixes, within prompts every "
        f"{sizes.interval} tokens"
    )


def _drafted_bytes(states: StateLayout, num_drafts: int) -> int:
    """Return about the bytes that drafts of a row take, see `runner.cpu.program.drafted_runs`.

    That is the state of one layer, and for each position and layer what its convolution and its heads read.
    """
    channels = sum(array.shape[-1] for array in states.arrays if array.name == "tail")
    return states.bytes_per_page // states.num_layers + 4 * states.num_layers * (1 + num_drafts) * 2 * channels
