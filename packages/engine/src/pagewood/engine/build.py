"""The composition root: from a configuration to an engine; the only module that knows the leaves and the runner."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from pagewood.engine.api import EngineConfig, Inbox, Outbox
from pagewood.engine.batch import BatchBuilder
from pagewood.engine.build_cuda import build_cuda_runner, kernel_needs, open_cuda
from pagewood.engine.folder import model_folder, model_name
from pagewood.engine.host_memory import available_memory_bytes
from pagewood.engine.intake import Intake
from pagewood.engine.kv import KVSpace, NoPrefixCache, PrefixCache
from pagewood.engine.load import load_model
from pagewood.engine.loop import Engine, EngineInfo, Runner
from pagewood.engine.models.config import ModelConfig
from pagewood.engine.plan import Planner
from pagewood.engine.runner.cpu import CPURunner
from pagewood.engine.runner.device import Device
from pagewood.engine.runner.flashinfer_api import FlashInfer
from pagewood.engine.runner.flashinfer_compile import compile_kernels
from pagewood.engine.runner.kernels import warm_up
from pagewood.engine.runner.ops_cpu import CPUOps
from pagewood.engine.state import EngineState
from pagewood.engine.tiers import TieredCaches, model_fingerprint
from pagewood.kvpool import MultiHeadLayout, PageAllocator
from pagewood.kvpool.memory import PageMemory
from pagewood.kvpool.storage import KVStorage
from pagewood.radixcache import RadixCache
from pagewood.schedpolicy import (
    MATCH_ORDERS,
    PLAIN_ORDERS,
    Budget,
    NewTokenRatio,
    SkipAhead,
    choose_victim,
    order_named,
)

_log = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how many of its parts are done, and how many there are."""

_MEMORY_SHARE = 0.25
"""Part of the free memory that the KV cache may take where the configuration does not say."""


def build_engine(config: EngineConfig, *, inbox: Inbox, outbox: Outbox, progress: Progress | None = None) -> Engine:
    """Load a model and make an engine for it, on this machine's CPU or on its CUDA device.

    Args:
        config: what to build.
        inbox: where commands come from.
        outbox: where answers go.
        progress: is told what is being loaded or compiled.

    Raises:
        ValueError: the model is not supported, or does not fit the configured limits or the device.
        FileNotFoundError: the model's folder lacks a file.
    """
    if config.device == "cuda":
        if config.dtype == "float32":
            raise ValueError("dtype must be float16 or bfloat16 on CUDA, where FlashInfer attends, got float32")
        needs = kernel_needs(config, ModelConfig.from_folder(model_folder(config.model)))
        device, flashinfer = open_cuda()
        try:
            compile_kernels([needs], progress=progress)
        except RuntimeError as error:
            raise ValueError(
                f"device cuda needs FlashInfer's kernels, which cannot be compiled here: {error}"
            ) from error
        return build_on(device, flashinfer, config, inbox=inbox, outbox=outbox, progress=progress)
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
        dtype=config.kv_cache_dtype,
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
    make_cache = _make_cache(config, folder, storage.memory)

    def make_runner(kv: KVSpace) -> CPURunner:
        return CPURunner(
            model,
            storage,
            kernel,
            max_rows=config.num_rows,
            max_length=max_length,
            num_threads=num_threads,
        )

    return assemble(config, info=info, make_runner=make_runner, make_cache=make_cache, inbox=inbox, outbox=outbox)


def build_on(
    device: Device,
    flashinfer: FlashInfer,
    config: EngineConfig,
    *,
    inbox: Inbox,
    outbox: Outbox,
    progress: Progress | None = None,
) -> Engine:
    """Make an engine for a device that FlashInfer computes on; arguments and errors are those of `build_engine`."""
    folder = model_folder(config.model)
    built = build_cuda_runner(device, flashinfer, config, folder, progress=progress)
    info = EngineInfo(
        model_name=model_name(config.model),
        max_length=built.max_length,
        vocab_size=built.model.vocab_size,
        eos_token_ids=built.model.eos_token_ids,
        num_pages=built.num_pages,
        page_size=config.page_size,
    )
    make_cache = _make_cache(config, folder, built.memory)
    return assemble(
        config, info=info, make_runner=lambda kv: built.runner, make_cache=make_cache, inbox=inbox, outbox=outbox
    )


def assemble(
    config: EngineConfig,
    *,
    info: EngineInfo,
    make_runner: Callable[[KVSpace], Runner],
    make_cache: Callable[[], PrefixCache] | None = None,
    inbox: Inbox,
    outbox: Outbox,
    clock: Callable[[], float] = time.monotonic,
) -> Engine:
    """Put the parts together around any runner.

    Args:
        config: its policies and limits are used; model, device and memory are `info`'s and the runner's business.
        info: what the engine is; `max_length` must fit into `num_pages`.
        make_runner: gets the KV space, for runners that audit it.
        make_cache: makes empty prefix caches; None: a radix cache, or none if the configuration says so.
        inbox: where commands come from.
        outbox: where answers go.
        clock: seconds, monotonic.
    """
    page_size = info.page_size
    order = _order_name(config.schedule_policy)
    kv = KVSpace(
        make_cache=make_cache or (partial(RadixCache, page_size) if config.prefix_cache else NoPrefixCache),
        allocator=PageAllocator(info.num_pages),
        page_size=page_size,
        num_rows=config.num_rows,
        follows_waiting=config.prefix_cache and order in MATCH_ORDERS,
    )
    state = EngineState(waiting=order_named(order, seed=config.seed, told=True))
    planner = Planner(
        kv=kv,
        budget=Budget(
            max_step_tokens=config.max_chunk_tokens + config.num_rows,
            max_chunk_tokens=config.max_chunk_tokens,
            max_running=config.num_rows,
            max_prefills=config.max_prefills,
        ),
        reserve=NewTokenRatio(init=min(1.0, 0.7 * config.schedule_conservativeness)),
        victim=choose_victim,
        skip_ahead=SkipAhead(max_skipped=8, max_passes=32),
        defer_repeats=config.prefix_cache,
    )
    intake = Intake(
        state=state,
        kv=kv,
        max_length=info.max_length,
        vocab_size=info.vocab_size,
        eos_token_ids=frozenset(info.eos_token_ids),
        seed=config.seed,
    )
    return Engine(
        info=info,
        state=state,
        intake=intake,
        planner=planner,
        kv=kv,
        builder=BatchBuilder(num_rows=config.num_rows, page_size=page_size),
        runner=make_runner(kv),
        inbox=inbox,
        outbox=outbox,
        clock=clock,
        overlap=config.overlap,
    )


def _make_cache(config: EngineConfig, folder: Path, memory: PageMemory) -> Callable[[], PrefixCache] | None:
    """Return what makes prefix caches over the host and perhaps a disk; None: the configuration asks for none."""
    if config.host_cache_gb is None:
        return None
    fingerprint = model_fingerprint(folder)
    return TieredCaches(config, memory=memory, page_size=config.page_size, fingerprint=fingerprint).make


def _order_name(name: str) -> str:
    """Return the name of an order that reads nothing but what the requests of the engine have."""
    names = (*PLAIN_ORDERS, "dfs-weight", "fair")
    if name.replace("_", "-") not in names:
        raise ValueError(f"schedule_policy must be one of {', '.join(names)}, got {name!r}")
    return name.replace("_", "-")


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
