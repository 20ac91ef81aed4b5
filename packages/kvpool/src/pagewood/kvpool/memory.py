"""The bytes of a pool's pages, whatever they mean, as torch tensors."""

import zlib
from collections.abc import Sequence

import numpy as np
import torch

from pagewood.kvpool.hybrid import ALIGNMENT_BYTES, HybridLayout
from pagewood.kvpool.layout import PageLayout
from pagewood.kvpool.scatter import ScatteredRows, index_pages

_SYSTEM_PAGE_BYTES = 4096
"""No system has smaller pages."""


class PageMemory:
    """The arrays of a layout for every page of a pool, on one device; made by `allocate` or `allocate_groups`.

    Invariant: a page's contents change only by the methods here and by writes through `array` and `blocks`; whose page
    it is, is the caller's business. All calls but `checksum` are queued on the device's current stream, and none of
    these waits for it.
    """

    __slots__ = ("_arrays", "_blocks", "_rows", "layout", "num_pages")

    def __init__(self, layout: PageLayout, blocks: Sequence[tuple[torch.Tensor, ...]]) -> None:
        """Use memory that is there already.

        Args:
            layout: What a page is.
            blocks: For each layer and each array of the layout, `[num_pages, array.num_bytes] uint8` on one device, of
                any stride along the pages and contiguous within one; what it starts with is the caller's choice.
        """
        self.layout = layout
        self.num_pages = blocks[0][0].shape[0]
        self._blocks = tuple(blocks)  # contents written by: copy_pages, zero_pages, and whoever has a view
        self._rows = [ScatteredRows(_as_words(block)) for layer in blocks for block in layer]
        self._arrays = [
            {
                array.name: block.view(getattr(torch, array.dtype)).view(self.num_pages, *array.shape)
                for block, array in zip(layer, layout.arrays, strict=True)
            }
            for layer in blocks
        ]

    @property
    def device(self) -> torch.device:
        """The device that holds the memory."""
        return self._blocks[0][0].device

    def array(self, layer: int, name: str) -> torch.Tensor:
        """Return an array of one layer, not a copy: `[num_pages, *shape]` in its dtype."""
        return self._arrays[layer][name]

    def blocks(self, layer: int) -> tuple[torch.Tensor, ...]:
        """Return the arrays of one layer as bytes, not copies, in the layout's order.

        Each is `[num_pages, num_bytes] uint8`, contiguous in a page: what copies to other memory need to know.
        """
        return self._blocks[layer]

    def copy_pages(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        """Copy whole pages in every layer; page `src[i]` is read before any page is written.

        Args:
            src: `[n] int64` (or int32), page ids to read, on the memory's device.
            dst: `[n] int64` (or int32), distinct page ids to write.

        Raises:
            ValueError: `src` and `dst` differ in length.
            IndexError: A page lies outside the pool (on a CPU; a GPU reports it as a device-side assertion).
        """
        if src.shape != dst.shape:
            raise ValueError(f"src and dst must have one shape, got {tuple(src.shape)} and {tuple(dst.shape)}")
        source, target = (index_pages(pages, num_pages=self.num_pages) for pages in (src, dst))
        for rows in self._rows:
            rows.write(target, rows.read(source))

    def zero_pages(self, pages: torch.Tensor) -> None:
        """Fill whole pages with zeros in every layer.

        Args:
            pages: `[n] int64` (or int32), page ids, on the memory's device.

        Raises:
            IndexError: A page lies outside the pool (on a CPU; a GPU reports it as a device-side assertion).
        """
        index = index_pages(pages, num_pages=self.num_pages)
        for rows in self._rows:
            rows.zero(index)

    def touch(self) -> None:
        """Have the system provide all of the memory now, its contents unchanged; on a GPU it is there already.

        A CPU's memory is otherwise provided where it is first written, and whoever writes waits: several milliseconds
        for a huge page of a virtual machine, in the middle of a step.
        """
        if self.device.type != "cpu":
            return
        for layer in self._blocks:
            for block in layer:
                block[:, ::_SYSTEM_PAGE_BYTES] |= 0

    def checksum(self, page: int) -> int:
        """Return the CRC-32 of a page's bytes, layer by layer, for tests: it waits for the device."""
        value = 0
        for layer in self._blocks:
            for block in layer:
                value = zlib.crc32(block[page].cpu().numpy().tobytes(), value)
        return value


def allocate(layout: PageLayout, num_pages: int, *, device: str | torch.device = "cpu") -> PageMemory:
    """Allocate `num_pages * layout.bytes_per_page` bytes, each array of each layer in one piece, aligned to 64 bytes.

    Memory starts as zeros, so that a kernel which multiplies masked positions by zero meets no NaN; on a CPU the system
    provides these zeros at the first touch, so that a pool costs memory only as it fills, unless `touch` is called.

    Raises:
        ValueError: `num_pages` is less than 1.
    """
    _check_num_pages(num_pages)
    sizes = [array.num_bytes for array in layout.arrays]
    blocks = [tuple(_zeros(num_pages, size, device) for size in sizes) for _ in range(layout.num_layers)]
    return PageMemory(layout, blocks)


def allocate_groups(
    layout: HybridLayout, num_pages: int, *, device: str | torch.device = "cpu"
) -> tuple[PageMemory, ...]:
    """Allocate `num_pages * layout.bytes_per_page` bytes once, and return what each group sees of them.

    Memory starts as zeros; a page that changes from one group to another keeps its bytes, so a group that relies on
    zeros (states do) calls `zero_pages` first.

    Raises:
        ValueError: `num_pages` is less than 1.
    """
    _check_num_pages(num_pages)
    pages = _zeros(num_pages, layout.bytes_per_page, device)
    memories: list[PageMemory] = []
    for number, group in enumerate(layout.groups):
        sizes = [array.num_bytes for array in group.arrays]
        blocks = [
            tuple(pages[:, start : start + size] for start, size in zip(starts, sizes, strict=True))
            for starts in layout.offsets(number)
        ]
        memories.append(PageMemory(group, blocks))
    return tuple(memories)


def memory_for(
    layout: PageLayout, num_pages: int, *, device: str | torch.device, memory: PageMemory | None
) -> PageMemory:
    """Return the memory that was given, if it is of this layout and of so many pages; None: allocate it.

    Raises:
        ValueError: `num_pages` is less than 1, or `memory` is of another number of pages or of other arrays.
    """
    if memory is None:
        return allocate(layout, num_pages, device=device)
    has = (memory.num_pages, memory.layout.num_layers, memory.layout.arrays)
    needs = (num_pages, layout.num_layers, layout.arrays)
    if has != needs:
        raise ValueError(f"memory must be of (pages, layers, arrays) {needs}, got {has}")
    return memory


def _check_num_pages(num_pages: int) -> None:
    if num_pages < 1:
        raise ValueError(f"num_pages must be >= 1, got {num_pages}")


def _as_words(block: torch.Tensor) -> torch.Tensor:
    """Return a view of bytes as the widest integers that fit it, because a GPU copies number by number."""
    for dtype in (torch.int64, torch.int32, torch.int16):
        numbers = (block.shape[1], block.stride(0), block.storage_offset())
        if not any(number % dtype.itemsize for number in numbers):
            return block.view(dtype)
    return block


def _zeros(num_pages: int, bytes_per_page: int, device: str | torch.device) -> torch.Tensor:
    """Return `[num_pages, bytes_per_page] uint8`; a CPU's is untouched: numpy zeroes by calloc, torch by writing it."""
    if torch.device(device).type != "cpu":
        return torch.zeros(num_pages, bytes_per_page, dtype=torch.uint8, device=device)
    num_bytes = num_pages * bytes_per_page
    buffer = np.zeros(num_bytes + ALIGNMENT_BYTES, dtype=np.uint8)
    start = -buffer.ctypes.data % ALIGNMENT_BYTES
    return torch.frombuffer(buffer, dtype=torch.uint8, count=num_bytes, offset=start).view(num_pages, bytes_per_page)
