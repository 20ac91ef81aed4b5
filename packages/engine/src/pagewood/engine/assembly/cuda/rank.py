"""What a rank on a CUDA device is made of: its device, its exchanges with the others, and its runner."""

# pyright: basic
# torch.cuda has no types.

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from pagewood.engine.api import EngineConfig, Progress
from pagewood.engine.assembly.adapter_source import adapter_folders
from pagewood.engine.assembly.cuda.drafter import drafter_of, head_of
from pagewood.engine.assembly.cuda.weights import CUDAPart
from pagewood.engine.assembly.model_weights import ModelWeights
from pagewood.engine.assembly.ranks.expert_options import expert_change
from pagewood.engine.assembly.ranks.nodes import gathered
from pagewood.engine.assembly.tiers.lower_caches import (
    WholePages,
    check_available,
    followed_pages,
    num_images,
    tiered_cache,
)
from pagewood.engine.core.loop import Runner, RunnerLostError
from pagewood.engine.model_folder.folder import model_folder
from pagewood.engine.model_folder.model_digest import ModelDigest
from pagewood.engine.models.config import ModelConfig
from pagewood.engine.models.expert_division import division_mark
from pagewood.engine.models.shard import Shard
from pagewood.engine.models.stage import NO_HEAD, Stage, stages_of
from pagewood.engine.node_address import Address
from pagewood.engine.runner.cuda.division import RequestDivision
from pagewood.engine.runner.cuda.exchange import Exchange, GlooExchange, GroupPlace, NCCLExchange
from pagewood.engine.runner.cuda.pages_of_ranks import FirstPart, ImageParts, ImageSizes
from pagewood.engine.runner.cuda.rank_store import LOCAL, RankStore, join_store, open_store
from pagewood.engine.runner.cuda.runner import CUDARunner
from pagewood.engine.runner.cuda.stage_relay import Channel, GlooChannel, NCCLChannel, StageRelay
from pagewood.engine.runner.cuda.stage_runner import StageRunner
from pagewood.engine.runner.ranks.agreement import check_division
from pagewood.engine.runner.ranks.group import Group
from pagewood.engine.runner.ranks.hosts.meeting import own_host
from pagewood.engine.runner.ranks.messages import Begin, CanMeet, FromRank, Ready
from pagewood.engine.runner.ranks.noted_runner import NotedRunner
from pagewood.engine.runner.ranks.notes import StepNotes
from pagewood.engine.runner.ranks.ranked_adapters import FollowedAdapters
from pagewood.engine.runner.ranks.ranked_pages import FollowedPages, HostPart, PagesElsewhere, RankedPages
from pagewood.engine.runner.ranks.ranked_runner import RankedRunner
from pagewood.engine.runner.ranks.ranked_weights import FollowedWeights
from pagewood.engine.runner.ranks.segment import mapped, segment_bytes
from pagewood.engine.runner.ranks.stage_memory import StageMemory
from pagewood.engine.runner.ranks.staged_runner import StagedRunner, StageWatch
from pagewood.engine.runner.trainer_groups import TrainerGroups
from pagewood.kvpool.memory import PageMemory
from pagewood.kvpool.tiers import StatePages, TieredIndex
from pagewood.kvpool.tiers.pages.arrays import Bytes
from pagewood.kvpool.tiers.pages.device import DevicePages
from pagewood.kvpool.tiers.torch_pages import device_pages, pinned, with_states

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pagewood.engine.assembly.cuda.build import BuiltRunner
    from pagewood.engine.runner.ranks.segment import Segment

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CUDARank:
    """A rank on a device. Invariant: all ranks of a model build the same things in the same order."""

    number: int
    """Its number in the group."""
    shard: Shard
    """Its part of the layers of its stage."""
    exchange: Exchange | None
    """With the other ranks of its stage; None: it is alone."""
    stage: Stage | None
    """Its layers; None: all."""
    relay: StageRelay | None
    """Between its stage and those around it; None: there is one."""
    is_queued: bool
    """Whether exchanges are queued on the device, so that a rank has one of its own."""
    num_sharing: int
    """Ranks that share its device."""
    store: RankStore
    stages: StageMemory | None
    """What stages share; None: there is one."""
    images: int | None
    """Descriptor of the host cache that it shares with rank 0; None: it shares none."""
    meet: Callable[[], None]
    """Waits until all ranks have their weights; then exchange and relay connect."""

    def division(self, num_rows: int, num_pages: int, num_states: int) -> RequestDivision | None:
        """Return the division of requests among ranks that have as many pages and places of states each; None: each has
        its part of all.
        """
        if not self.shard.by_request:
            return None
        assert self.exchange is not None
        return RequestDivision(
            exchange=self.exchange,
            rank=self.shard.rank,
            count=self.shard.count,
            num_pages=num_pages,
            num_states=num_states,
            owners=np.zeros(num_rows, np.int32),
        )

    def noted(self, runner: CUDARunner) -> Runner:
        """Return the runner of this rank, which says what it has computed."""
        segment = self.store.segment
        if self.stages is None:
            return NotedRunner(runner, StepNotes(segment, self.number), close=self.abort)
        watch = StageWatch()
        own = StageRunner(runner, watch, close=self.abort)
        return StagedRunner(own, own.learn, watch, self.stages, self.number)

    def abort(self) -> None:
        """End what waits for ranks that are lost."""
        for one in (self.exchange, self.relay):
            if one is not None:
                one.abort()


