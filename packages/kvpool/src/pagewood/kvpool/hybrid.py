"""One pool of pages for the different kinds of layers of one model."""

from dataclasses import dataclass

from pagewood.kvpool.arrays import pages_within
from pagewood.kvpool.layout import PageLayout

# The size of a cache line, and the alignment of the widest loads of a GPU.
ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridLayout:
    """Groups of layers of different kinds that share one pool: any group may use any page.

    A page belongs to one group at a time: to full attention, to sliding windows, or to states, for instance. One
    `PageAllocator` serves all groups, so memory goes where the requests need it and need not be divided in advance.

    Invariant: a page is one run of `bytes_per_page` bytes, enough for the largest group. The arrays of a group lie in
    it layer by layer, and each starts at a multiple of 64 bytes. In the pool, an array of one layer has the shape
    `[pages, *shape]` as in every layout, but the stride of its first axis is `bytes_per_page`: it is contiguous within
    a page only.

    Choose page sizes for which the groups need about the same number of bytes. The rest of a page is lost
    (`padding_bytes`).

    Attributes:
        groups: The layouts of the groups, at least one.
    """

    groups: tuple[PageLayout, ...]

    def __post_init__(self) -> None:
        if not self.groups:
            raise ValueError("groups must not be empty")

    @property
    def bytes_per_page(self) -> int:
        """Size of one page, the same for all groups, in bytes."""
        return max(_padded_bytes(group) for group in self.groups)

    def padding_bytes(self, group: int) -> int:
        """Return the number of bytes of a page that the group cannot use."""
        return self.bytes_per_page - self.groups[group].bytes_per_page

    def offsets(self, group: int) -> tuple[tuple[int, ...], ...]:
        """Return where the arrays of a group start within a page: for each layer, a byte offset for each array."""
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
        """Return the number of pages that fit into `num_bytes`.

        Raises:
            ValueError: `num_bytes` is less than one page.
        """
        return pages_within(num_bytes, self.bytes_per_page)


def _padded_bytes(layout: PageLayout) -> int:
    return layout.num_layers * sum(_aligned(array.num_bytes) for array in layout.arrays)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
