"""Which ranks have which experts, where experts are divided among ranks as wholes (expert parallelism).

An expert is on one rank, or on several: then there are copies of it, and each row that chooses it goes to one of them.
An expert on a rank is a *placed* expert. Placed experts are numbered by rank, and on a rank by expert, so those of a
rank have consecutive numbers. Without copies, and if ranks have consecutive experts, the numbers are those of experts.

Which copy a row goes to follows from that row alone: the rank that has fewest of the row's other experts, and among
equal ones a rank that the bits of the router's output choose. So the ranks agree without talking, a token's bits do not
depend on its batch, and rows of an expert are spread over its copies.

Legend: N experts, R ranks, P placed experts, M most copies of an expert.
Source: Lepikhin et al., GShard, 2020; DeepSeek-V3 Technical Report, 2024 (redundant experts).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from pagewood.engine.json_fields import Fields

Int32 = NDArray[np.int32]

TURN = 0x9E3779B1
"""Multiplies the bits of a router's output; the upper half of the product is a number for a turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPlacement:
    """The ranks of the experts of a layer. Invariant: every expert has a rank, and every rank an expert.

    Raises:
        ValueError: an expert has no rank, or the same rank twice; a rank is out of its range, or has no expert.
    """

    num_ranks: int
    """R."""
    ranks: tuple[tuple[int, ...], ...]
    """`[N]`, the ranks that have each expert, ascending."""

    def __post_init__(self) -> None:
        for expert, ranks in enumerate(self.ranks):
            if not ranks:
                raise ValueError(f"expert {expert} must have at least one rank, got none")
            if len({*ranks}) < len(ranks):
                raise ValueError(f"expert {expert} must have each of its ranks once, got {list(ranks)}")
            for rank in ranks:
                if not 0 <= rank < self.num_ranks:
                    raise ValueError(f"ranks of expert {expert} must be in [0, {self.num_ranks}), got {rank}")
        idle = {*range(self.num_ranks)} - {rank for ranks in self.ranks for rank in ranks}
        if idle:
            raise ValueError(f"rank {min(idle)} must have at least one of {len(self.ranks)} experts, got none")

    @classmethod
    def contiguous(cls, num_experts: int, num_ranks: int) -> ExpertPlacement:
        """Return the placement of consecutive experts; the first ranks have one more where they are not a multiple.

        Raises:
            ValueError: there are fewer experts than ranks.
        """
        if num_experts < num_ranks:
            raise ValueError(
                f"tensor_parallel_size must be at most {num_experts}, the number of experts, with expert_parallel, "
                f"got {num_ranks}"
            )
        size, more = divmod(num_experts, num_ranks)
        ranks = [rank for rank in range(num_ranks) for _ in range(size + (rank < more))]
        return cls(num_ranks=num_ranks, ranks=tuple((rank,) for rank in ranks))

    @property
    def num_placed(self) -> int:
        """P."""
        return sum(map(len, self.ranks))

    @property
    def is_plain(self) -> bool:
        """Whether the numbers of placed experts are those of experts."""
        return self.placed_experts().tolist() == list(range(len(self.ranks)))

    def experts_of(self, rank: int) -> tuple[int, ...]:
        """Return the experts of a rank, ascending, in the order of their placed numbers."""
        return tuple(expert for expert, ranks in enumerate(self.ranks) if rank in ranks)

    def first_of(self, rank: int) -> int:
        """Return the number of a rank's first placed expert."""
        return sum(one < rank for ranks in self.ranks for one in ranks)

    def placed_experts(self) -> Int32:
        """Return `[P]`, the expert that each placed one is."""
        return np.array([expert for rank in range(self.num_ranks) for expert in self.experts_of(rank)], np.int32)

    def placed_ranks(self) -> Int32:
        """Return `[P]`, the rank of each placed expert."""
        counts = [len(self.experts_of(rank)) for rank in range(self.num_ranks)]
        return np.repeat(np.arange(self.num_ranks, dtype=np.int32), counts)

    def table(self) -> Int32:
        """Return `[N, M]`, the placed numbers of each expert, by rank; -1 behind them."""
        table = np.full((len(self.ranks), max(map(len, self.ranks))), -1, np.int32)
        used = np.zeros(len(self.ranks), np.int32)
        for number, expert in enumerate(self.placed_experts().tolist()):
            table[expert, used[expert]] = number
            used[expert] += 1
        return table


def read_expert_map(file: Path, num_experts: Mapping[int, int], num_ranks: int) -> dict[int, ExpertPlacement]:
    """Return the placements of a file, by layer: `{"layers": {"3": [0, 1, [0, 1], ...], ...}}`.

    A layer lists its experts, each as its rank or as a list of ranks. Layers that are not in the file have consecutive
    experts.

    Args:
        file: with the map.
        num_experts: of each layer that has experts, by its number in the model.
        num_ranks: R.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: it is no such file, or does not fit the model or the ranks; the message names layer, expert, rule
            and value.
    """
    fields = Fields.from_file(file)
    unknown = sorted(fields.values.keys() - {"layers"})
    if unknown:
        raise ValueError(f"{file} must have the field layers only, got {unknown[0]!r:.80}")
    layers = fields.section("layers")
    found = {layer: ExpertPlacement.contiguous(count, num_ranks) for layer, count in num_experts.items()}
    listed_layers: Mapping[str, object] = {} if layers is None else layers.values
    for name, experts in listed_layers.items():
        layer = int(name) if name.isascii() and name.isdecimal() and len(name) < 7 else -1
        if layer not in num_experts:
            raise ValueError(
                f"{file}: layers must be those with experts ({_runs(sorted(num_experts))}), got {name!r:.80}"
            )
        where, count = f"{file}: layer {layer}", num_experts[layer]
        if not isinstance(experts, list):
            raise ValueError(f"{where} must be a list of {count} experts, got {json.dumps(experts):.80}")
        listed = cast("list[object]", experts)
        if len(listed) != count:
            raise ValueError(f"{where} must list the ranks of {count} experts, got {len(listed)}")
        ranks = tuple(_ranks(where, expert, one) for expert, one in enumerate(listed))
        try:
            found[layer] = ExpertPlacement(num_ranks=num_ranks, ranks=ranks)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
    return found


def _ranks(where: str, expert: int, value: object) -> tuple[int, ...]:
    """Return the ranks of an expert, ascending."""
    ranks: list[object] = list(cast("list[object]", value)) if isinstance(value, list) else [value]
    numbers = [rank for rank in ranks if isinstance(rank, int) and not isinstance(rank, bool)]
    if len(numbers) < len(ranks):
        raise ValueError(f"{where}: expert {expert} must be a rank or a list of ranks, got {json.dumps(value):.80}")
    return tuple(sorted(numbers))


def _runs(numbers: list[int]) -> str:
    """Return ascending numbers as text, as in "1 to 3, 5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in runs)
