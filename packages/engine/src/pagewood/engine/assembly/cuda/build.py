"""Build an engine on a CUDA device: compile kernels, load the model, divide the device's memory, capture graphs."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pagewood.engine.api import EngineConfig, Inbox, Outbox, Progress
from pagewood.engine.assemble import assemble
from pagewood.engine.assembly.adapter_source import adapter_source
from pagewood.engine.assembly.cuda.adapters import cuda_adapters
from pagewood.engine.assembly.cuda.device_budget import MIB, Budget, compute_largest_steps, graph_bytes, largest_batch
from pagewood.engine.assembly.cuda.drafter import LoadedDrafter, drafter_needs, drafter_of
from pagewood.engine.assembly.cuda.rank import CUDARank, CUDARanks, started_ranks, use_device
from pagewood.engine.assembly.cuda.weights import CUDAPart, DeviceWeights, why_fixed
from pagewood.engine.assembly.grammar_compiler import grammar_compiler
from pagewood.engine.assembly.images import ImageUseOfModel
from pagewood.engine.assembly.model_weights import ModelWeights
from pagewood.engine.assembly.named_processors import load_processors
from pagewood.engine.assembly.part_with_tower import with_tower
from pagewood.engine.assembly.policies import Policies, chosen
from pagewood.engine.assembly.ranks.expert_options import expert_change
from pagewood.engine.assembly.ranks.stage_cuts import stage_cuts
from pagewood.engine.assembly.state_sizes import StateSizes
from pagewood.engine.assembly.steps.draft_control import draft_control, measure_cost
from pagewood.engine.assembly.tiers.lower_caches import tiered_cache
from pagewood.engine.core.loop import Engine, EngineInfo, Runner
from pagewood.engine.core.memory.page_groups import longest_request, most_pages
from pagewood.engine.core.weights import ServedWeights
from pagewood.engine.model_folder.folder import model_folder, model_name
from pagewood.engine.model_folder.load import load_model
from pagewood.engine.model_folder.model_digest import ModelDigest
from pagewood.engine.model_folder.vector_tail import read_vector_tail
from pagewood.engine.models.config import ModelConfig
from pagewood.engine.models.decoder import Decoder
from pagewood.engine.models.parts.experts import ExpertsConfig
from pagewood.engine.models.parts.experts_beside import ExpertsBesideConfig
from pagewood.engine.models.parts.feed_forward import FeedForwardConfig
from pagewood.engine.models.parts.latent_attention import LatentAttentionConfig
from pagewood.engine.models.shard import WHOLE, Shard
from pagewood.engine.runner.cuda.adapters import CUDAAdapters
from pagewood.engine.runner.cuda.device import CUDADevice, Device
from pagewood.engine.runner.cuda.exchange import Exchange
from pagewood.engine.runner.cuda.graphs import graph_sizes
from pagewood.engine.runner.cuda.images import CUDAImages
from pagewood.engine.runner.cuda.kernels.experts_flashinfer import FusedKernels
from pagewood.engine.runner.cuda.kernels.flashinfer_api import HEAD_DIMS, LARGE_HEAD_DIMS, LATENT_DIMS, FlashInfer
from pagewood.engine.runner.cuda.kernels.flashinfer_compile import KernelNeeds, compile_experts, compile_kernels
from pagewood.engine.runner.cuda.kernels.invariance import heads_by_row, linear_by_row
from pagewood.engine.runner.cuda.ops import CUDAOps
from pagewood.engine.runner.cuda.pages_of_ranks import ImageSizes
from pagewood.engine.runner.cuda.runner import CUDARunner, Ranked
from pagewood.engine.runner.processors import Process
from pagewood.engine.runner.ranks.notes import TABLES_EVERY
from pagewood.engine.runner.ranks.ranked_weights import RankedWeights
from pagewood.engine.runner.storage import AnyLayout, storage_for
from pagewood.engine.runner.trainer_groups import TrainerGroups
from pagewood.kvpool import JointLayout, LayerGroups
from pagewood.kvpool.memory import PageMemory, allocate, allocate_joint

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltRunner:
    """A runner with its graphs captured, and its sizes."""

    runner: CUDARunner
    model: ModelConfig
    """All of it, of which the runner may have a part."""
    memory: PageMemory
    """KV memory; its last page, or frame, is for the runner itself."""
    beside: Sequence[PageMemory]
    """Further memory that grows with KV: of states, whose last place is for the runner itself, and of a drafter."""
    state_sizes: StateSizes
    """Without that place."""
    num_pages: int
    max_length: int
    windows: tuple[int | None, ...]
    """The window of each group of layers; None: its layers see all positions."""
    page_bytes: Sequence[int]
    """Bytes of the part of a page that each rank has."""
    image_sizes: ImageSizes
    announces_pages: bool
    adapters: CUDAAdapters | None
    """The adapters of its projections; None: the runner has no adapters."""
    images: ImageUseOfModel
    """Whether it takes images, with the tower on the device."""
    weights: DeviceWeights

    @property
    def state_memory(self) -> PageMemory | None:
        """The memory of states; None: no layer is recurrent."""
        return None if self.runner.recurrent is None else self.runner.recurrent.memory


def build_cuda_engine(
    config: EngineConfig, *, inbox: Inbox, outbox: Outbox, progress: Progress | None = None
) -> Engine:
    """Load a model and build an engine for it on the current CUDA device; see `build_engine`."""
    if config.dtype == "float32":
        raise ValueError("dtype must be float16 or bfloat16 on CUDA, where FlashInfer attends, got float32")
    if config.speculative_verify == "rejection":
        raise ValueError("speculative_verify must be exact on CUDA, got rejection")
    needs = _all_needs(config)
    if config.num_ranks > 1:
        use_device(0, config)
    device, flashinfer = open_cuda()
    _compile(needs, progress)
    return build_on(device, flashinfer, config, inbox=inbox, outbox=outbox, progress=progress)


def compile_for(config: EngineConfig, progress: Progress | None) -> None:
    """Compile the kernels that an engine needs, for the current device.

    Raises:
        ValueError: there are none for the model, or they cannot be compiled.
    """
    _compile(_all_needs(config), progress)


def _all_needs(config: EngineConfig) -> list[KernelNeeds]:
    """Return the attention kernels of a rank's part of the model and of its drafter; see `kernel_needs`."""
    folder = model_folder(config.model)
    model = expert_change(config)(ModelConfig.from_folder(folder))
    model = ImageUseOfModel.of(config, folder, model).change(model)
    shard = Shard(0, config.tensor_parallel_size, by_request=config.enable_dp_attention)
    needs = kernel_needs(config, model.for_shard(shard))
    found = drafter_of(config, folder)
    layer = None if found is None else drafter_needs(config, found, folder)
    return needs if layer is None else [*needs, *_drafter_kernels(config, layer.for_shard(shard))]


