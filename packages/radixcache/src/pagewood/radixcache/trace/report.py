"""Hit rates by policy and capacity, as a table."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Shares of all blocks of a trace that were in the cache when they were asked for.

    Attributes:
        title: which trace, and how large it is.
        capacities: in blocks, ascending.
        hit_rates: for each policy, one for each capacity.
        bound: for each capacity, that of evicting what is used farthest in the future.
        unbounded: that of a cache that never evicts.
    """

    title: str
    capacities: Sequence[int]
    hit_rates: Mapping[str, Sequence[float]]
    bound: Sequence[float]
    unbounded: float

    def to_table(self) -> str:
        """Return a Markdown table that also reads well in a terminal."""
        rows = [
            ["policy", *(f"{capacity:,}" for capacity in self.capacities)],
            *([policy, *map(_share, rates)] for policy, rates in self.hit_rates.items()),
            ["farthest next use", *map(_share, self.bound)],
            ["infinite cache", *([_share(self.unbounded)] * len(self.capacities))],
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        rule = f"|{'-' * (widths[0] + 2)}|" + "".join(f"{'-' * (width + 1)}:|" for width in widths[1:])
        lines = [_row(row, widths) for row in rows]
        return "\n".join([f"Hit rate of blocks, by capacity in blocks: {self.title}", "", lines[0], rule, *lines[1:]])


def _share(rate: float) -> str:
    return f"{rate:.3f}"


def _row(cells: list[str], widths: list[int]) -> str:
    padded = [
        cells[0].ljust(widths[0]),
        *(cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)),
    ]
    return f"| {' | '.join(padded)} |"
