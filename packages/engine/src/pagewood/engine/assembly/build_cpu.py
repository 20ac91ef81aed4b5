"""From a configuration to a CPU engine: kernels, weights, and the size of the KV memory."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from pagewood.engine.api import EngineConfig, Inbox, Outbox, Progress
from pagewood.engine.assemble import assemble, page_allocator
from pagewood.engine.assembly.available_memory import available_memory_bytes
from pagewood.engine.assembly.draft_control import draft_control, measure_cost
from pagewood.engine.assembly.grammar_compiler import grammar_compiler
from pagewood.engine.assembly.host_pages import host_pages
from pagewood.engine.assembly.lower_caches import Frames, tiered_cache
from pagewood.engine.assembly.named_processors import load_processors
from pagewood.engine.core.loop import Engine, EngineInfo, Runner
from pagewood.engine.core.memory.kv import KVSpace
from pagewood.engine.core.memory.page_groups import PageGroups, most_pages
from pagewood.engine.model_folder.folder import FoundDrafter, find_drafter, model_folder, model_name
from pagewood.engine.model_folder.load import check_draft, check_weights
from pagewood.engine.model_folder.model_digest import ModelDigest
from pagewood.engine.models.config import ModelConfig
from pagewood.engine.models.stored.checkpoint_files import checkpoint_files
from pagewood.engine.runner.cpu.compiled.products.dot import DotLevel
from pagewood.engine.runner.cpu.compiled.products.packed_weights import ProductLevel, WideLevel
from pagewood.engine.runner.cpu.compiled.products.weight_kind import WeightKind
from pagewood.engine.runner.cpu.drafts.loaded_drafter import load_drafter
from pagewood.engine.runner.cpu.drafts.ngram import NgramLookup
from pagewood.engine.runner.cpu.drafts.suffix import SuffixIndex
from pagewood.engine.runner.cpu.kernels import warm_up
from pagewood.engine.runner.cpu.populate import PopulatingRunner, Populator
from pagewood.engine.runner.cpu.runner import CPURunner
from pagewood.engine.runner.cpu.taken_cores import TakenCores
from pagewood.engine.runner.cpu.weights.loaded_model import load_cpu_model
from pagewood.engine.runner.storage import storage_for
from pagewood.kvpool import LayerGroups

_log = logging.getLogger(__name__)

_LONG_STEP = 2_500_000_000
"""Products of a weight and an activation that one thread computes in a long step: about 20 ms. The host needs less than
a fiftieth of that to prepare the next step."""
_BUSY_TOKENS = 128
"""A step with this many tokens takes at least as long to compute as to read the weights."""
_BYTES = {"auto": 4.0, "float32": 4.0, "bfloat16": 2.0, "int8": 1.1, "int4": 0.7}
"""Most bytes of a weight, by form; norms and scales are a small part of them."""
_LOOKUPS = {"ngram": NgramLookup, "suffix": SuffixIndex}


def build_cpu_engine(config: EngineConfig, *, inbox: Inbox, outbox: Outbox, progress: Progress | None = None) -> Engine:
    """Load a model and make an engine for it that computes on this machine's cores; see `build_engine`.

    Without `max_total_tokens`, the KV memory has room for 2,048 tokens (or the longest request, if that is shorter) in
    each of `num_rows` rows, and for at least one request of the longest length. It is at most a quarter of the free
    memory. The system provides this memory as it is used, a little in advance.
    """
    processors = load_processors(config)
    folder = model_folder(config.model)
    digest = ModelDigest(folder)
    outlives = config.disk_cache_path is not None or config.remote_cache is not None
    if outlives:
        digest.begin()
    model_config = ModelConfig.from_folder(folder)
    num_weights = check_weights(folder, model_config)
    weights_bytes = int(_BYTES[config.weights] * num_weights)
    if config.weights == "auto":
        weights_bytes = min(weights_bytes, _stored_bytes(folder))
    if weights_bytes > available_memory_bytes():
        raise ValueError(
            f"model must fit into the {available_memory_bytes() / 1e9:.1f} GB of memory that are available, "
            f"got {weights_bytes / 1e9:.1f} GB of weights in {config.weights.replace('auto', 'the form of its files')}"
        )
    num_threads = config.num_threads or _num_cores()
    found = None if config.speculative == "off" else _find_drafter(config, folder)
    loaded = load_cpu_model(
        folder,
        config.weights,
        activations=config.activations,
        digest=digest,
        num_threads=num_threads,
        max_length=config.max_length,
        progress=progress,
    )
    model, variants, units = loaded.model, loaded.variants, dict.fromkeys(loaded.units)
    if config.activations == "bfloat16" and all(kind != WeightKind.BFLOAT16_PAIRS for kind, _ in variants):
        raise ValueError(
            f"activations must be auto or float32 unless weights are bfloat16, and with weights {config.weights!r} "
            f"those of this model are {_described(variants)}, got 'bfloat16'"
        )
    drafter = None
    if found is not None and found.folder is not None:
        drafter = load_drafter(
            found,
            model,
            folder,
            target_digest=digest.known() if outlives else None,
            target_mark=loaded.mark,
            weights=config.weights,
            activations=config.activations,
            num_threads=num_threads,
            progress=progress,
        )
        variants |= drafter.variants
        units |= dict.fromkeys(drafter.units)
    _log.info("weights: %s", _described(variants))
    groups = _groups(config, model_config, has_drafter=drafter is not None)
    layout = model_config.memory_layout(
        page_size=config.page_size, dtype=config.resolved().kv_cache_dtype, order="HND", groups=groups
    )
    kernel = warm_up(
        layout,
        head_dims=(*model_config.head_dims, *(drafter.head_dims if drafter else ())),
        drafter=drafter.memory_layout(layout) if drafter else None,
        packed=variants,
        others=units,
        progress=progress,
    )
    num_groups, has_frames = len(groups.windows), len(groups.windows) > 1
    page_bytes = layout.bytes_per_page * num_groups
    if drafter is not None and has_frames:  # a request that is long for its windows holds little but whole groups
        page_bytes += -(-drafter.layout_beside(layout).bytes_per_page * num_groups // groups.windows.count(None))
    elif drafter is not None:
        page_bytes = drafter.layout(layout).bytes_per_page
    num_pages, max_length = host_pages(config, model_config.max_position, groups, page_bytes)
    info = EngineInfo(
        model_name=model_name(config.model),
        max_length=max_length,
        vocab_size=model_config.vocab_size,
        eos_token_ids=model_config.eos_token_ids,
        num_pages=num_pages,
        page_size=config.page_size,
        windows=groups.windows,
        short_length=model.short_length,
        announces_pages=drafter is not None and has_frames,
        vector_size=model_config.hidden_size,
        page_bytes=page_bytes,
        long_step_tokens=-(-_LONG_STEP * num_threads // (num_weights - model_config.num_idle_parameters)),
    )
    _log.info(
        "%s: %d tokens of KV memory (%d pages of %d, up to %.2f GB as they are used; %s), "
        "at most %d tokens a request, %d threads",
        info.model_name,
        num_pages * config.page_size,
        num_pages,
        config.page_size,
        num_pages * page_bytes / 1e9,
        "as configured" if config.max_total_tokens else "set another size with --max-total-tokens",
        max_length,
        num_threads,
    )

    control = draft_control(config, are_cores_taken=TakenCores())
    if drafter is None:
        storage, make_drafter, beside = storage_for(layout, num_pages * num_groups), None, None
        memory = storage.memory
    else:
        num_frames = num_pages * num_groups
        joint = drafter.allocate(
            layout,
            most_pages(groups.windows, num_frames) if has_frames else num_pages,
            num_frames=num_frames if has_frames else None,
        )
        storage, memory, beside = joint.target, joint.whole, joint.beside
        make_drafter = drafter.maker(
            joint,
            max_tokens=config.speculative_num_tokens,
            uses_rejection=config.speculative_verify == "rejection",
        )
    populators = [Populator(one) for one in (memory, beside) if one is not None]

    def make_runner(kv: KVSpace) -> Runner:
        runner: Runner = CPURunner(
            model,
            storage,
            kernel,
            max_rows=config.num_rows,
            max_length=max_length,
            num_threads=num_threads,
            make_lookup=None if found is None else _LOOKUPS.get(found.kind),
            make_drafter=make_drafter,
            max_drafts=0 if found is None else config.speculative_num_tokens,
            processors=processors,
            groups=groups,
        )
        for populator in populators:
            runner = PopulatingRunner(runner, populator)
        if control is not None:
            measure_cost(control, config, info, runner)
        return runner

    config = replace(
        config,
        max_total_tokens=num_pages * config.page_size,
        max_length=max_length,
        num_threads=num_threads,
        joint_prefill_tokens=config.joint_prefill_tokens or max(_BUSY_TOKENS, info.long_step_tokens),
    )
    allocator = page_allocator(config.resolved(), info)
    frames = Frames(pages=allocator, layers=groups, beside=beside) if isinstance(allocator, PageGroups) else None
    return assemble(
        config,
        info=info,
        make_runner=make_runner,
        make_cache=tiered_cache(config, digest, memory, mark=loaded.mark, frames=frames),
        allocator=allocator,
        drafting=control,
        compiler=grammar_compiler(config, folder, info),
        drafts_constrained=True,
        processors=processors,
        inbox=inbox,
        outbox=outbox,
    )


def _stored_bytes(folder: Path) -> int:
    """Return about the bytes that weights take in the form of their files."""
    return sum(path.stat().st_size for path in checkpoint_files(folder))


def _described(variants: Collection[tuple[WeightKind, ProductLevel]]) -> str:
    """Return the forms of weights, and the instructions for products with rounded activations, as text for the log."""
    names = ", ".join(sorted({kind.name.lower().removesuffix("_pairs") for kind, _ in variants})) or "float32"
    products = {
        f"; products with {'int8' if isinstance(level, DotLevel) else 'bfloat16'} activations "
        f"by {level.name.replace('_', '-')}"
        for _, level in variants
        if not isinstance(level, WideLevel)
    }
    return names + "".join(sorted(products))


def _find_drafter(config: EngineConfig, folder: Path) -> FoundDrafter:
    """Return the drafter for the model, after its folder was compared with the target's."""
    assert config.speculative != "off"
    found = find_drafter(folder, config.speculative, speculative_model=config.speculative_model)
    if found.kind == "draft" and found.folder is not None:
        check_draft(found.folder, folder)
    _log.info("drafts: %s%s", found.kind, "" if found.folder is None else f" in {found.folder}")
    return found


