"""The parts of ranks on devices in images of pages, which lie in memory of a host that all of its ranks share.

Each rank copies its own part of an image, when rank 0 says which. So a page is there when all parts are, and what lies
below the host sees whole images.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from pagewood.kvpool.tiers.pages.arrays import Bytes
from pagewood.kvpool.tiers.pages.device import DevicePages


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageParts:
    """Where the parts of ranks are in the image of a page."""

    sizes: Sequence[int]
    """Bytes of the part of each rank of a host."""

    @property
    def num_bytes(self) -> int:
        """Bytes of an image."""
        return sum(self.sizes)

    def of(self, images: Bytes, rank: int) -> Bytes:
        """Return the part of a rank, `[n, its bytes]`, of `[n, num_bytes]`."""
        ends = list(accumulate(self.sizes, initial=0))
        return images[:, ends[rank] : ends[rank + 1]]


class FirstPart:
    """What rank 0 copies of whole images: its own part; satisfies `DevicePages`. Thread-safe.

    Args:
        own: its pages.
        parts: of an image.
    """

    __slots__ = ("_own", "_parts", "page_bytes")

    def __init__(self, own: DevicePages, parts: ImageParts) -> None:
        self._own = own
        self._parts = parts
        self.page_bytes = parts.num_bytes
        """Bytes of an image."""

    def read(self, pages: Sequence[int], memory: Bytes, slots: Sequence[int]) -> None:
        """Copy pages out."""
        self._own.read(pages, self._parts.of(memory, 0), slots)

    def write(self, pages: Sequence[int], memory: Bytes, slots: Sequence[int], arrived: Callable[[int], None]) -> None:
        """Copy pages in."""
        self._own.write(pages, self._parts.of(memory, 0), slots, arrived)
