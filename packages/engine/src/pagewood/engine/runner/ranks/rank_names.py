"""How ranks are called in logs, progress and errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankNames:
    """The names of the ranks of a group. Ranks of one stage, or of one host, have consecutive numbers."""

    count: int
    num_stages: int = 1
    per_node: int | None = None
    """Ranks of a host; None: all."""

    def __getitem__(self, rank: int) -> str:
        """Return as in "rank 1", or "rank 3 (stage 1)" if the model is cut into stages."""
        if self.num_stages == 1:
            return f"rank {rank}"
        return f"rank {rank} (stage {self._stage(rank)})"

    def label(self, rank: int) -> str:
        """Return as in "1" or "3-stage-1": what names the process of a rank."""
        return str(rank) if self.num_stages == 1 else f"{rank}-stage-{self._stage(rank)}"

    def joined(self, ranks: Sequence[int]) -> str:
        """Return as in "rank 1", "ranks 0, 2", "ranks 2, 3 (stage 1)", or "node 0 rank 1, node 1 ranks 2, 3"."""
        if self.per_node in (None, self.count):
            return self._in_stages(ranks)
        nodes: dict[int, list[int]] = {}
        for rank in ranks:
            nodes.setdefault(rank // self.per_node, []).append(rank)
        return ", ".join(f"node {node} {self._in_stages(own)}" for node, own in nodes.items())

    def _in_stages(self, ranks: Sequence[int]) -> str:
        name = _numbered(ranks)
        if self.num_stages == 1:
            return name
        stages = sorted(set(map(self._stage, ranks)))
        return f"{name} ({'stages' if len(stages) > 1 else 'stage'} {', '.join(map(str, stages))})"

    def _stage(self, rank: int) -> int:
        return rank * self.num_stages // self.count


def _numbered(ranks: Sequence[int]) -> str:
    return ("ranks " if len(ranks) > 1 else "rank ") + ", ".join(map(str, ranks))
