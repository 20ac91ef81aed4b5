"""From a configuration to a CPU engine: kernels, weights, and how much of the memory is KV memory."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from pagewood.engine.api import EngineConfig, Inbox, Outbox
from pagewood.engine.assemble import assemble
from pagewood.engine.available_memory import available_memory_bytes
from pagewood.engine.core.kv import KVSpace
from pagewood.engine.core.loop import Engine, EngineInfo
from pagewood.engine.folder import model_folder, model_name
from pagewood.engine.load import load_model
from pagewood.engine.models.config import ModelConfig
from pagewood.engine.runner.cpu.kernels import warm_up
from pagewood.engine.runner.cpu.ops import CPUOps
from pagewood.engine.runner.cpu.runner import CPURunner
from pagewood.engine.tiers import tiered_cache
from pagewood.kvpool import MultiHeadLayout
from pagewood.kvpool.storage import KVStorage

_log = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how many of its parts are done, and how many there are."""

_MEMORY_SHARE = 0.25
"""Part of the free memory that the KV cache may take where the configuration does not say."""


def build_cpu_engine(config: EngineConfig, *, inbox: Inbox, outbox: Outbox, progress: Progress | None = None) -> Engine:
    """Load a model and make an engine for it that computes on this machine's cores; see `build_engine`."""
    folder = model_folder(config.model)
    model_config = ModelConfig.from_folder(folder)
    num_threads = config.num_threads or _num_cores()
    kernel = warm_up(model_config.head_dim, int8=config.kv_cache_dtype == "int8", progress=progress)
    model = load_model(folder, CPUOps(), progress=progress)
    layout = MultiHeadLayout(
        num_layers=model_config.num_layers,
        num_kv_heads=model_config.num_kv_heads,
        head_dim=model_config.head_dim,
        page_size=config.page_size,
        dtype=config.resolved().kv_cache_dtype,
        order="HND",
    )
    num_pages, max_length = _memory(config, model_config, layout)
    info = EngineInfo(
        model_name=model_name(config.model),
        max_length=max_length,
        vocab_size=model_config.vocab_size,
        eos_token_ids=model_config.eos_token_ids,
        num_pages=num_pages,
        page_size=config.page_size,
    )
    _log.info(
        "%s: %d KV pages of %d tokens (%.2f GB), at most %d tokens a request, %d threads",
        info.model_name,
        num_pages,
        config.page_size,
        num_pages * layout.bytes_per_page / 1e9,
        max_length,
        num_threads,
    )

    storage = KVStorage(layout, num_pages)
    storage.memory.touch()
    make_cache = tiered_cache(config, folder, storage.memory)

    def make_runner(kv: KVSpace) -> CPURunner:
        return CPURunner(
            model,
            storage,
            kernel,
            max_rows=config.num_rows,
            max_length=max_length,
            num_threads=num_threads,
        )

    config = replace(
        config, max_total_tokens=num_pages * config.page_size, max_length=max_length, num_threads=num_threads
    )
    return assemble(config, info=info, make_runner=make_runner, make_cache=make_cache, inbox=inbox, outbox=outbox)


def _memory(config: EngineConfig, model: ModelConfig, layout: MultiHeadLayout) -> tuple[int, int]:
    """Return (pages of KV memory, longest request): as configured, or as many as all rows could ever use, or fit."""
    longest = min(config.max_length or model.max_position, model.max_position)
    available = available_memory_bytes()
    if config.max_total_tokens is not None:
        num_pages = config.max_total_tokens // config.page_size
        if num_pages * layout.bytes_per_page > available:
            raise ValueError(
                f"max_total_tokens must be at most {available // layout.bytes_per_page * config.page_size}, for which "
                f"there are {available / 1e9:.1f} GB of memory, got {config.max_total_tokens}"
            )
    else:
        most_useful = config.num_rows * -(-longest // config.page_size)
        num_pages = min(most_useful, layout.pages_for(int(available * _MEMORY_SHARE)))
    max_length = min(longest, num_pages * config.page_size)
    if max_length < 2:
        raise ValueError(f"KV memory must hold a request of 2 tokens, got {num_pages} pages of {config.page_size}")
    if config.max_length is not None and max_length < config.max_length:
        raise ValueError(
            f"max_length must be at most {max_length} "
            f"({num_pages} pages of {config.page_size} tokens, and the model allows {model.max_position}), "
            f"got {config.max_length}"
        )
    return num_pages, max_length


def _num_cores() -> int:
    """Return the cores that this process may use; hyperthreads count as half where they can be told."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    siblings = Path("/sys/devices/system/cpu/cpu0/topology/thread_siblings_list")
    try:
        per_core = len(siblings.read_text().strip().replace("-", ",").split(","))
    except OSError:
        per_core = 1
    return max(1, usable // per_core)
