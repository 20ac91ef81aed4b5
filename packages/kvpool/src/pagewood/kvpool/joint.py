"""Pages that hold something of several layouts at once, under one page id."""

from dataclasses import dataclass

from pagewood.kvpool.arrays import PageArray, pages_within
from pagewood.kvpool.layout import PageLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class JointLayout:
    """Several layouts that share page ids: a page holds the arrays of all of them.

    A draft model keeps its keys and values in the pages of its target, for instance, so that whatever moves, caches or
    copies a page does so for both.

    Invariant: it has one layer, whose arrays are those of all layers of all parts, in order. They are named after the
    part and the layer: `1.0.kv` is `kv` in layer 0 of part 1.

    Attributes:
        parts: The layouts, at least one.
    """

    parts: tuple[PageLayout, ...]

    def __post_init__(self) -> None:
        if not self.parts:
            raise ValueError("parts must not be empty")

    @property
    def num_layers(self) -> int:
        """1: the layers of the parts are arrays of one layer."""
        return 1

    @property
    def arrays(self) -> tuple[PageArray, ...]:
        """The arrays of all layers of all parts."""
        return tuple(
            PageArray(name=f"{number}.{layer}.{array.name}", dtype=array.dtype, shape=array.shape)
            for number, part in enumerate(self.parts)
            for layer in range(part.num_layers)
            for array in part.arrays
        )

    @property
    def bytes_per_page(self) -> int:
        """Size of one page with all parts, in bytes."""
        return sum(part.bytes_per_page for part in self.parts)

    def pages_for(self, num_bytes: int) -> int:
        """Return the number of pages that fit into `num_bytes`.

        Raises:
            ValueError: `num_bytes` is less than one page.
        """
        return pages_within(num_bytes, self.bytes_per_page)
