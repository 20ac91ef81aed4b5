"""One budget of pages for the different kinds of layers of one model."""

from dataclasses import dataclass

from pagewood.kvpool.arrays import pages_within
from pagewood.kvpool.layout import PageLayout

# A cache line, and what the widest loads of a GPU are aligned to.
ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridLayout:
    """Groups of layers of different kinds, any of which may use any page of one pool.

    A page belongs to one group at a time: to full attention, or to sliding windows, or to states. One `PageAllocator`
    serves all groups, so memory goes where the requests need it, and nothing has to be divided beforehand.

    Invariant: a page is one run of `bytes_per_page` bytes, enough for the greatest group. A group's arrays lie in it
    layer by layer, each from a multiple of 64 bytes on. An array of one layer of the pool is `[pages, *shape]` as ever,
    with `bytes_per_page` as the stride of its first axis: contiguous within a page, but not beyond it.

    Choose the page sizes such that the groups need about equally many bytes: the rest of a page is lost
    (`padding_bytes`).

    Attributes:
        groups: At least one layout.
    """

    groups: tuple[PageLayout, ...]

    def __post_init__(self) -> None:
        if not self.groups:
            raise ValueError("groups must be at least one, got none")

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page, of whatever group."""
        return max(_padded_bytes(group) for group in self.groups)

    def padding_bytes(self, group: int) -> int:
        """Return how many bytes of a page the group leaves unused."""
        return self.bytes_per_page - self.groups[group].bytes_per_page

    def offsets(self, group: int) -> tuple[tuple[int, ...], ...]:
        """Return where in a page the arrays of a group start, in bytes, for each layer."""
        layout, start = self.groups[group], 0
        layers: list[tuple[int, ...]] = []
        for _ in range(layout.num_layers):
            offsets: list[int] = []
            for array in layout.arrays:
                offsets.append(start)
                start += _aligned(array.num_bytes)
            layers.append(tuple(offsets))
        return tuple(layers)

    def pages_for(self, num_bytes: int) -> int:
        """Return how many pages fit into `num_bytes`.

        Raises:
            ValueError: Not even one does.
        """
        return pages_within(num_bytes, self.bytes_per_page)


def _padded_bytes(layout: PageLayout) -> int:
    return layout.num_layers * sum(_aligned(array.num_bytes) for array in layout.arrays)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
