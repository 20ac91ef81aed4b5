"""The memory of a pool: one layout on one device, as torch tensors."""

import math

import numpy as np
import torch

from pagewood.kvpool.layout import MultiHeadLayout

# A cache line: rows that start on one are read with the fewest loads.
_ALIGNMENT_BYTES = 64


class KVStorage:
    """The keys and values of all layers, for every page of a pool.

    Invariant: a page's contents change only by `write`, `copy_pages` and writes through `layer`; whose page it is, is
    the caller's business. Memory starts as zeros, so that a kernel which multiplies masked positions by zero meets no
    NaN; on a CPU the system provides these zeros at the first touch, so that a pool costs memory only as it fills. All
    calls are queued on the device's current stream and none waits for it.
    """

    __slots__ = ("_layers", "layout", "num_pages")

    def __init__(self, layout: MultiHeadLayout, num_pages: int, *, device: str | torch.device = "cpu") -> None:
        """Allocate `num_pages * layout.bytes_per_page` bytes on `device`.

        Raises:
            ValueError: `num_pages` is less than 1.
        """
        if num_pages < 1:
            raise ValueError(f"num_pages must be >= 1, got {num_pages}")
        self.layout = layout
        self.num_pages = num_pages
        dtype: torch.dtype = getattr(torch, layout.dtype)
        memory = _zeros((layout.num_layers, *layout.shape(num_pages)), dtype, torch.device(device))
        self._layers = memory.unbind(0)  # contents written by: write, copy_pages

    @property
    def device(self) -> torch.device:
        """The device that holds the memory."""
        return self._layers[0].device

    def layer(self, layer: int) -> torch.Tensor:
        """Return one layer's memory, not a copy: `layout.shape(num_pages)` in the layout's dtype, contiguous."""
        return self._layers[layer]

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        """Write the keys and values of some tokens into one layer.

        Args:
            layer: In [0, num_layers).
            k: `[tokens, num_kv_heads, head_dim]` in the layout's dtype, on the storage's device.
            v: Like `k`.
            slots: `[tokens] int64` (or int32), `page * page_size + offset` of each token, distinct, on the same device.

        Raises:
            ValueError: A shape does not fit.
            IndexError: A slot lies outside the pool (on a CPU; a GPU reports it as a device-side assertion).
        """
        layout = self.layout
        expected = (slots.shape[0], layout.num_kv_heads, layout.head_dim)
        if k.shape != expected or v.shape != expected:
            raise ValueError(f"k and v must have shape {expected}, got {tuple(k.shape)} and {tuple(v.shape)}")
        rows = self._rows(slots)
        row_length = layout.strides[2] if layout.order == "NHD" else layout.head_dim
        memory = self._layers[layer].view(-1, row_length)
        memory.index_copy_(0, rows, k.reshape(-1, row_length))
        memory.index_copy_(0, rows + layout.strides[1] // row_length, v.reshape(-1, row_length))

    def copy_pages(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        """Copy whole pages in every layer; page `src[i]` is read before any page is written.

        Args:
            src: `[n] int64` (or int32), page ids to read, on the storage's device.
            dst: `[n] int64` (or int32), distinct page ids to write.

        Raises:
            ValueError: `src` and `dst` differ in length.
        """
        if src.shape != dst.shape:
            raise ValueError(f"src and dst must have one shape, got {tuple(src.shape)} and {tuple(dst.shape)}")
        src, dst = src.long(), dst.long()
        for memory in self._layers:
            memory.index_copy_(0, dst, memory.index_select(0, src))

    def _rows(self, slots: torch.Tensor) -> torch.Tensor:
        """Return where the keys of `slots` start, counted in contiguous runs of a token.

        Such a run is all heads of a token in NHD, one head in HND: `[tokens]` or `[tokens * num_kv_heads]` int64.
        """
        layout = self.layout
        slots = slots.long()
        page_size, num_heads = layout.page_size, layout.num_kv_heads
        pages = slots // page_size
        if layout.order == "NHD":
            return slots + pages * page_size  # page * 2P + offset, because slot = page * P + offset
        first_heads = slots + pages * (page_size * (2 * num_heads - 1))  # page * 2HP + offset
        heads = torch.arange(0, num_heads * page_size, page_size, device=slots.device)
        return (first_heads[:, None] + heads).flatten()


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Like `torch.zeros`, but leave a CPU's memory untouched: numpy zeroes by calloc, torch by writing it all."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    buffer = np.zeros(num_bytes + _ALIGNMENT_BYTES, dtype=np.uint8)
    start = -buffer.ctypes.data % _ALIGNMENT_BYTES
    return torch.frombuffer(buffer, dtype=dtype, count=math.prod(shape), offset=start).view(shape)