def _groups(config: EngineConfig, model: ModelConfig, *, has_drafter: bool) -> LayerGroups:
    """Return the groups of layers whose memory is given back apart."""
    groups = model.groups(max_length=min(config.max_length or model.max_position, model.max_position))
    if groups.windows == (None,):
        return groups
    reason = None
    if config.host_cache_gb is not None and config.decision_log is not None:
        reason = "a replay of the decision log would not know when copies to the host end"
    if has_drafter and None not in groups.windows:
        reason = "a drafter has its own of all of them"
    if reason is not None:
        _log.info("layers with a window keep the KV of all positions, because %s", reason)
        return model.groups(max_length=1)
    num_whole = groups.windows.count(None)
    _log.info(
        "KV memory: %d groups of %d layers need all positions, %d groups the last %d",
        num_whole,
        groups.num_layers,
        len(groups.windows) - num_whole,
        groups.windows[-1],
    )
    return groups


def _num_cores() -> int:
    """Return the physical cores that this process may use; hyperthreads of one core count once if that is known."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    siblings = Path("/sys/devices/system/cpu/cpu0/topology/thread_siblings_list")
    try:
        per_core = len(siblings.read_text().strip().replace("-", ",").split(","))
    except OSError:
        per_core = 1
    return max(1, usable // per_core)
