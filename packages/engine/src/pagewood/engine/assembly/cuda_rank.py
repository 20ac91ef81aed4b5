"""What a rank on a CUDA device is made of: its device, its exchange with the others, and its runner."""

# pyright: basic
# torch.cuda has no types.

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from pagewood.engine.api import EngineConfig, Progress
from pagewood.engine.assembly.expert_options import expert_change
from pagewood.engine.core.loop import Runner, RunnerLostError
from pagewood.engine.model_folder.folder import model_folder
from pagewood.engine.models.config import ModelConfig
from pagewood.engine.models.expert_division import division_mark
from pagewood.engine.models.shard import Shard
from pagewood.engine.runner.cuda.exchange import Exchange, GlooExchange, NCCLExchange, join_store, open_store
from pagewood.engine.runner.ranks.agreement import check_division
from pagewood.engine.runner.ranks.group import Group
from pagewood.engine.runner.ranks.messages import Begin, CanMeet, FromRank, Ready
from pagewood.engine.runner.ranks.noted_runner import NotedRunner
from pagewood.engine.runner.ranks.notes import StepNotes
from pagewood.engine.runner.ranks.ranked_runner import RankedRunner

if TYPE_CHECKING:
    from pagewood.engine.runner.ranks.segment import Segment

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CUDARank:
    """A rank on a device. Invariant: all ranks of a model build the same things in the same order."""

    shard: Shard
    exchange: Exchange
    num_sharing: int
    """Ranks that share its device."""
    meet: Callable[[], None]
    """Waits until all ranks have their weights; then the exchange connects."""

    def noted(self, runner: Runner, segment: Segment) -> NotedRunner:
        """Return the runner of this rank, which says what it has computed."""
        return NotedRunner(runner, StepNotes(segment, self.shard.rank), close=self.exchange.abort)


@dataclass(frozen=True, slots=True, kw_only=True)
class CUDARanks:
    """The ranks of a model, as rank 0 has them."""

    group: Group
    own: CUDARank

    def runner(self, runner: Runner) -> RankedRunner:
        """Return what gives batches to all ranks, when all of them are ready; `runner` is that of rank 0."""
        self.group.wait_until_ready()
        return RankedRunner(self.own.noted(runner, self.group.segment), self.group)


@contextmanager
def started_ranks(config: EngineConfig, progress: Progress | None) -> Generator[CUDARanks]:
    """Start the other ranks of a model, and end them if an engine cannot be built inside.

    Raises:
        ValueError: the model or the configuration is wrong for a rank.
        RunnerLostError: a rank is lost.
    """
    store, count = open_store(), config.tensor_parallel_size
    group = Group(config, count, port=store.port, progress=progress)

    def meet() -> None:
        check_division(_division(config), group.answers(CanMeet))

    try:
        own = make_rank(config, Shard(0, count), store, group.segment, meet)
        group.at_end(own.exchange.abort)
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


def use_device(rank: int, count: int) -> None:
    """Make the device of a rank the current one: the visible device of its number, or the first if there are too few.

    Does nothing without a device.
    """
    if torch.cuda.is_available():
        torch.cuda.set_device(rank if torch.cuda.device_count() >= count else 0)


def make_rank(
    config: EngineConfig, shard: Shard, store: TCPStore, segment: Segment, meet: Callable[[], None]
) -> CUDARank:
    """Return a rank whose exchange is connected by `meet` of the result; see `CUDARank`."""
    exchange: Exchange
    if torch.cuda.device_count() >= shard.count:
        num_sharing = 1
        exchange = NCCLExchange(store, shard.rank, shard.count, in_order=config.batch_invariant)
    else:
        num_sharing = shard.count
        exchange = GlooExchange(store, shard.rank, shard.count, end_reason=segment.wait_for_end)
        if shard.rank == 0:
            _log.warning(
                "%d ranks share one device, because there are %d: they exchange values through the host, without "
                "CUDA graphs, which is slow",
                shard.count,
                torch.cuda.device_count(),
            )

    def connect() -> None:
        meet()
        exchange.connect()

    return CUDARank(shard=shard, exchange=exchange, num_sharing=num_sharing, meet=connect)


def _division(config: EngineConfig) -> str:
    """Return what distinguishes the division of a model's experts from others."""
    return division_mark(expert_change(config)(ModelConfig.from_folder(model_folder(config.model))))


def follower(
    begin: Begin, segment: Segment, say: Callable[[FromRank], None], progress: Callable[[str, int, int], None]
) -> Runner:
    """Build the runner of a rank other than 0, on its device.

    Args:
        begin: what rank 0 says of it.
        segment: of the group.
        say: sends messages to rank 0.
        progress: gets reports.
    """
    from pagewood.engine.assembly import build_cuda
    from pagewood.engine.assembly.named_processors import load_processors

    assert begin.port is not None
    config, shard = begin.config.resolved(), Shard(begin.rank, begin.count)
    processors = load_processors(config)
    use_device(shard.rank, shard.count)
    device, flashinfer = build_cuda.open_cuda()
    rank = make_rank(config, shard, join_store(begin.port), segment, lambda: say(CanMeet(division=_division(config))))
    built = build_cuda.build_cuda_runner(
        device, flashinfer, config, model_folder(config.model), processors=processors, rank=rank, progress=progress
    )
    return rank.noted(built.runner, segment)
