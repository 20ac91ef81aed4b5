"""How many rows each expert of a model has had, and how evenly ranks share them.

Legend: L layers with experts, N experts, R ranks, P placed experts of a layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagewood.engine.core.messages.arrays import Int32


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLoad:
    """Rows of experts since the engine was built."""

    rank_rows: tuple[int, ...] = ()
    """`[R]`, of all layers together; empty unless ranks have whole experts."""
    rank_imbalance: float = 1.0
    """Rows of the rank that has most, over the mean of all ranks: the mean over layers."""
    expert_imbalance: float = 1.0
    """The same of experts."""
    rows: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    """By the number of the layer, `[N]`; empty unless they are wanted."""


class ExpertRows:
    """The counts of a runner. Invariant: the runner alone writes them.

    Args:
        counts: by layer, `[P]`, rows of placed experts.
        experts: for each layer, `[P]`, which expert a placed one is.
        ranks: for each layer, `[P]`, the rank of each; None: every rank has a part of every expert.
        num_experts: N.
        num_ranks: R.
        has_experts: whether rows are wanted by layer and expert.
    """

    __slots__ = ("_counts", "_experts", "_layers", "_num_experts", "_num_ranks", "_ranks", "_wants_experts")

    def __init__(
        self,
        *,
        counts: Mapping[int, NDArray[np.int64]],
        experts: Sequence[Int32],
        ranks: Sequence[Int32] | None,
        num_experts: int,
        num_ranks: int,
        has_experts: bool,
    ) -> None:
        self._layers = [str(layer) for layer in counts]
        self._counts = list(counts.values())
        self._experts = np.concatenate([one + num_experts * place for place, one in enumerate(experts)])
        self._ranks = None
        if ranks is not None:
            self._ranks = np.concatenate([one + num_ranks * place for place, one in enumerate(ranks)])
        self._num_experts = num_experts
        self._num_ranks = num_ranks
        self._wants_experts = has_experts

    def load(self) -> ExpertLoad:
        """Return the load at this moment; a step in flight may be counted in part."""
        num_layers, counts = len(self._layers), np.concatenate(self._counts)
        by_expert = np.bincount(self._experts, counts, num_layers * self._num_experts).reshape(num_layers, -1)
        by_rank = None
        if self._ranks is not None:
            by_rank = np.bincount(self._ranks, counts, num_layers * self._num_ranks).reshape(num_layers, -1)
        rows: dict[str, tuple[int, ...]] = {}
        if self._wants_experts:
            rows = dict(zip(self._layers, map(tuple, by_expert.astype(np.int64).tolist()), strict=True))
        return ExpertLoad(
            rank_rows=() if by_rank is None else tuple(by_rank.sum(axis=0).astype(np.int64).tolist()),
            rank_imbalance=1.0 if by_rank is None else _imbalance(by_rank),
            expert_imbalance=_imbalance(by_expert),
            rows=rows,
        )


def _imbalance(rows: NDArray[Any]) -> float:
    """Return the mean over layers of the most over the mean of `[L, n]`; 1 without rows."""
    means = rows.mean(axis=1)
    has_rows = means > 0
    return float((rows.max(axis=1)[has_rows] / means[has_rows]).mean()) if has_rows.any() else 1.0
