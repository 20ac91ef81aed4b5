"""From a configuration to a CPU engine: kernels, weights, and the size of the KV memory."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pagewood.engine.api import EngineConfig, Inbox, Outbox, Progress
from pagewood.engine.assemble import assemble, page_allocator
from pagewood.engine.assembly.adapter_source import adapter_source
from pagewood.engine.assembly.available_memory import available_memory_bytes
from pagewood.engine.assembly.cpu.encoders import for_encoder
from pagewood.engine.assembly.cpu.rank import CPURank
from pagewood.engine.assembly.cpu.weights import CPUPart, why_awake
from pagewood.engine.assembly.grammar_compiler import grammar_compiler
from pagewood.engine.assembly.images import ImageUseOfModel
from pagewood.engine.assembly.model_weights import ModelWeights
from pagewood.engine.assembly.named_processors import load_processors
from pagewood.engine.assembly.part_with_tower import with_tower
from pagewood.engine.assembly.policies import Policies, chosen
from pagewood.engine.assembly.ranks.expert_options import expert_change
from pagewood.engine.assembly.ranks.nodes import gathered, threads_of_node
from pagewood.engine.assembly.ranks.stage_cuts import stage_cuts
from pagewood.engine.assembly.ranks.stage_place import StagePlace
from pagewood.engine.assembly.state_sizes import StateSizes, described_states, state_sizes
from pagewood.engine.assembly.steps.draft_control import draft_control, measure_cost
from pagewood.engine.assembly.tiers.lower_caches import Frames, tiered_cache
from pagewood.engine.core.loop import Engine, EngineInfo, Runner
from pagewood.engine.core.memory.divided_kv import AnyKV
from pagewood.engine.core.memory.page_groups import PageGroups
from pagewood.engine.core.weights import ServedWeights
from pagewood.engine.model_folder.folder import model_folder, model_name
from pagewood.engine.model_folder.load import check_weights
from pagewood.engine.model_folder.model_digest import ModelDigest
from pagewood.engine.model_folder.vector_tail import read_vector_tail
from pagewood.engine.models.config import ModelConfig
from pagewood.engine.models.shard import Shard
from pagewood.engine.models.stage import Stage, stages_of
from pagewood.engine.models.stored.checkpoint_files import checkpoint_files
from pagewood.engine.runner.cpu.taken_cores import TakenCores
from pagewood.engine.runner.processors import Process
from pagewood.engine.runner.ranks.agreement import check_division, check_layers
from pagewood.engine.runner.ranks.cores import threads_on
from pagewood.engine.runner.ranks.group import Group
from pagewood.engine.runner.ranks.messages import Loaded, Sizes
from pagewood.engine.runner.ranks.notes import StepNotes
from pagewood.engine.runner.ranks.ranked_pages import HostPart
from pagewood.engine.runner.ranks.ranked_runner import RankedRunner
from pagewood.engine.runner.ranks.ranked_weights import RankedWeights
from pagewood.kvpool.tiers.pages.device import DevicePages
from pagewood.kvpool.tiers.pages.states import num_state_parts, part_bytes

_log = logging.getLogger(__name__)

_LONG_STEP = 2_500_000_000
"""Products of a weight and an activation that one thread computes in a long step: about 20 ms. The host needs less than
a fiftieth of that to prepare the next step."""
_BUSY_TOKENS = 128
"""A step with this many tokens takes at least as long to compute as to read the weights."""
_BYTES = {"auto": 4.0, "float32": 4.0, "bfloat16": 2.0, "int8": 1.1, "int4": 0.7}
"""Most bytes of a weight, by form; norms and scales are a small part of them."""


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
    model_config = expert_change(config)(ModelConfig.from_folder(folder))
    config = for_encoder(config, model_config)
    num_weights = check_weights(folder, model_config)
    weights_bytes = int(_BYTES[config.weights] * num_weights)
    if config.weights == "auto":
        weights_bytes = min(weights_bytes, _stored_bytes(folder))
    weights_bytes //= config.nnodes
    if weights_bytes > available_memory_bytes():
        raise ValueError(
            f"model must fit into the {available_memory_bytes() / 1e9:.1f} GB of memory that are available, "
            f"got {weights_bytes / 1e9:.1f} GB of weights in {config.weights.replace('auto', 'the form of its files')}"
        )
    num_ranks = config.num_ranks
    if config.enable_dp_attention:
        chosen(config.resolved(), Policies(), page_size=config.page_size).check_pools()
    state_bytes = 0 if model_config.states is None else model_config.states.bytes_per_page
    state_bytes //= num_ranks // config.num_pools
    available = available_memory_bytes() // config.ranks_per_node
    state_sizes(config, model_config, page_bytes=1, state_bytes=state_bytes, available=available)  # refuses early
    images = ImageUseOfModel.of(config, folder, model_config).loaded(config, folder)
    model_config.for_shard(_shard(config))  # what cannot be divided is refused before processes are started
    cuts = stage_cuts(config, folder, model_config, is_stored=config.weights == "auto")
    num_threads = threads_of_node(config)
    parts = _Parts(
        folder=folder,
        digest=digest,
        model=model_config,
        num_weights=num_weights,
        num_threads=num_threads,
        processors=processors,
        images=images,
        stages=stages_of(cuts, model_config.num_layers),
    )
    if num_ranks == 1:
        return _engine(config, parts, None, inbox, outbox, progress)
    group = Group(
        replace(config, num_threads=num_threads),
        num_ranks,
        shares_kv=config.host_cache_gb is not None,
        hosts=None if config.nnodes == 1 else gathered(config, digest, progress),
        cuts=cuts,
        progress=progress,
    )
    try:
        return _engine(config, parts, group, inbox, outbox, group.progress)
    except BaseException:
        group.abandon()
        raise


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """What an engine is made of."""

    folder: Path
    digest: ModelDigest
    model: ModelConfig
    num_weights: int
    num_threads: int
    """Threads of all ranks of this host together."""
    processors: Mapping[str, Process]
    images: ImageUseOfModel
    stages: Sequence[Stage]
    """Stages of the model; one stage if it is not cut."""


def _engine(
    config: EngineConfig, parts: _Parts, group: Group | None, inbox: Inbox, outbox: Outbox, progress: Progress | None
) -> Engine:
    cores = () if group is None else group.cores
    place = None
    if group is not None and group.stages is not None:
        place = StagePlace.of(group.stages, 0, parts.stages)
        _log.info("stages: %s", _listed(parts.stages))
    exchange = None if group is None else group.segment.exchange(0)
    with threads_on(cores):
        rank = CPURank(
            config,
            parts.folder,
            parts.digest,
            num_threads=parts.num_threads // config.ranks_per_node,
            shard=_shard(config),
            stage=None if place is None else place.stage,
            exchange=exchange if place is None else place.exchange,
            relay=None if place is None else place.relay,
            progress=progress,
            images=parts.images,
        )
    _log.info("weights: %s", rank.described_weights)
    encoder = parts.images.encoder(config, num_threads=parts.num_threads)
    rank.compile(progress)
    num_pages, max_length = rank.num_pages(1)
    page_bytes, part, states = rank.page_bytes, None, rank.states
    if group is not None:
        sizes, page_bytes, states = _agreed_sizes(rank, group, place, parts.stages)
        num_pages, max_length = sizes.num_pages, sizes.max_length
        if config.nnodes > 1:
            part = HostPart(
                rank=0,
                has_whole_pages=config.enable_dp_attention,
                host_page_bytes=sizes.host_page_bytes,
                num_state_parts=sizes.num_state_parts,
                group=group,
            )
    rank.allocate(num_pages, states.num_places)
    num_pools = config.num_pools
    num_pages *= num_pools
    page_bytes //= num_pools
    info = EngineInfo(
        model_name=model_name(config.model),
        max_length=max_length,
        vocab_size=parts.model.vocab_size,
        eos_token_ids=parts.model.eos_token_ids,
        num_pages=num_pages,
        page_size=config.page_size,
        windows=rank.groups.windows,
        short_length=rank.loaded.model.short_length,
        announces_pages=rank.announces_pages,
        num_states=states.num_places * num_pools,
        state_interval=states.interval,
        vector_size=parts.model.hidden_size,
        expert_shape=parts.model.expert_shape,
        reports_states=True,
        reports_kept=True,
        generates=not parts.model.is_encoder,
        takes_images=parts.images.recipe is not None,
        page_bytes=page_bytes,
        num_pools=num_pools,
        rank_places=() if group is None else group.places,
        long_step_tokens=-(
            -_LONG_STEP * parts.num_threads * config.nnodes // (parts.num_weights - parts.model.num_idle_parameters)
        ),
    )
    _log.info(
        "%s: %d tokens of KV memory (%d pages of %d, up to %.2f GB as they are used; %s), "
        "at most %d tokens a request, %d threads%s",
        info.model_name,
        num_pages * config.page_size,
        num_pages,
        config.page_size,
        num_pages * page_bytes / 1e9,
        "as configured" if config.max_total_tokens else "set another size with --max-total-tokens",
        max_length,
        parts.num_threads,
        "" if group is None else _described(config),
    )
    if parts.model.states is not None:
        _log.info(described_states(states, config, parts.model.states))
    control = draft_control(config, are_cores_taken=TakenCores())

    def make_runner(kv: AnyKV) -> Runner:
        watch = None if group is None or place is not None else StepNotes(group.segment, 0)
        with threads_on(cores):
            runner = rank.make_runner(max_length=max_length, processors=parts.processors, watch=watch, place=place)
        if group is not None:
            group.wait_until_ready()
            runner = RankedRunner(runner, group)
        if control is not None:
            measure_cost(control, config, info, runner)
        return runner

    config = replace(
        config,
        max_total_tokens=num_pages * config.page_size,
        max_length=max_length,
        num_threads=parts.num_threads,
        joint_prefill_tokens=config.joint_prefill_tokens or max(_BUSY_TOKENS, info.long_step_tokens),
    )
    assert rank.memory is not None
    memory, beside, of_states, by_request = rank.memory, rank.beside, rank.state_memory, list[DevicePages]()
    if group is not None and config.enable_dp_attention:
        by_request = rank.pages_by_request(num_pages // num_pools, states.num_places, group.kv_memory)
    elif group is not None and group.kv_memory:
        memory, beside, of_states = rank.joined_memory(
            num_pages, states.num_places, group.kv_memory, _stages_of_others(place, group.num_here)
        )
    mark = rank.loaded.mark + ("" if place is None else f" in {len(parts.stages)} stages: {_listed(parts.stages)}")
    allocator = None if num_pools > 1 else page_allocator(config.resolved(), info)
    own = with_tower(CPUPart(rank, tower=parts.images.tower), encoder, parts.images.read, gives_back=False)
    source = ModelWeights(parts.folder, own)
    tail = read_vector_tail(parts.folder, parts.model.hidden_size)
    reason = None if tail is None else "vectors of the model go through further modules of its folder"
    weights = ServedWeights(
        source if group is None else RankedWeights(source, group),
        why_fixed=reason or "",
        why_awake=why_awake() or "",
    )
    frames = Frames(pages=allocator, layers=rank.groups, beside=beside) if isinstance(allocator, PageGroups) else None
    return assemble(
        config,
        info=info,
        make_runner=make_runner,
        make_cache=tiered_cache(
            config,
            parts.digest,
            memory,
            mark=mark,
            states=of_states,
            frames=frames,
            part=part,
            by_request=by_request,
        ),
        allocator=allocator,
        drafting=control,
        compiler=grammar_compiler(config, parts.folder, info),
        adapters=adapter_source(rank.adapters, parts.folder, group, source),
        drafts_constrained=True,
        processors=parts.processors,
        inbox=inbox,
        outbox=outbox,
        expert_rows=rank.expert_rows,
        vector_tail=tail,
        weights=weights,
        images=encoder,
    )


def _shard(config: EngineConfig) -> Shard:
    """Return the first rank of a stage."""
    return Shard(0, config.tensor_parallel_size, by_request=config.enable_dp_attention)


def _agreed_sizes(
    rank: CPURank, group: Group, place: StagePlace | None, stages: Sequence[Stage]
) -> tuple[Sizes, int, StateSizes]:
    """Tell all ranks the sizes that each of them has room for; return these, the bytes of a page on all ranks, and the
    sizes of states."""
    loaded = group.answers(Loaded)
    check_division(rank.division, loaded)
    check_layers(rank.layers, loaded, stages)
    own_pages, own_length = rank.num_pages(group.num_here)
    num_pages = min(own_pages, *(one.num_pages for one in loaded))
    max_length = min(own_length, *(one.max_length for one in loaded))
    states = StateSizes(
        num_places=min(rank.states.num_places, *(one.num_states for one in loaded)),
        interval=max(rank.states.interval, *(one.state_interval for one in loaded)),
    )
    if group.kv_memory:
        others = _stages_of_others(place, group.num_here)
        group.enlarge_kv([rank.shared_bytes(num_pages, states.num_places, one) for one in others])
    page_bytes = [rank.page_bytes, *(one.page_bytes for one in loaded)]
    state_bytes = [rank.state_bytes, *(one.state_bytes for one in loaded)]
    of_hosts = [slice(first, first + group.num_here) for first in range(0, group.count, group.num_here)]
    copying = [of_hosts[0], *(slice(rank, rank + 1) for rank in range(group.num_here, group.count))]
    num_parts = max(num_state_parts(sum(state_bytes[one]), sum(page_bytes[one])) for one in copying)
    sizes = Sizes(
        num_pages=num_pages,
        max_length=max_length,
        num_states=states.num_places,
        host_page_bytes=max(part_bytes(sum(state_bytes[one]), sum(page_bytes[one]), num_parts) for one in of_hosts),
        num_state_parts=num_parts,
    )
    group.tell_all(sizes)
    return sizes, sum(page_bytes), states


def _listed(stages: Sequence[Stage]) -> str:
    return "; ".join(map(str, stages))


def _stages_of_others(place: StagePlace | None, num_ranks: int) -> list[Stage | None]:
    """Return the stages of ranks 1 to R - 1; None: there is one."""
    return [None if place is None else place.stage_of(rank) for rank in range(1, num_ranks)]


def _described(config: EngineConfig) -> str:
    """Return how ranks are divided, as text for the log."""
    hosts = f" on each of {config.nnodes} hosts" if config.nnodes > 1 else ""
    return f" in {config.ranks_per_node} processes{hosts}{', attention by request' * config.enable_dp_attention}"


def _stored_bytes(folder: Path) -> int:
    """Return about the bytes that weights take in the form of their files."""
    return sum(path.stat().st_size for path in checkpoint_files(folder))