@dataclass(frozen=True, slots=True, kw_only=True)
class CUDARanks:
    """The ranks of a model, as rank 0 has them."""

    group: Group
    own: CUDARank

    def make_cache(
        self,
        config: EngineConfig,
        digest: ModelDigest,
        built: BuiltRunner,
    ) -> Callable[[], TieredIndex] | None:
        """Return what `tiered_cache` does, of the pages and states of all ranks; `built` is that of rank 0.

        Raises:
            ValueError: the host has no room for the cache.
        """
        memory, sizes = built.memory, built.image_sizes
        here, whole, by_request = range(1, self.group.num_here), None, list[DevicePages]()
        if self.own.images is not None:
            images, parts = _shared_images(config, self.own.images, sizes, memory)
            own, layout = _pages_of(built), f"{memory.layout}"
            states = own if isinstance(own, StatePages) else None
            if states is not None:
                layout += f" {states.num_parts} parts of a state"
            if parts is None:
                page = PagesElsewhere(sizes.by_rank[0])
                by_request = [
                    RankedPages(page, images, self.group, ranks=here[one : one + 1]) for one in range(len(here))
                ]
            else:
                own = RankedPages(FirstPart(own, parts), images, self.group, ranks=here)
                stage = self.own.stage or "all layers"
                layout += (
                    f" on {self.own.shard.count} ranks of a stage, of which this one has {stage}; "
                    f"parts {list(parts.sizes)}"
                )
            whole = WholePages(pages=own, images=images, layout=layout, states=states)
        part = None if config.nnodes == 1 else _host_part(config, 0, sizes, self.group)
        return tiered_cache(
            config, digest, memory, states=built.state_memory, whole=whole, part=part, by_request=by_request,
            num_spare=1,
        )  # fmt: skip

    def runner(self, runner: CUDARunner) -> RankedRunner:
        """Return what gives batches to all ranks, when all of them are ready; `runner` is that of rank 0."""
        self.group.wait_until_ready()
        return RankedRunner(self.own.noted(runner), self.group)


@contextmanager
def started_ranks(
    config: EngineConfig, digest: ModelDigest, cuts: Sequence[int], progress: Progress | None
) -> Generator[CUDARanks]:
    """Start the other ranks of a model, and end them if an engine cannot be built inside.

    Args:
        config: resolved.
        digest: of the model.
        cuts: first layer of each stage but the first one; empty: the model is not cut into stages.
        progress: gets reports of what all ranks do.

    Raises:
        ValueError: the model or the configuration is wrong for a rank.
        RunnerLostError: a rank is lost.
    """
    hosts = None if config.nnodes == 1 else gathered(config, digest, progress)
    if config.master_addr is not None and not Address.parsed(config.master_addr).is_loopback:
        _log.warning("what devices of several hosts exchange is not proved by a secret: their network must be private")
    store = open_store(_meeting_host(config))
    group = Group(
        config,
        config.num_ranks,
        shares_kv=config.host_cache_gb is not None,
        cuts=cuts,
        port=store.port,
        hosts=hosts,
        progress=progress,
    )

    def meet() -> None:
        others = group.answers(CanMeet)
        check_division(_division(config), others)
        _check_backends(_has_devices(config), others)

    try:
        own = make_rank(
            config, 0, cuts, store, group.segment, group.stages, meet, images=next(iter(group.kv_memory), None)
        )
        group.at_end(own.abort)
        yield CUDARanks(group=group, own=own)
    except RunnerLostError:
        try:
            group.answers(Ready)  # raises what the lost rank has said, if it has
        finally:
            group.abandon()
        raise
    except BaseException:
        group.abandon()
        raise


def use_device(number: int, config: EngineConfig) -> None:
    """Make the device of a rank the current one: the visible device of its number on its host, or the first if there
    are too few.

    Does nothing without a device.
    """
    if torch.cuda.is_available():
        torch.cuda.set_device(number % config.ranks_per_node if _has_devices(config) else 0)


