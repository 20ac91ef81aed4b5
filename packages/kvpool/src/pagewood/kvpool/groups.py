"""The division of layers into groups whose pages have the same size."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

_MOST_PADDING = 8
"""Groups are filled up with places that hold nothing, at most one for each _MOST_PADDING places that do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroups:
    """Groups of `num_layers` places each, for one layer or for several small ones. Invariant: whole groups come first.

    A group needs all positions of a sequence, or only the last ones (a window). Its memory behind the window can be
    reused while the sequence goes on. A layer shares its memory with another one only after `shared`.

    Source: vLLM's hybrid KV cache manager.

    Attributes:
        num_layers: places of each group, some of which may hold nothing.
        windows: of each group: positions that a token sees, itself included; None: all.
        places: of each layer of the model: its group, and its number in the group.
        starts: of each layer: how much of its place lies before it, in the unit of its size.
    """

    num_layers: int
    windows: tuple[int | None, ...]
    places: tuple[tuple[int, int], ...]
    starts: tuple[int, ...]

    @classmethod
    def whole(cls, num_layers: int) -> "LayerGroups":
        """Return one group of all layers, which needs all positions."""
        return cls.divide((None,) * num_layers, max_length=1)

    @classmethod
    def divide(
        cls, windows: Sequence[int | None], *, max_length: int, sizes: Sequence[int] | None = None
    ) -> "LayerGroups":
        """Divide layers into those that need all positions and those with a window, in groups as large as possible.

        Layers with different windows share groups, which then need the largest of these. A place is as large as the
        largest layer; layers that need the same positions share it if they fit.

        Args:
            windows: of each layer, at least one.
            max_length: longest sequence; windows of this length and more count as none.
            sizes: of each layer, >= 1, in any unit; None: all have the same.
        """
        sizes = sizes or (1,) * len(windows)
        windowed = [layer for layer, one in enumerate(windows) if one is not None and one < max_length]
        others = [layer for layer in range(len(windows)) if layer not in windowed]
        places: dict[int, tuple[int, int]] = {}
        counts: list[int] = []
        for layers in (others, windowed):
            numbers, count = _fill(layers, sizes)
            places |= numbers
            counts.append(count)
        num_layers = _group_size(*counts)
        num_whole, num_windowed = (-(-count // num_layers) for count in counts)
        first = dict.fromkeys(windowed, num_whole)
        largest = max((one for layer in windowed if (one := windows[layer]) is not None), default=None)
        found = [(first.get(layer, 0), *places[layer]) for layer in range(len(windows))]
        return cls(
            num_layers=num_layers,
            windows=(None,) * num_whole + (largest,) * num_windowed,
            places=tuple((group + number // num_layers, number % num_layers) for group, number, _ in found),
            starts=tuple(start for *_, start in found),
        )

    def shared(self, owners: Sequence[int]) -> "LayerGroups":
        """Return the groups of layers that have the memory of these layers: `owners` are their numbers here."""
        return replace(
            self,
            places=tuple(self.places[owner] for owner in owners),
            starts=tuple(self.starts[owner] for owner in owners),
        )


def _fill(layers: Sequence[int], sizes: Sequence[int]) -> tuple[dict[int, tuple[int, int]], int]:
    """Return the number of each layer's place and what lies before it there, and how many places there are."""
    largest, used = max(sizes), list[int]()
    places: dict[int, tuple[int, int]] = {}
    for layer in layers:
        number = next((i for i, one in enumerate(used) if one + sizes[layer] <= largest), len(used))
        if number == len(used):
            used.append(0)
        places[layer] = number, used[number]
        used[number] += sizes[layer]
    return places, len(used)


def _group_size(num_whole: int, num_windowed: int) -> int:
    """Return the largest size of groups that leaves few places empty; size 1 leaves none empty."""
    sizes = [num for num in (num_whole, num_windowed) if num]
    for size in range(min(sizes), 1, -1):
        if sum(-num % size for num in sizes) * _MOST_PADDING <= sum(sizes):
            return size
    return 1