def _compile(needs: Sequence[KernelNeeds], progress: Progress | None) -> None:
    try:
        compile_kernels(needs, progress=progress)
    except RuntimeError as error:
        raise ValueError(f"device cuda needs FlashInfer's kernels, which cannot be compiled here: {error}") from error


def build_on(
    device: Device,
    flashinfer: FlashInfer,
    config: EngineConfig,
    *,
    inbox: Inbox,
    outbox: Outbox,
    progress: Progress | None = None,
) -> Engine:
    """Build an engine on a device that FlashInfer supports; other arguments and errors as in `build_engine`.

    With several ranks, it is the device of rank 0, and each other one opens its own.
    """
    config, folder = config.resolved(), model_folder(config.model)
    if config.enable_dp_attention:
        chosen(config, Policies(), page_size=config.page_size).check_pools()
    digest = ModelDigest(folder)
    if config.num_ranks == 1:
        return _engine_on(device, flashinfer, config, digest, None, inbox=inbox, outbox=outbox, progress=progress)
    cuts = stage_cuts(config, folder, ModelConfig.from_folder(folder), is_stored=False)
    with started_ranks(config, digest, cuts, progress) as ranks:
        return _engine_on(device, flashinfer, config, digest, ranks, inbox=inbox, outbox=outbox, progress=progress)