def make_rank(
    config: EngineConfig,
    number: int,
    cuts: Sequence[int],
    store: TCPStore,
    segment: Segment,
    stages: StageMemory | None,
    meet: Callable[[], None],
    *,
    images: int | None,
) -> CUDARank:
    """Return a rank whose exchanges are connected by `meet` of the result; see `CUDARank` and `started_ranks`."""
    count, is_queued = config.tensor_parallel_size, _has_devices(config)
    stage_number, own = divmod(number, count)
    meeting = RankStore(store=store, segment=segment, rank=number)
    host = LOCAL if config.master_addr is None else own_host(Address.parsed(config.master_addr))
    place = partial(GroupPlace, store=store, host=host)
    if not is_queued and number % config.ranks_per_node == 0:
        _log.warning(
            "ranks exchange values through the host, without CUDA graphs, which is slow, because %d of them share %d "
            "devices",
            config.ranks_per_node,
            torch.cuda.device_count(),
        )
    exchange: Exchange | None = None
    found = drafter_of(config, model_folder(config.model))
    if count > 1:
        among = place(name=f"stage {stage_number}", rank=own, count=count)
        # Each stage has a draft model of its own, and all must draft the same, whatever connects their devices.
        in_order = config.batch_invariant or (bool(cuts) and found is not None and found.kind == "draft")
        exchange = (
            NCCLExchange(among, in_order=in_order)
            if is_queued
            else GlooExchange(among, end_reason=segment.wait_for_end)
        )

    def channel(sender: int) -> Channel | None:
        if not 0 <= sender < config.num_ranks - count:
            return None
        between = place(name=f"from rank {sender}", rank=int(sender != number), count=2)
        return NCCLChannel(between) if is_queued else GlooChannel(between, end_reason=segment.wait_for_end)

    stage: Stage | None = None
    relay: StageRelay | None = None
    if cuts:
        stage = stages_of(cuts, ModelConfig.from_folder(model_folder(config.model)).num_layers)[stage_number]
        head = None if found is None else head_of(found, model_folder(config.model))
        relay = StageRelay(
            channel(number - count),
            channel(number),
            dtype=getattr(torch, config.dtype),
            needs=NO_HEAD if head is None else head.needs,
        )

    def connect() -> None:
        meet()
        meeting.numbers("may connect", 1)  # rank 0 has compared what all ranks say
        for one in (exchange, relay):
            if one is not None:
                one.connect()

    return CUDARank(
        number=number,
        shard=Shard(own, count, by_request=config.enable_dp_attention),
        exchange=exchange,
        stage=stage,
        relay=relay,
        is_queued=is_queued,
        num_sharing=1 if is_queued else config.ranks_per_node,
        store=meeting,
        stages=stages,
        images=images,
        meet=connect,
    )


def _shared_images(
    config: EngineConfig, descriptor: int, sizes: ImageSizes, memory: PageMemory
) -> tuple[Bytes, ImageParts | None]:
    """Return the host cache of the ranks of rank 0's host, `[num_images, bytes of an image]`.

    Args:
        config: with a host cache.
        descriptor: of the memory that they share, which gets its size here.
        sizes: of images.
        memory: of the pages of this rank.

    Returns:
        The images, and which part of an image each rank has; None: images are those of pages of one rank.

    Raises:
        ValueError: it has no room for a page, or cannot be pinned.
    """
    parts, size, host_bytes = None, sizes.by_rank[0], sizes.by_rank[0]
    if not config.enable_dp_attention:
        parts = ImageParts(sizes=sizes.by_rank[: config.ranks_per_node])
        size, host_bytes = parts.num_bytes, _host_page_bytes(config, sizes)
    num_pages = num_images(config, host_bytes, num_parts=sizes.num_state_parts)
    os.ftruncate(descriptor, num_pages * size)
    images = mapped(descriptor).reshape(num_pages, size)
    if memory.device.type == "cpu":
        return images, parts
    check_available(images.nbytes)
    try:
        return pinned(images), parts
    except RuntimeError as error:
        raise ValueError(f"host_cache_gb must be memory that can be pinned for a GPU: {error}") from error


def _pages_of(built: BuiltRunner) -> DevicePages:
    """Return the pages of a rank, with its states in as many parts as on all ranks."""
    pages, num_parts = device_pages(built.memory), built.image_sizes.num_state_parts
    return with_states(pages, built.state_memory, num_parts=num_parts) if num_parts else pages


