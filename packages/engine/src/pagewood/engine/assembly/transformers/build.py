"""Build an engine whose model is computed by `transformers`, on a CPU or a CUDA device."""

# pyright: basic
# torch and transformers are typed in part only.

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from pagewood.engine.api import EngineConfig, Inbox, Outbox, Progress
from pagewood.engine.assemble import assemble
from pagewood.engine.assembly.available_memory import available_memory_bytes
from pagewood.engine.assembly.cuda.device_budget import MIB, Budget, compute_largest_steps, largest_batch
from pagewood.engine.assembly.grammar_compiler import grammar_compiler
from pagewood.engine.assembly.host_pages import host_pages
from pagewood.engine.assembly.named_processors import load_processors
from pagewood.engine.assembly.steps.draft_control import draft_control, measure_cost
from pagewood.engine.assembly.tiers.lower_caches import tiered_cache
from pagewood.engine.core.loop import Engine, EngineInfo
from pagewood.engine.model_folder.folder import model_folder, model_name
from pagewood.engine.model_folder.model_digest import ModelDigest
from pagewood.engine.model_folder.vector_tail import read_vector_tail
from pagewood.engine.runner.cuda.device import CUDADevice, Device
from pagewood.engine.runner.cuda.drafts.lookup import NgramDrafter
from pagewood.engine.runner.cuda.runner import CUDARunner
from pagewood.engine.runner.processors import Process
from pagewood.engine.runner.transformers.host_device import HostDevice
from pagewood.engine.runner.transformers.load import FoundModel, load
from pagewood.engine.runner.transformers.model import TransformersModel
from pagewood.engine.runner.transformers.pages import PagedAttention
from pagewood.kvpool import LayerGroups, MultiHeadLayout
from pagewood.kvpool.storage import KVStorage

_log = logging.getLogger(__name__)


