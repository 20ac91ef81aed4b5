"""The memory of a pool of keys and values, as torch tensors."""

from typing import Any

import torch

from pagewood.kvpool.codes import dequantise, encode, quantise
from pagewood.kvpool.layout import MultiHeadLayout
from pagewood.kvpool.memory import PageMemory, memory_for
from pagewood.kvpool.scatter import ScatteredRows, locate_slots


class KVStorage:
    """The keys and values of all layers, for every page of a pool.

    Invariant: a page's contents change only by the methods here and by writes through the views that they return;
    whose page it is, is the caller's business. All calls but `checksum` are queued on the device's current stream, and
    none of these waits for it.

    Attributes:
        layout: What a page is.
        memory: The bytes, for those who move pages without knowing what they hold.
        num_pages: Pages of the pool.
    """

    __slots__ = ("_codes", "_halves", "_scales", "layout", "memory", "num_pages")

    def __init__(
        self,
        layout: MultiHeadLayout,
        num_pages: int,
        *,
        device: str | torch.device = "cpu",
        memory: PageMemory | None = None,
    ) -> None:
        """Use `num_pages * layout.bytes_per_page` bytes.

        Args:
            layout: What a page is.
            num_pages: At least 1; `layout.pages_for` says how many fit a budget.
            device: Where the memory is allocated, unless it is given.
            memory: Memory of such pages and so many, for instance a group's of a `HybridLayout`; None: allocated here,
                as zeros, each array of each layer contiguous.

        Raises:
            ValueError: `num_pages` is less than 1, or `memory` is of another number of pages or of other arrays.
        """
        self.layout = layout
        self.memory = memory_for(layout, num_pages, device=device, memory=memory)
        self.num_pages = num_pages
        layers = range(layout.num_layers)
        self._halves = [self._pair(layer, "") for layer in layers]
        self._codes = [[self._by_token(half) for half in halves] for halves in self._halves]
        self._scales = [
            [self._by_token(half) for half in self._pair(layer, "_scales")] if layout.dtype == "int8" else []
            for layer in layers
        ]

    @property
    def device(self) -> torch.device:
        """The device that holds the memory."""
        return self.memory.device

    def layer(self, layer: int) -> torch.Tensor:
        """Return one layer's keys and values, not a copy: `layout.shape(num_pages)` in the layout's dtype.

        Contiguous, unless the memory is a group's. In int8 these are the codes, and `scales` has their scales.

        Raises:
            ValueError: The layout keeps keys and values apart: see `halves`.
        """
        self._check_joint()
        return self.memory.array(layer, "kv")

    def scales(self, layer: int) -> torch.Tensor:
        """Return the scales of one layer's int8 codes, not a copy: float32, the axes of `layer` without the last.

        That is `[pages, 2, P, H]` in NHD and `[pages, 2, H, P]` in HND.

        Raises:
            ValueError: The layout keeps keys and values apart, or is not int8.
        """
        self._check_joint()
        if self.layout.dtype != "int8":
            raise ValueError(f"layout must be int8 to have scales, got {self.layout.dtype}")
        return self.memory.array(layer, "kv_scales")

    def halves(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return one layer's keys and its values, not copies: what FlashInfer takes as a pair.

        They are `[pages, P, H, D]` each in NHD, `[pages, H, P, D]` in HND; contiguous if the layout keeps them apart.
        """
        return self._halves[layer]

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        """Write the keys and values of some tokens into one layer, in the layout's dtype.

        Too large numbers become the largest of an fp8; in int8, every head of a token is scaled by its largest number.

        Args:
            layer: In [0, num_layers).
            k: `[tokens, num_kv_heads, head_dim]` in any floating dtype, on the storage's device.
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
        where = locate_slots(slots, page_size=layout.page_size, num_pages=self.num_pages)
        dtype: torch.dtype = getattr(torch, layout.dtype)
        for half, values in enumerate((k, v)):
            if dtype == torch.int8:
                codes, scales = quantise(values)
                self._scales[layer][half].write(where, scales)
            else:
                codes = encode(values, dtype)
            self._codes[layer][half].write(where, codes)

    def read(
        self, layer: int, slots: torch.Tensor, *, dtype: torch.dtype = torch.float32
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of the keys and values of some tokens of one layer, dequantised.

        Args:
            layer: In [0, num_layers).
            slots: `[tokens] int64` (or int32), on the storage's device.
            dtype: Of the result.

        Returns:
            Keys and values, `[tokens, num_kv_heads, head_dim]` each.

        Raises:
            IndexError: A slot lies outside the pool (on a CPU; a GPU reports it as a device-side assertion).
        """
        where = locate_slots(slots, page_size=self.layout.page_size, num_pages=self.num_pages)
        k, v = (self._read(layer, half, where).to(dtype) for half in range(2))
        return k, v

    def copy_pages(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        """Copy whole pages in every layer: see `PageMemory.copy_pages`."""
        self.memory.copy_pages(src, dst)

    def zero_pages(self, pages: torch.Tensor) -> None:
        """Fill whole pages with zeros in every layer: see `PageMemory.zero_pages`."""
        self.memory.zero_pages(pages)

    def checksum(self, page: int) -> int:
        """Return the CRC-32 of a page in all layers: see `PageMemory.checksum`."""
        return self.memory.checksum(page)

    def _read(self, layer: int, half: int, where: Any) -> torch.Tensor:
        codes = self._codes[layer][half].read(where)
        if self.layout.dtype == "int8":
            return dequantise(codes, self._scales[layer][half].read(where))
        return codes

    def _pair(self, layer: int, suffix: str) -> tuple[torch.Tensor, torch.Tensor]:
        if self.layout.halves == "pair":
            return self.memory.array(layer, f"k{suffix}"), self.memory.array(layer, f"v{suffix}")
        k, v = self.memory.array(layer, f"kv{suffix}").unbind(1)
        return k, v

    def _by_token(self, half: torch.Tensor) -> ScatteredRows:
        """See a half with the axes page, offset, head (and dim), whatever the order."""
        return ScatteredRows(half.transpose(1, 2) if self.layout.order == "HND" else half)

    def _check_joint(self) -> None:
        if self.layout.halves != "joint":
            raise ValueError(f"layout must have joint halves, got {self.layout.halves!r}; see `halves`")
