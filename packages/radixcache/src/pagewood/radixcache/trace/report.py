"""Hit rates by policy and capacity as a table."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Hit rates: shares of all blocks of a trace that were cached when they were requested.

    Attributes:
        title: name and size of the trace.
        capacities: in blocks, ascending.
        hit_rates: for each policy, one hit rate per capacity.
        bound: for each capacity, the hit rate of evicting the block whose next use is farthest in the future.
        unbounded: hit rate of a cache that never evicts.
    """

    title: str
    capacities: Sequence[int]
    hit_rates: Mapping[str, Sequence[float]]
    bound: Sequence[float]
    unbounded: float

    def to_table(self) -> str:
        """Return a Markdown table that is also readable in a terminal."""
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
