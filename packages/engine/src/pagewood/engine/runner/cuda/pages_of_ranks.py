"""The parts of ranks on devices in images of pages, which lie in memory of a host that all of its ranks share.

A state of recurrent layers is a few more images, see `StatePages`: as many on each rank. Each rank copies its own part
of an image, when rank 0 says which. So a page is there when all parts are, and what lies below the host sees whole
images.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from pagewood.kvpool.tiers.pages.arrays import Bytes
from pagewood.kvpool.tiers.pages.device import DevicePages
from pagewood.kvpool.tiers.pages.states import num_state_parts, part_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSizes:
    """The sizes of what each rank copies, the same on all ranks."""

    by_rank: Sequence[int]
    """Bytes of each rank's part of an image, or of an image of a page of its own requests."""
    num_state_parts: int
    """Parts of a state, each of which has an image; 0: no layer is recurrent."""

    @classmethod
    def of(cls, page_bytes: Sequence[int], state_bytes: Sequence[int]) -> ImageSizes:
        """Return the sizes for bytes of a page and of a state on each rank; 0: no layer of its stage is recurrent."""
        num_parts = max(map(num_state_parts, state_bytes, page_bytes))
        sizes = [part_bytes(state, page, num_parts) for state, page in zip(state_bytes, page_bytes, strict=True)]
        return cls(by_rank=sizes, num_state_parts=num_parts)


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
