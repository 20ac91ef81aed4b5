"""The memory of a pool of compressed keys and values, as torch tensors."""

from typing import Any

import torch

from pagewood.kvpool.codes import dequantise, encode, quantise
from pagewood.kvpool.latent import LatentLayout
from pagewood.kvpool.memory import PageMemory, memory_for
from pagewood.kvpool.scatter import ScatteredRows, locate_slots


class LatentStorage:
    """The compressed and the rotated part of all tokens in all layers, for every page of a pool.

    Invariant: a page's contents change only by the methods here and by writes through the views that they return;
    whose page it is, is the caller's business. All calls but `checksum` are queued on the device's current stream, and
    none of these waits for it.

    Attributes:
        layout: What a page is.
        memory: The bytes, for those who move pages without knowing what they hold.
        num_pages: Pages of the pool.
    """

    __slots__ = ("_codes", "_scales", "layout", "memory", "num_pages")

    def __init__(
        self,
        layout: LatentLayout,
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
        self._codes = [[ScatteredRows(part) for part in self.parts(layer)] for layer in layers]
        self._scales = [
            [ScatteredRows(part) for part in self.scales(layer).unbind(-1)] if layout.dtype == "int8" else []
            for layer in layers
        ]

    @property
    def device(self) -> torch.device:
        """The device that holds the memory."""
        return self.memory.device

    def layer(self, layer: int) -> torch.Tensor:
        """Return one layer, not a copy: `[pages, P, C + R]` in the layout's dtype; in int8, the codes."""
        return self.memory.array(layer, "latent")

    def parts(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return one layer's compressed and rotated parts, not copies: `[pages, P, C]` and `[pages, P, R]`.

        They are the `ckv_cache` and `kpe_cache` of FlashInfer's MLA.
        """
        latent = self.layer(layer)
        return latent[..., : self.layout.latent_dim], latent[..., self.layout.latent_dim :]

    def scales(self, layer: int) -> torch.Tensor:
        """Return the scales of one layer's int8 codes, not a copy: `[pages, P, 2] float32`, of either part.

        Raises:
            ValueError: The layout is not int8.
        """
        if self.layout.dtype != "int8":
            raise ValueError(f"layout must be int8 to have scales, got {self.layout.dtype}")
        return self.memory.array(layer, "latent_scales")

    def write(self, layer: int, compressed: torch.Tensor, rotated: torch.Tensor, slots: torch.Tensor) -> None:
        """Write both parts of some tokens into one layer, in the layout's dtype.

        Args:
            layer: In [0, num_layers).
            compressed: `[tokens, latent_dim]` in any floating dtype, on the storage's device.
            rotated: `[tokens, rope_dim]`, likewise.
            slots: `[tokens] int64` (or int32), `page * page_size + offset` of each token, distinct, on the same device.

        Raises:
            ValueError: A shape does not fit.
            IndexError: A slot lies outside the pool (on a CPU; a GPU reports it as a device-side assertion).
        """
        for name, part, dim in (
            ("compressed", compressed, self.layout.latent_dim),
            ("rotated", rotated, self.layout.rope_dim),
        ):
            if part.shape != (slots.shape[0], dim):
                raise ValueError(f"{name} must have shape {(slots.shape[0], dim)}, got {tuple(part.shape)}")
        where = locate_slots(slots, page_size=self.layout.page_size, num_pages=self.num_pages)
        dtype: torch.dtype = getattr(torch, self.layout.dtype)
        for part, values in enumerate((compressed, rotated)):
            if dtype == torch.int8:
                codes, scales = quantise(values)
                self._scales[layer][part].write(where, scales)
            else:
                codes = encode(values, dtype)
            self._codes[layer][part].write(where, codes)

    def read(
        self, layer: int, slots: torch.Tensor, *, dtype: torch.dtype = torch.float32
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of both parts of some tokens of one layer, dequantised.

        Args:
            layer: In [0, num_layers).
            slots: `[tokens] int64` (or int32), on the storage's device.
            dtype: Of the result.

        Returns:
            The compressed parts, `[tokens, latent_dim]`, and the rotated ones, `[tokens, rope_dim]`.

        Raises:
            IndexError: A slot lies outside the pool (on a CPU; a GPU reports it as a device-side assertion).
        """
        where = locate_slots(slots, page_size=self.layout.page_size, num_pages=self.num_pages)
        compressed, rotated = (self._read(layer, part, where).to(dtype) for part in range(2))
        return compressed, rotated

    def copy_pages(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        """Copy whole pages in every layer: see `PageMemory.copy_pages`."""
        self.memory.copy_pages(src, dst)

    def zero_pages(self, pages: torch.Tensor) -> None:
        """Fill whole pages with zeros in every layer: see `PageMemory.zero_pages`."""
        self.memory.zero_pages(pages)

    def checksum(self, page: int) -> int:
        """Return the CRC-32 of a page in all layers: see `PageMemory.checksum`."""
        return self.memory.checksum(page)

    def _read(self, layer: int, part: int, where: Any) -> torch.Tensor:
        codes = self._codes[layer][part].read(where)
        if self.layout.dtype == "int8":
            return dequantise(codes, self._scales[layer][part].read(where))
        return codes
