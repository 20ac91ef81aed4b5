"""Where a rank is among the stages of a model, and what it needs of the group because of that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pagewood.engine.models.shard import Shard
from pagewood.engine.models.stage import Stage
from pagewood.engine.runner.cpu.program.exchange import Exchange
from pagewood.engine.runner.cpu.program.relay import ChannelRelay
from pagewood.engine.runner.ranks.stage_memory import StageMemory
from pagewood.engine.runner.ranks.staged_runner import StageWatch


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlace:
    """Where a rank is among the stages of a model."""

    memory: StageMemory
    """Memory that the stages of the group share."""
    rank: int
    """Its number in the group."""
    stages: Sequence[Stage]
    """All stages of the model."""
    watch: StageWatch
    """Gets what it sends and receives."""

    @classmethod
    def of(cls, memory: StageMemory, rank: int, stages: Sequence[Stage]) -> StagePlace:
        """Return the place of a rank."""
        return cls(memory=memory, rank=rank, stages=stages, watch=StageWatch())

    @property
    def stage(self) -> Stage:
        """Its layers."""
        return self.stage_of(self.rank)

    @property
    def shard(self) -> Shard:
        """Its part of them."""
        num = self.memory.num_in_stage
        return Shard(self.rank % num, num)

    @property
    def exchange(self) -> Exchange | None:
        """With the other ranks of its stage; None: it is alone."""
        return self.memory.exchange(self.rank)

    @property
    def relay(self) -> ChannelRelay:
        """Between its stage and those around it."""
        return self.memory.relay(self.rank, self.watch.states)

    def stage_of(self, rank: int) -> Stage:
        """Return the layers of a rank."""
        return self.stages[rank // self.memory.num_in_stage]