def _engine_on(
    device: Device,
    flashinfer: FlashInfer,
    config: EngineConfig,
    digest: ModelDigest,
    ranks: CUDARanks | None,
    *,
    inbox: Inbox,
    outbox: Outbox,
    progress: Progress | None,
) -> Engine:
    processors = load_processors(config)
    folder = model_folder(config.model)
    if config.disk_cache_path is not None or config.remote_cache is not None:
        digest.begin()  # while the weights are read
    own = None if ranks is None else ranks.own
    progress = progress if ranks is None else ranks.group.progress
    built = build_cuda_runner(device, flashinfer, config, folder, processors=processors, rank=own, progress=progress)
    runner: Runner = built.runner if ranks is None else ranks.runner(built.runner)
    info = EngineInfo(
        model_name=model_name(config.model),
        max_length=built.max_length,
        vocab_size=built.model.vocab_size,
        eos_token_ids=built.model.eos_token_ids,
        num_pages=built.num_pages * config.num_pools,
        num_pools=config.num_pools,
        page_size=config.page_size,
        windows=built.windows,
        short_length=built.model.short_length,
        announces_pages=built.announces_pages,
        num_states=built.state_sizes.num_places * config.num_pools,
        state_interval=built.state_sizes.interval,
        vector_size=built.model.hidden_size,
        expert_shape=built.model.expert_shape,
        reports_states=True,
        reports_kept=True,
        takes_images=built.images.recipe is not None,
        page_bytes=sum(built.page_bytes) // config.num_pools,
        rank_places=() if ranks is None else ranks.group.places,
    )
    make_cache = (
        tiered_cache(config, digest, built.memory, states=built.state_memory)
        if ranks is None
        else ranks.make_cache(config, digest, built)
    )
    control = draft_control(config, computes_padding=True)
    if control is not None:
        measure_cost(control, config, info, runner)
    config = replace(config, max_total_tokens=info.num_pages * config.page_size, max_length=built.max_length)
    group = None if ranks is None else ranks.group
    tail = read_vector_tail(folder, built.model.hidden_size)
    fixed = why_fixed(config) if tail is None else "vectors of the model go through further modules of its folder"
    encoder = built.images.encoder(config, device=device.torch_device)
    whole = with_tower(CUDAPart(device, built), encoder, built.images.read, gives_back=True)
    part = ModelWeights(folder, whole, groups=TrainerGroups(device.torch_device))
    return assemble(
        config,
        info=info,
        make_runner=lambda kv: runner,
        make_cache=make_cache,
        drafting=control,
        compiler=grammar_compiler(config, folder, info),
        adapters=adapter_source(built.adapters, folder, group, part),
        drafts_constrained=True,
        processors=processors,
        inbox=inbox,
        outbox=outbox,
        vector_tail=tail,
        weights=ServedWeights(part if group is None else RankedWeights(part, group), why_fixed=fixed or ""),
        images=encoder,
    )


def open_cuda() -> tuple[CUDADevice, FlashInfer]:
    """Return the current CUDA device and FlashInfer.

    Raises:
        ValueError: there is no CUDA device, or FlashInfer is not installed.
    """
    if not torch.cuda.is_available():
        raise ValueError("device must be cpu where torch finds no CUDA device, got cuda")
    # FlashInfer has two implementations of norms; its default depends on whether nvidia-cutlass-dsl is installed.
    os.environ.setdefault("FLASHINFER_USE_CUDA_NORM", "1")  # not ours
    try:
        flashinfer: Any = importlib.import_module("flashinfer")
    except ImportError as error:
        raise ValueError(f"device cuda needs FlashInfer: pip install 'pagewood-engine[cuda]' ({error})") from error
    return CUDADevice(), flashinfer


