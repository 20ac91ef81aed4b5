"""The division of layers into groups whose pages have the same size."""

from collections.abc import Sequence
from dataclasses import dataclass

_MOST_PADDING = 8
"""Groups are filled up with layers that hold nothing, at most one for each _MOST_PADDING layers that do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroups:
    """Groups of `num_layers` layers each. Invariant: each layer has a place of its own; whole groups come first.

    A group needs all positions of a sequence, or only the last ones (a window). Its memory behind the window can be
    reused while the sequence goes on.

    Source: vLLM's hybrid KV cache manager.

    Attributes:
        num_layers: of each group, some of which may hold nothing.
        windows: of each group: positions that a token sees, itself included; None: all.
        places: of each layer of the model: its group, and its number in the group.
    """

    num_layers: int
    windows: tuple[int | None, ...]
    places: tuple[tuple[int, int], ...]

    @classmethod
    def whole(cls, num_layers: int) -> "LayerGroups":
        """Return one group of all layers, which needs all positions."""
        return cls(num_layers=num_layers, windows=(None,), places=tuple((0, layer) for layer in range(num_layers)))

    @classmethod
    def divide(cls, windows: Sequence[int | None], *, max_length: int) -> "LayerGroups":
        """Divide layers into those that need all positions and those with a window, in groups as large as possible.

        Layers with different windows share groups, which then need the largest of these.

        Args:
            windows: of each layer, at least one.
            max_length: longest sequence; windows of this length and more count as none.
        """
        windowed = [layer for layer, one in enumerate(windows) if one is not None and one < max_length]
        if not windowed:
            return cls.whole(len(windows))
        others = [layer for layer in range(len(windows)) if layer not in windowed]
        largest = max(one for layer in windowed if (one := windows[layer]) is not None)
        num_layers = _group_size(len(others), len(windowed))
        places: dict[int, tuple[int, int]] = {}
        for first, layers in ((0, others), (-(-len(others) // num_layers), windowed)):
            for number, layer in enumerate(layers):
                places[layer] = first + number // num_layers, number % num_layers
        return cls(
            num_layers=num_layers,
            windows=(None,) * -(-len(others) // num_layers) + (largest,) * -(-len(windowed) // num_layers),
            places=tuple(places[layer] for layer in range(len(windows))),
        )


def _group_size(num_whole: int, num_windowed: int) -> int:
    """Return the largest size of groups that leaves few places empty; size 1 leaves none empty."""
    sizes = [num for num in (num_whole, num_windowed) if num]
    for size in range(min(sizes), 1, -1):
        if sum(-num % size for num in sizes) * _MOST_PADDING <= sum(sizes):
            return size
    return 1