def build_transformers_engine(
    config: EngineConfig,
    reason: str,
    *,
    inbox: Inbox,
    outbox: Outbox,
    progress: Progress | None = None,
    device: Device | None = None,
) -> Engine:
    """Load a model with `transformers` and build an engine for it; see `build_engine`.

    Args:
        config: what to build, resolved.
        reason: why the parts of this package do not compute it, for the log.
        inbox: source of commands.
        outbox: destination of answers.
        progress: gets reports of what is being loaded.
        device: where to compute; None: where the configuration says.

    Raises:
        ValueError: the model or an option is not supported, or does not fit; the message says which.
        FileNotFoundError: the model's folder lacks a file.
    """
    config = config.resolved()
    _check_options(config)
    processors = load_processors(config)
    folder = model_folder(config.model)
    found = FoundModel.of(folder)
    _log.info("%s runs in transformers over our pages, slower than a model of our own parts: %s", found.name, reason)
    digest = ModelDigest(folder)
    if config.disk_cache_path is not None or config.remote_cache is not None:
        digest.begin()
    device = device or _device(config)
    dtype = _dtype_of(config)
    free_bytes = device.free_bytes()
    weight_bytes = found.num_parameters * dtype.itemsize
    if weight_bytes > free_bytes:
        raise ValueError(
            f"the weights of {folder} in {str(dtype).removeprefix('torch.')} must fit into {free_bytes / MIB:.0f} MiB "
            f"of free memory, got {weight_bytes / MIB:.0f} MiB"
        )
    model, shape = load(found, dtype=dtype, device=device.torch_device, progress=progress)
    layout = shape.layout(page_size=config.page_size, dtype=_kv_dtype_of(config))
    parts = _Parts(device=device, model=model, layout=layout, config=config, processors=processors)
    if device.torch_device.type == "cpu":
        whole = LayerGroups.whole(layout.num_layers)
        num_pages, max_length = host_pages(config, found.max_position, whole, layout.bytes_per_page)
    else:
        num_pages, max_length = _device_pages(parts, found, free_bytes)
    runner, storage = parts.runner(num_pages, max_length=max_length)
    info = EngineInfo(
        model_name=model_name(config.model),
        max_length=max_length,
        vocab_size=shape.vocab_size,
        eos_token_ids=found.end_tokens(shape.vocab_size),
        num_pages=num_pages,
        page_size=config.page_size,
        vector_size=shape.hidden_size,
        reports_states=True,
        reports_kept=True,
        page_bytes=layout.bytes_per_page,
    )
    _log.info(
        "%s: %d tokens of KV memory (%d pages of %d), at most %d tokens a request",
        info.model_name,
        num_pages * config.page_size,
        num_pages,
        config.page_size,
        max_length,
    )
    control = draft_control(config, computes_padding=True)
    if control is not None:
        measure_cost(control, config, info, runner)
    return assemble(
        replace(config, max_total_tokens=num_pages * config.page_size, max_length=max_length),
        info=info,
        make_runner=lambda kv: runner,
        make_cache=tiered_cache(config, digest, storage.memory, mark="transformers"),
        drafting=control,
        compiler=grammar_compiler(config, folder, info),
        drafts_constrained=True,
        processors=processors,
        inbox=inbox,
        outbox=outbox,
        vector_tail=read_vector_tail(folder, shape.hidden_size),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """The parts of a runner, except its memory."""

    device: Device
    model: TransformersModel
    layout: MultiHeadLayout
    config: EngineConfig
    processors: Mapping[str, Process]

    def runner(self, num_pages: int, *, max_length: int) -> tuple[CUDARunner, KVStorage]:
        """Allocate `num_pages` pages and one for the runner; return the runner and its memory."""
        config, drafts = self.config, self.config.speculative != "off"
        storage = KVStorage(self.layout, num_pages + 1, device=self.device.torch_device)
        runner = CUDARunner(
            self.model,
            storage,
            None,
            self.device,
            max_rows=config.num_rows,
            max_length=max_length,
            attention=PagedAttention(storage),
            drafter=NgramDrafter() if drafts else None,
            max_drafts=config.speculative_num_tokens if drafts else 0,
            processors=self.processors,
        )
        return runner, storage


def _check_options(config: EngineConfig) -> None:
    """Refuse options that need the parts of this package.

    Raises:
        ValueError: one is set.
    """
    for name, allowed in (
        ("weights", ("auto", "float32", "bfloat16")),
        ("activations", ("auto", "float32")),
        ("speculative", ("off", "ngram", "auto")),
        ("speculative_verify", ("exact",)),
        ("batch_invariant", (False,)),
        ("expert_kernels", ("triton",)),
    ):
        value = getattr(config, name)
        if value not in allowed:
            words = " or ".join(map(str, allowed))
            raise ValueError(f"{name} must be {words} for a model that transformers computes, got {value}")


def _device(config: EngineConfig) -> Device:
    if config.device == "cpu":
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        return HostDevice(free_bytes=available_memory_bytes())
    if not torch.cuda.is_available():
        raise ValueError("device must be cpu where torch finds no CUDA device, got cuda")
    return CUDADevice()


def _dtype_of(config: EngineConfig) -> torch.dtype:
    """Return the dtype of weights and activations: on a CPU, float32 unless `weights` is bfloat16."""
    if config.device == "cpu":
        return torch.bfloat16 if config.weights == "bfloat16" else torch.float32
    return getattr(torch, config.dtype)


def _kv_dtype_of(config: EngineConfig) -> str:
    return "float8_e4m3fn" if config.kv_cache_dtype == "fp8_e4m3" else config.kv_cache_dtype


def _device_pages(parts: _Parts, found: FoundModel, free_bytes: int) -> tuple[int, int]:
    """Return (pages of KV memory, longest request in tokens): all memory of the device that the largest step leaves."""
    config = parts.config
    longest = min(config.max_length or found.max_position, found.max_position)
    budget = Budget(
        free_bytes=free_bytes,
        mem_fraction=config.mem_fraction,
        weight_bytes=free_bytes - parts.device.free_bytes(),
        activation_bytes=_activation_bytes(parts, longest),
        graph_bytes=0,
        page_bytes=parts.layout.bytes_per_page,
    )
    num_pages = budget.num_pages(config)
    max_length = min(longest, num_pages * config.page_size)
    if config.max_length is not None and max_length < config.max_length:
        raise ValueError(f"max_length must be at most {max_length}, {budget}, got {config.max_length}")
    return num_pages, max_length


def _activation_bytes(parts: _Parts, longest: int) -> int:
    """Compute the largest possible steps; return the bytes that they and the runner's tables take, without KV."""
    config = parts.config
    batch = largest_batch(config, longest)
    num_pages = int(batch.page_ids[-1]) + 1

    def work() -> None:
        runner, _ = parts.runner(num_pages, max_length=longest)
        compute_largest_steps(config, batch, runner, verifies=config.speculative != "off")

    return max(parts.device.peak_bytes(work) - (num_pages + 1) * parts.layout.bytes_per_page, 0)