def cuda_ops(
    flashinfer: FlashInfer,
    device: torch.device,
    *,
    batch_invariant: bool = False,
    exchange: Exchange | None = None,
    fused_experts: FusedKernels | None = None,
    adapters: CUDAAdapters | None = None,
) -> CUDAOps:
    """Return the arithmetic of an engine: FlashInfer's and torch's, and Triton's kernels on a device that has Triton.

    With `exchange`, it is that of a rank of several, and with `adapters` these add to projections. `fused_experts`
    compute the mixtures that they take; they are not batch-invariant.

    Raises:
        ValueError: batch-invariant projections need Triton.
    """
    if device.type == "cpu":
        if batch_invariant:
            return CUDAOps(flashinfer, linear_by_row, exchange=exchange, multiply_heads=heads_by_row, adapters=adapters)
        return CUDAOps(flashinfer, functional.linear, exchange=exchange, fused_experts=fused_experts, adapters=adapters)
    module = "linear_triton" if batch_invariant else "few_rows_triton"
    try:
        kernels = importlib.import_module(f"pagewood.engine.runner.cuda.kernels.{module}")
        experts: Any = importlib.import_module("pagewood.engine.runner.cuda.kernels.experts_triton")
    except ImportError as error:
        if batch_invariant:
            raise ValueError(f"batch_invariant needs Triton, which comes with torch for CUDA ({error})") from error
        _log.warning("steps of few requests are slower without Triton, which comes with torch for CUDA (%s)", error)
        return CUDAOps(flashinfer, exchange=exchange, fused_experts=fused_experts, adapters=adapters)
    if batch_invariant:
        return CUDAOps(
            flashinfer, kernels.linear, expert_kernels=experts, exchange=exchange, multiply_heads=kernels.heads_linear,
            adapters=adapters,
        )  # fmt: skip
    silu_mul = partial(kernels.silu_mul, otherwise=flashinfer.silu_and_mul)
    return CUDAOps(
        flashinfer, kernels.linear, silu_mul, experts, exchange, fused_experts=fused_experts, adapters=adapters
    )


def kernel_needs(config: EngineConfig, model: ModelConfig) -> list[KernelNeeds]:
    """Return the attention kernels that an engine for a model needs, by the size of heads.

    Raises:
        ValueError: there are none for the model, or no batch-invariant ones where they are requested.
    """
    if model.is_encoder:
        raise ValueError(f"device must be cpu for an encoder such as {model.architecture}, got {config.device!r}")
    for head_dim in model.head_dims:
        _check_heads(config, head_dim)
    window = min((window for window in model.windows if window is not None), default=None)
    longest = min(config.max_length or model.max_position, model.max_position)
    if config.batch_invariant and window is not None and window < longest:
        raise ValueError(
            f"max_length must be at most {window} for batch_invariant, because a longer sequence leaves the model's "
            f"sliding window, and the order of summation depends on where the window starts; got {longest}"
        )
    chunk = min((one.window or longest for one in model.attentions if one.is_chunked), default=longest)
    if chunk < longest:
        raise ValueError(
            f"max_length must be at most {chunk} on CUDA, because the model attends within chunks of {chunk}, "
            f"which FlashInfer does not, got {longest}"
        )
    return _needs_of(config, model)


def _needs_of(config: EngineConfig, model: ModelConfig) -> list[KernelNeeds]:
    """Return the attention kernels of the layers of a model."""
    if model.paged and isinstance(model.paged[0], LatentAttentionConfig):
        return [_latent_needs(config, model, model.paged[0])]
    kinds: dict[tuple[int, int, bool], set[bool]] = {}
    if not model.paged:
        kinds[HEAD_DIMS[0], 1, False] = set()  # what steps need beside attention
    for one in model.attentions:
        kind = one.head_dim, one.group, one.soft_cap is not None
        kinds.setdefault(kind, set()).add(one.window is not None and not one.is_chunked)
    return [
        KernelNeeds(
            dtype=_dtype_of(config),
            head_dim=head_dim,
            group=group,
            has_windows=tuple(sorted(has_windows)),
            batch_invariant=config.batch_invariant,
            has_soft_cap=has_soft_cap,
            kv_dtype=_kv_dtype_of(config),
            verifies=config.speculative != "off" or any(one.sees_images for one in model.attentions),
            activations=_activations(model),
        )
        for (head_dim, group, has_soft_cap), has_windows in kinds.items()
    ]