def _host_page_bytes(config: EngineConfig, sizes: ImageSizes) -> int:
    """Return the bytes of an image on the host that has most of it; see `Sizes`."""
    num = config.ranks_per_node
    return max(sum(sizes.by_rank[first : first + num]) for first in range(0, config.num_ranks, num))


def _host_part(config: EngineConfig, rank: int, sizes: ImageSizes, group: Group | None = None) -> HostPart:
    """Return what a process copies of all pages; rank 0 has the `group`."""
    return HostPart(
        rank=rank,
        has_whole_pages=config.enable_dp_attention,
        host_page_bytes=_host_page_bytes(config, sizes),
        num_state_parts=sizes.num_state_parts,
        group=group,
    )


def _followed_pages(
    config: EngineConfig,
    rank: CUDARank,
    built: BuiltRunner,
    begin: Begin,
    say: Callable[[FromRank], None],
) -> FollowedPages | None:
    """Return the pages of a rank other than 0, which copies them when rank 0 says so; None: there is no host cache."""
    if config.host_cache_gb is None:
        return None
    if rank.images is not None:
        images, parts = _shared_images(config, rank.images, built.image_sizes, built.memory)
        own = images if parts is None else parts.of(images, rank.number)
        return FollowedPages(_pages_of(built), own, {}, say)
    part, mark = _host_part(config, rank.number, built.image_sizes), f"stages begin at {begin.cuts}" * bool(begin.cuts)
    digest = ModelDigest(model_folder(config.model))
    return followed_pages(config, digest, built.memory, mark=mark, part=part, states=built.state_memory, talk=say)


def _has_devices(config: EngineConfig) -> bool:
    """Whether each rank of this host has a device."""
    return torch.cuda.device_count() >= config.ranks_per_node


def _check_backends(own: bool, others: Sequence[CanMeet]) -> None:
    """Check that ranks of all hosts exchange in the same way.

    Raises:
        ValueError: they do not.
    """
    for rank, other in enumerate(others, 1):
        if other.has_device != own:
            raise ValueError(
                "ranks must have a device each on all hosts, or share one on all of them, got "
                f"{_HAVE[own]} on the host of rank 0, and {_HAVE[not own]} on that of rank {rank}"
            )


_HAVE = {True: "a device for each rank", False: "fewer devices than ranks"}


def _meeting_host(config: EngineConfig) -> str:
    """Return the address of this host, which is node 0, where the ranks of all hosts meet."""
    return LOCAL if config.master_addr is None else Address.parsed(config.master_addr).host


def _division(config: EngineConfig) -> str:
    """Return what distinguishes the division of a model's experts from others."""
    return division_mark(expert_change(config)(ModelConfig.from_folder(model_folder(config.model))))


def follower(
    begin: Begin,
    memory: NDArray[np.uint8],
    segment: Segment,
    say: Callable[[FromRank], None],
    progress: Callable[[str, int, int], None],
) -> tuple[Runner, FollowedWeights, FollowedPages | None, FollowedAdapters | None]:
    """Build the runner of a rank other than 0, on its device, and its part of weights that change, of a host cache and
    of adapters.

    Args:
        begin: what rank 0 says of it.
        memory: that all ranks share.
        segment: of the group, which is in it.
        say: sends messages to rank 0.
        progress: gets reports.
    """
    from pagewood.engine.assembly.cuda import build as build_cuda
    from pagewood.engine.assembly.named_processors import load_processors

    assert begin.port is not None
    config = begin.config.resolved()
    processors = load_processors(config)
    use_device(begin.rank, config)
    device, flashinfer = build_cuda.open_cuda()
    if config.node_rank:  # rank 0 has compiled kernels on its own host
        build_cuda.compile_for(config, progress)
    stages = None
    if begin.cuts:
        stages = StageMemory.in_memory(memory[segment_bytes(begin.count) :], segment, 1 + len(begin.cuts))

    def meet() -> None:
        say(CanMeet(division=_division(config), has_device=_has_devices(config)))

    store = join_store(_meeting_host(config), begin.port)
    rank = make_rank(config, begin.rank, begin.cuts, store, segment, stages, meet, images=begin.kv_memory)
    built = build_cuda.build_cuda_runner(
        device, flashinfer, config, model_folder(config.model), processors=processors, rank=rank, progress=progress
    )
    pages = _followed_pages(config, rank, built, begin, say)
    folder, own = model_folder(config.model), CUDAPart(device, built, rank=begin.rank)
    part = ModelWeights(folder, own, groups=TrainerGroups(device.torch_device))
    adapters = None
    if built.adapters is not None:
        adapters = FollowedAdapters(adapter_folders(built.adapters, folder, part), say)
    return rank.noted(built.runner), FollowedWeights(part, say), pages, adapters
