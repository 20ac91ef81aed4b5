"""The bytes of a pool's pages as torch tensors, independent of what the pages hold."""

import contextlib
import mmap
import sys
import zlib
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from pagewood.kvpool.arrays import check_at_least_one
from pagewood.kvpool.joint import JointLayout
from pagewood.kvpool.layout import PageLayout
from pagewood.kvpool.scatter import ScatteredRows, index_pages
from pagewood.kvpool.system_pages import return_pages

# The size of a cache line, and the alignment of the widest loads of a GPU.
_ALIGNMENT_BYTES = 64
# No operating system has smaller pages.
_SYSTEM_PAGE_BYTES = 4096


class PageMemory:
    """The arrays of a layout for all pages of a pool, on one device; made by `allocate` or `allocate_joint`.

    Invariant: the contents of a page change only through the methods of this class and through writes to the tensors
    that `array` and `blocks` return. The caller keeps track of which request owns a page. All methods except `checksum`
    queue their work on the device's current stream and do not wait for it.

    Attributes:
        layout: The layout of a page.
        num_pages: Number of pages.
        is_shared: Whether other processes have the memory mapped too.
    """

    __slots__ = ("_arrays", "_blocks", "_rows", "is_shared", "layout", "num_pages")

    def __init__(
        self, layout: PageLayout, blocks: Sequence[tuple[torch.Tensor, ...]], *, is_shared: bool = False
    ) -> None:
        """Use existing memory.

        Args:
            layout: The layout of a page.
            blocks: For each layer and each array of the layout, `[num_pages, array.num_bytes] uint8`, all on one
                device. Contiguous within a page, with any stride between pages. The caller chooses the initial
                contents.
            is_shared: Whether they lie in `SharedBytes`.
        """
        self.is_shared = is_shared
        self.layout = layout
        self.num_pages = blocks[0][0].shape[0]
        self._blocks = tuple(blocks)  # contents written by: copy_pages, zero_pages, callers through views
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
        """Return a view of one array of one layer, `[num_pages, *shape]` in its dtype."""
        return self._arrays[layer][name]

    def blocks(self, layer: int) -> tuple[torch.Tensor, ...]:
        """Return views of the arrays of one layer as bytes, in the order of the layout.

        Each is `[num_pages, num_bytes] uint8`, contiguous within a page. Code that copies pages to other memory needs
        no more than this.
        """
        return self._blocks[layer]

    def copy_pages(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        """Copy whole pages in every layer. All pages of `src` are read before any page is written.

        Args:
            src: `[n] int64` (or int32), ids of the pages to read, on the memory's device.
            dst: `[n] int64` (or int32), distinct ids of the pages to write.

        Raises:
            ValueError: `src` and `dst` differ in length.
            IndexError: A page is outside the pool (on a CPU; a GPU reports it as a device-side assertion).
        """
        if src.shape != dst.shape:
            raise ValueError(f"src and dst must have the same shape, got {tuple(src.shape)} and {tuple(dst.shape)}")
        source, target = (index_pages(pages, num_pages=self.num_pages) for pages in (src, dst))
        for rows in self._rows:
            rows.write(target, rows.read(source))

    def zero_pages(self, pages: torch.Tensor) -> None:
        """Fill whole pages with zeros in every layer.

        Args:
            pages: `[n] int64` (or int32), page ids, on the memory's device.

        Raises:
            IndexError: A page is outside the pool (on a CPU; a GPU reports it as a device-side assertion).
        """
        index = index_pages(pages, num_pages=self.num_pages)
        for rows in self._rows:
            rows.zero(index)

    def touch(self) -> None:
        """Make the operating system provide all of the memory now. The contents do not change. Does nothing on a GPU.

        Otherwise the system provides memory on a CPU when it is first written, and the write has to wait: several
        milliseconds for a huge page of a virtual machine, in the middle of a step.
        """
        if self.device.type != "cpu":
            return
        for layer in self._blocks:
            for block in layer:
                block[:, ::_SYSTEM_PAGE_BYTES] |= 0

    def release(self) -> None:
        """Give the memory back to the operating system, which provides zeros when it is used again.

        No page may be in use. The addresses of all arrays stay valid.

        Raises:
            ValueError: It is not on a CPU, or its arrays are not contiguous.
            OSError: The system is not Linux.
        """
        if self.device.type != "cpu":
            raise ValueError(f"device must be a CPU to give memory back, got {self.device}")
        for layer in self._blocks:
            for block in layer:
                if not block.is_contiguous():
                    raise ValueError("arrays must be contiguous to give memory back")
                return_pages(block.data_ptr(), block.nbytes, is_shared=self.is_shared)

    def checksum(self, page: int) -> int:
        """Return the CRC-32 of a page's bytes, layer by layer, for tests. Waits for the device."""
        value = 0
        for layer in self._blocks:
            for block in layer:
                value = zlib.crc32(block[page].cpu().numpy().tobytes(), value)
        return value


class SharedBytes:
    """Memory that other processes have mapped too, from which blocks are cut one after the other.

    Processes that cut the same blocks in the same order have the same memory in them.

    Args:
        memory: `[num_bytes] uint8` on a CPU, zeros, aligned to 64 bytes, such as a mapped file.
    """

    __slots__ = ("_end", "_memory")

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self._end = 0  # written by: cut

    def cut(self, num_pages: int, bytes_per_page: int) -> torch.Tensor:
        """Return the next `[num_pages, bytes_per_page] uint8`, aligned to 64 bytes.

        Raises:
            ValueError: there is not enough left.
        """
        first, num_bytes = self._end, num_pages * bytes_per_page
        if first + num_bytes > len(self._memory):
            raise ValueError(f"memory must have {first + num_bytes} bytes, got {len(self._memory)}")
        self._end = first + num_bytes + -num_bytes % _ALIGNMENT_BYTES
        return self._memory[first : first + num_bytes].view(num_pages, bytes_per_page)


def shared_size(layout: PageLayout, num_pages: int) -> int:
    """Return the bytes of `SharedBytes` that `allocate` or `allocate_joint` cuts for these pages, at most."""
    num_blocks = layout.num_layers * len(layout.arrays)
    return num_pages * layout.bytes_per_page + num_blocks * _ALIGNMENT_BYTES


def allocate(
    layout: PageLayout, num_pages: int, *, device: str | torch.device = "cpu", shared: SharedBytes | None = None
) -> PageMemory:
    """Allocate `num_pages * layout.bytes_per_page` bytes: one block for each array of each layer, aligned to 64 bytes.

    The memory starts as zeros, so a kernel that multiplies masked positions by zero meets no NaN. On a CPU the system
    provides these zeros when a page is first written, so a pool takes memory only as it fills, unless `touch` is
    called.

    Args:
        layout: The layout of a page.
        num_pages: Number of pages.
        device: Where to allocate.
        shared: What the blocks are cut from; None: new memory of this process.

    Raises:
        ValueError: `num_pages` is less than 1, or `shared` is too small.
    """
    check_at_least_one(num_pages=num_pages)
    sizes = [array.num_bytes for array in layout.arrays]
    cut = partial(_zeros, device) if shared is None else shared.cut
    blocks = [tuple(cut(num_pages, size) for size in sizes) for _ in range(layout.num_layers)]
    return PageMemory(layout, blocks, is_shared=shared is not None)


def allocate_joint(
    layout: JointLayout,
    num_pages: int,
    *,
    device: str | torch.device = "cpu",
    shared: SharedBytes | None = None,
) -> tuple[PageMemory, tuple[PageMemory, ...]]:
    """Allocate `num_pages * layout.bytes_per_page` bytes; return the memory of whole pages, and a view for each part.

    Each array of each layer of each part is contiguous, and starts as zeros. For `shared` see `allocate`.

    Raises:
        ValueError: `num_pages` is less than 1, or `shared` is too small.
    """
    parts = tuple(allocate(part, num_pages, device=device, shared=shared) for part in layout.parts)
    return joined(layout, parts), parts


def joined(layout: JointLayout, parts: Sequence[PageMemory]) -> PageMemory:
    """Return the memory of whole pages whose parts are in `parts`, as views."""
    blocks = [block for part in parts for layer in range(part.layout.num_layers) for block in part.blocks(layer)]
    return PageMemory(layout, [tuple(blocks)], is_shared=any(part.is_shared for part in parts))


def memory_for(
    layout: PageLayout, num_pages: int, *, device: str | torch.device, memory: PageMemory | None
) -> PageMemory:
    """Return `memory` if it fits the layout and the number of pages, or newly allocated memory if it is None.

    Raises:
        ValueError: `num_pages` is less than 1, or `memory` has another number of pages or other arrays.
    """
    if memory is None:
        return allocate(layout, num_pages, device=device)
    has = (memory.num_pages, memory.layout.num_layers, memory.layout.arrays)
    needs = (num_pages, layout.num_layers, layout.arrays)
    if has != needs:
        raise ValueError(f"memory must have (pages, layers, arrays) = {needs}, got {has}")
    return memory


def _as_words(block: torch.Tensor) -> torch.Tensor:
    """Return a view of bytes as the widest integers that fit, because a GPU copies element by element."""
    for dtype in (torch.int64, torch.int32, torch.int16):
        numbers = (block.shape[1], block.stride(0), block.storage_offset())
        if not any(number % dtype.itemsize for number in numbers):
            return block.view(dtype)
    return block


def _zeros(device: str | torch.device, num_pages: int, bytes_per_page: int) -> torch.Tensor:
    """Return `[num_pages, bytes_per_page] uint8`, zeros.

    On Linux this memory comes from the system directly: it is not touched, and has huge pages where the system offers
    them. An allocator may hand out memory that was used before instead, and torch would write the zeros.
    """
    if torch.device(device).type != "cpu":
        return torch.zeros(num_pages, bytes_per_page, dtype=torch.uint8, device=device)
    num_bytes = num_pages * bytes_per_page
    if sys.platform == "linux":
        buffer = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a system without huge pages
            buffer.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(buffer, dtype=torch.uint8).view(num_pages, bytes_per_page)
    zeros = np.zeros(num_bytes + _ALIGNMENT_BYTES, dtype=np.uint8)
    start = -zeros.ctypes.data % _ALIGNMENT_BYTES
    return torch.frombuffer(zeros, dtype=torch.uint8, count=num_bytes, offset=start).view(num_pages, bytes_per_page)