def _check_heads(config: EngineConfig, head_dim: int) -> None:
    """Check that there are kernels for heads of a size.

    Raises:
        ValueError: there are none.
    """
    if head_dim in HEAD_DIMS:
        return
    if head_dim not in LARGE_HEAD_DIMS:
        dims = (*HEAD_DIMS, *LARGE_HEAD_DIMS)
        raise ValueError(f"head_dim must be one of {dims} on CUDA, where FlashInfer attends, got {head_dim}")
    if config.batch_invariant:
        raise ValueError(
            f"batch_invariant must be False for heads of {head_dim} elements on CUDA, for which FlashInfer chooses "
            "other tiles, got True"
        )
    if _kv_dtype_of(config) != _dtype_of(config):
        raise ValueError(
            f"kv_cache_dtype must be auto or {_dtype_of(config)} for heads of {head_dim} elements on CUDA, "
            f"got {config.kv_cache_dtype}"
        )


def _latent_needs(config: EngineConfig, model: ModelConfig, attention: LatentAttentionConfig) -> KernelNeeds:
    """Return the attention kernels that an engine for a model with latents needs; see `kernel_needs`."""
    dims = (attention.shape.rank, attention.shape.rope_dim)
    if dims != LATENT_DIMS:
        raise ValueError(
            f"kv_lora_rank and qk_rope_head_dim must be {LATENT_DIMS} on CUDA, where FlashInfer attends, got {dims}"
        )
    if _kv_dtype_of(config) != _dtype_of(config):
        raise ValueError(
            f"kv_cache_dtype must be auto or {_dtype_of(config)} for a model with latent attention on CUDA, "
            f"got {config.kv_cache_dtype}"
        )
    return KernelNeeds(
        dtype=_dtype_of(config), head_dim=dims[0], group=attention.shape.num_heads, has_windows=(False,),
        batch_invariant=config.batch_invariant, verifies=config.speculative != "off", latent_rope_dim=dims[1],
        activations=_activations(model),
    )  # fmt: skip


def _activations(model: ModelConfig) -> tuple[str, ...]:
    """Return the activations that are multiplied by a gate; torch computes the others."""
    parts = (layer.feed_forward for layer in model.layers)
    gated = (part.dense if isinstance(part, ExpertsBesideConfig) else part for part in parts)
    return tuple(sorted({part.activation for part in gated if isinstance(part, FeedForwardConfig | ExpertsConfig)}))


def _drafter_kernels(config: EngineConfig, layer: ModelConfig) -> list[KernelNeeds]:
    """Return the attention kernels of a draft model or a head: with masks, and for a head also those of plain steps."""
    return [replace(need, verifies=True) for need in _needs_of(config, layer)]


def build_cuda_runner(
    device: Device,
    flashinfer: FlashInfer,
    config: EngineConfig,
    folder: Path,
    *,
    processors: Mapping[str, Process] | None = None,
    rank: CUDARank | None = None,
    progress: Progress | None,
) -> BuiltRunner:
    """Load the model of `folder` to `device`, use the remaining memory as KV memory, and capture the graphs.

    With `rank`, it is that rank's part of the model, and all ranks have the number of pages that every one has room
    for; a device that ranks share is measured while all of them load, so that they have less room than they could.

    Raises:
        RunnerLostError: another rank is lost.
        ValueError: the model is not supported, or does not fit; the message says what to change and by how much.
        FileNotFoundError: the folder lacks a file.
    """
    dtype = _dtype_of(config)
    exchange = None if rank is None else rank.exchange
    where, fused_experts = device.torch_device, None
    if config.expert_kernels == "flashinfer":
        fused_experts = FusedKernels(flashinfer, partial(compile_experts, where, progress))
    adapters = cuda_adapters(config, device)
    make_ops = partial(
        cuda_ops, flashinfer, where, batch_invariant=config.batch_invariant, exchange=exchange,
        fused_experts=fused_experts,
    )  # fmt: skip
    ops = make_ops(adapters=adapters)
    plain = ops if adapters is None else make_ops()  # of drafters, and of weights that are read again
    found = drafter_of(config, folder)
    relay = None if rank is None else rank.relay
    change = expert_change(config)
    images = ImageUseOfModel.of(config, folder, change(ModelConfig.from_folder(folder)))
    load = partial(
        load_model,
        folder,
        dtype=getattr(torch, dtype),
        max_length=config.max_length,
        shard=WHOLE if rank is None else rank.shard,
        stage=None if rank is None else rank.stage,
        relay=relay,
        change=lambda one: images.change(change(one)),
        keeps_float8=_has_float8(where),
    )
    free_before = device.free_bytes()
    drafter: LoadedDrafter | None = None
    try:
        model = load(ops, device=where, progress=progress)
        images = images.loaded(config, folder, device=where, dtype=getattr(torch, dtype))
        if found is not None:
            drafter = LoadedDrafter.load(
                found, folder, model, plain, dtype=dtype, device=where, adapters=adapters, progress=progress
            )
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"the weights of {folder} in {dtype} must fit into {free_before / MIB:.0f} MiB of free device memory: "
            f"use a smaller model or dtype{', lower max_adapters' * bool(adapters)}, or free memory on the device"
        ) from error
    if adapters is not None:
        _log.info("slots of %d adapters take %.0f MiB of device memory", config.max_adapters, adapters.nbytes / MIB)
    if rank is not None:
        rank.meet()
    sizes = graph_sizes(min(config.cuda_graph_max_batch or config.num_rows, config.num_rows))
    sizes = sizes if config.cuda_graph and (rank is None or rank.is_queued) else []
    longest = min(config.max_length or model.config.max_position, model.config.max_position)
    if drafter is not None:
        longest = min(longest, drafter.max_position or longest)
    has_groups = rank is None or (rank.stage is None and not rank.shard.by_request)  # the same ones on all ranks
    groups = _groups(config, model.config, drafter, longest if has_groups else 1)
    layout = model.config.memory_layout(page_size=config.page_size, dtype=_kv_dtype_of(config), groups=groups)
    parts = _Parts(
        device=device, flashinfer=flashinfer, model=model, drafter=drafter, layout=layout, groups=groups, config=config,
        rank=rank, adapters=adapters, images=images,
    )  # fmt: skip
    has_verify_graphs = config.pipeline_parallel_size == config.num_pools == 1
    budget = Budget(
        free_bytes=free_before,
        mem_fraction=config.mem_fraction / (1 if rank is None else rank.num_sharing),
        weight_bytes=free_before - device.free_bytes(),
        activation_bytes=_activation_bytes(parts, longest),
        graph_bytes=graph_bytes(
            sizes,
            model.config,
            page_size=config.page_size,
            dtype=dtype,
            longest=longest,
            width=0 if drafter is None or not has_verify_graphs else 1 + config.speculative_num_tokens,
            num_ranks=config.num_pools,
        ),
        page_bytes=parts.page_bytes,
    )
    states, budget = budget.with_states(config, model, None if rank is None else rank.store)
    of_rank = config
    if config.max_total_tokens is not None:  # each rank has its part of the requests, and of their tokens
        of_rank = replace(config, max_total_tokens=config.max_total_tokens // config.num_pools)
    num_pages = budget.num_pages(of_rank, longest=None if model.whole.paged else longest)
    page_bytes, state_bytes = [parts.page_bytes], [parts.state_bytes]
    if rank is not None:
        num_pages = min(rank.store.numbers("pages", num_pages))
        page_bytes = rank.store.numbers("bytes of a page", parts.page_bytes)
        state_bytes = rank.store.numbers("bytes of a state", parts.state_bytes)
    max_length = longest_request(
        groups.windows,
        num_pages * len(groups.windows),
        page_size=config.page_size,
        num_ahead=config.max_chunk_tokens,
        limit=longest,
    )
    if config.max_length is not None and max_length < config.max_length:
        raise ValueError(f"max_length must be at most {max_length}, {budget}, got {config.max_length}")
    _log.info(
        "%d KV pages of %d tokens, at most %d tokens per request; %d requests and %d prompt tokens per step; %s",
        num_pages,
        config.page_size,
        max_length,
        config.num_rows,
        config.max_chunk_tokens,
        budget,
    )
    runner, memory, beside = parts.runner(
        num_pages, states.num_places, max_length=max_length, graph_sizes=sizes, processors=processors, progress=progress
    )
    return BuiltRunner(
        runner=runner,
        model=model.whole,
        memory=memory,
        beside=beside,
        state_sizes=states,
        num_pages=num_pages,
        max_length=max_length,
        windows=groups.windows,
        page_bytes=page_bytes,
        image_sizes=ImageSizes.of(page_bytes, state_bytes),
        announces_pages=parts.has_drafts_beside,
        adapters=adapters,
        images=images,
        weights=DeviceWeights(
            decoder=model,
            drafter=drafter,
            load_again=lambda files: load(plain, device=torch.device("cpu"), files=files),
            outside=[
                ops,
                plain,
                exchange,
                relay,
                adapters,
                *([] if adapters is None else [site for _, site in adapters.sites]),
            ],
        ),
    )


def _has_float8(device: torch.device) -> bool:
    """Whether kernels of a device can read 8-bit floating point numbers."""
    return device.type == "cpu" or torch.cuda.get_device_capability(device) >= (8, 9)


def _groups(config: EngineConfig, model: ModelConfig, drafter: LoadedDrafter | None, longest: int) -> LayerGroups:
    """Return the groups of layers whose memory is given back apart."""
    groups = model.groups(max_length=1 if model.states is not None else longest)  # a state measures hits, no window
    if groups.windows == (None,):
        return groups
    reason = None
    if config.host_cache_gb is not None:
        reason = "lower tiers copy whole pages"
    elif None not in groups.windows and drafter is not None and drafter.max_position is not None:
        reason = "a drafter has its own of all of them"
    if reason is None:
        return groups
    _log.info("layers with a window keep the KV of all positions, because %s", reason)
    return model.groups(max_length=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """The parts of a runner, except its memory."""

    device: Device
    flashinfer: FlashInfer
    model: Decoder[Tensor]
    drafter: LoadedDrafter | None
    layout: AnyLayout
    """The layout of a page of the model, or of a frame if layers have several groups."""
    groups: LayerGroups
    config: EngineConfig
    rank: CUDARank | None
    adapters: CUDAAdapters | None
    images: ImageUseOfModel

    @property
    def draft_layout(self) -> AnyLayout | None:
        """The layout of the drafter's KV; None: it has no KV."""
        return None if self.drafter is None else self.drafter.layout(self.layout)

    @property
    def has_drafts_beside(self) -> bool:
        """Whether the drafter's KV lies beside the frames of pages, under the ids of pages."""
        return self.draft_layout is not None and len(self.groups.windows) > 1

    @property
    def page_bytes(self) -> int:
        """Size of a page, with the frames of all groups and what the drafter has beside them at most."""
        num_groups, more = len(self.groups.windows), self.draft_layout
        frames = num_groups * self.layout.bytes_per_page
        if more is None:
            return frames
        return frames + -(-more.bytes_per_page * num_groups // self.groups.windows.count(None))

    @property
    def state_bytes(self) -> int:
        """Size of a state; 0: no layer is recurrent."""
        states = self.model.config.states
        return 0 if states is None else states.bytes_per_page

    def kv_bytes(self, num_pages: int, num_states: int) -> int:
        """Return the size of the memory that `runner` allocates for pages and states."""
        more = 0 if self.draft_layout is None else self.draft_layout.bytes_per_page
        num_frames = num_pages * len(self.groups.windows)
        size = (num_states + 1) * self.state_bytes
        return size + (num_frames + 1) * self.layout.bytes_per_page + (self.num_drafted(num_frames) + 1) * more

    def num_drafted(self, num_frames: int) -> int:
        """Return how many pages the drafter has memory for."""
        return most_pages(self.groups.windows, num_frames) if self.has_drafts_beside else num_frames

    def runner(
        self,
        num_pages: int,
        num_states: int,
        *,
        max_length: int,
        graph_sizes: Sequence[int] = (),
        processors: Mapping[str, Process] | None = None,
        progress: Progress | None = None,
    ) -> tuple[CUDARunner, PageMemory, list[PageMemory]]:
        """Allocate pages, places of states, and one frame and place for the runner; return it and all memory."""
        num_frames, more = num_pages * len(self.groups.windows), self.draft_layout
        config, dtype, where = self.config, _dtype_of(self.config), self.device.torch_device
        draft_storage, beside = None, list[PageMemory]()
        if more is None or self.has_drafts_beside:
            storage = storage_for(self.layout, num_frames + 1, device=where)
            memory = storage.memory
            if more is not None:
                draft_storage = storage_for(more, self.num_drafted(num_frames) + 1, device=where)
                beside.append(draft_storage.memory)
        else:
            layouts = (self.layout, more)
            memory, views = allocate_joint(JointLayout(parts=layouts), num_frames + 1, device=where)
            storage, draft_storage = (
                storage_for(layout, num_frames + 1, memory=view) for layout, view in zip(layouts, views, strict=True)
            )
        state_memory = None
        if (states := self.model.config.states) is not None:
            state_memory = allocate(states, num_states + 1, device=where)
            beside.append(state_memory)
        drafter = self.drafter and self.drafter.make(
            draft_storage,
            self.flashinfer,
            self.device,
            max_rows=config.num_rows,
            max_length=max_length,
            dtype=dtype,
            batch_invariant=config.batch_invariant,
            trusts_cached=config.pipeline_parallel_size == 1 or config.host_cache_gb is None,
        )
        rows = self.images.of_rows(config.num_rows)
        runner = CUDARunner(
            self.model,
            storage,
            self.flashinfer,
            self.device,
            max_rows=config.num_rows,
            max_length=max_length,
            dtype=dtype,
            batch_invariant=config.batch_invariant,
            graph_sizes=graph_sizes,
            drafter=drafter,
            max_drafts=0 if self.drafter is None else config.speculative_num_tokens,
            drafts_ahead=self.drafter is not None and self.drafter.drafts_ahead,
            processors=processors,
            groups=self.groups,
            num_drafted_pages=draft_storage.num_pages if draft_storage is not None and self.has_drafts_beside else None,
            ranked=None if self.rank is None else _ranked(config),
            relay=None if self.rank is None else self.rank.relay,
            division=None if self.rank is None else self.rank.division(config.num_rows, num_frames, num_states),
            adapters=self.adapters,
            states=state_memory,
            images=None if rows is None else CUDAImages(rows, self.device, getattr(torch, dtype)),
            progress=progress,
        )
        return runner, memory, beside


def _ranked(config: EngineConfig) -> Ranked:
    if config.pipeline_parallel_size > 1:  # a row is launched again when its tokens are known
        return Ranked(witness_every=TABLES_EVERY, num_in_flight=0)
    num_ahead = config.num_continuous_decode_steps - 1
    return Ranked(witness_every=TABLES_EVERY, num_in_flight=max(num_ahead, int(config.resolved().overlap is True)))


def _dtype_of(config: EngineConfig) -> str:
    return config.resolved().dtype


def _kv_dtype_of(config: EngineConfig) -> str:
    dtype = config.resolved().kv_cache_dtype
    return "float8_e4m3fn" if dtype == "fp8_e4m3" else dtype


def _activation_bytes(parts: _Parts, longest: int) -> int:
    """Compute the largest possible steps; return the bytes that they and the runner's tables take, without KV."""
    config = parts.config
    batch = largest_batch(config, longest, has_states=parts.model.config.states is not None)
    num_pages, num_states = int(batch.page_ids[-1]) + 1, 1

    def work() -> None:
        runner, *_ = parts.runner(num_pages, num_states, max_length=longest)
        with nullcontext() if parts.adapters is None else parts.adapters.in_use():
            compute_largest_steps(config, batch, runner, verifies=parts.drafter is not None)

    images, masks = parts.images, 0
    if parts.drafter is not None or images.see_each_other:  # for such a step beside the largest chunk of a prompt
        masks = len(set(parts.model.config.windows)) * config.max_chunk_tokens * (longest // 8 + 1)
    rows = 2 * config.max_chunk_tokens * images.width * images.dtype.itemsize  # of images, for two steps in flight
    steps = max(parts.device.peak_bytes(work) - parts.kv_bytes(num_pages, num_states), 0)
    tower = 0 if images.tower is None else parts.device.peak_bytes(lambda: images.compute_largest(longest))
    return steps + masks + rows + tower
