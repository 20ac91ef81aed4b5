"""Memory for a pool of compressed keys and values (MLA), as torch tensors."""

import torch

from pagewood.kvpool.codes import CodedRows
from pagewood.kvpool.latent import LatentLayout
from pagewood.kvpool.memory import PageMemory, memory_for
from pagewood.kvpool.scatter import locate_slots


class LatentStorage:
    """The compressed and the rotated parts of all tokens in all layers, for every page of a pool.

    Invariant: the contents of a page change only through the methods of this class and through writes to the views that
    they return. The caller keeps track of which request owns a page. All methods except `checksum` queue their work on
    the device's current stream and do not wait for it.

    Attributes:
        layout: The layout of a page.
        memory: The same memory as bytes, for code that moves pages without knowing what they hold.
        num_pages: Number of pages.
    """

    __slots__ = ("_rows", "layout", "memory", "num_pages")

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
            layout: The layout of a page.
            num_pages: Number of pages, at least 1; `layout.pages_for` returns how many fit a budget.
            device: Where to allocate the memory, if `memory` is None.
            memory: Memory with this layout and number of pages, for instance that of a group of a `HybridLayout`. If
                None, memory is allocated here: zeros, each array of each layer contiguous.

        Raises:
            ValueError: `num_pages` is less than 1, or `memory` has another number of pages or other arrays.
        """
        self.layout = layout
        self.memory = memory_for(layout, num_pages, device=device, memory=memory)
        self.num_pages = num_pages
        self._rows: list[list[CodedRows]] = []
        for layer in range(layout.num_layers):
            scales = self.scales(layer).unbind(-1) if layout.dtype == "int8" else (None, None)
            self._rows.append([CodedRows(*both) for both in zip(self.parts(layer), scales, strict=True)])

    @property
    def device(self) -> torch.device:
        """The device that holds the memory."""
        return self.memory.device

    def layer(self, layer: int) -> torch.Tensor:
        """Return a view of one layer, `[pages, P, C + R]` in the layout's dtype; in int8, the codes."""
        return self.memory.array(layer, "latent")

    def parts(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of one layer's compressed and rotated parts, `[pages, P, C]` and `[pages, P, R]`.

        They are the `ckv_cache` and `kpe_cache` of FlashInfer's MLA kernels.
        """
        latent = self.layer(layer)
        return latent[..., : self.layout.latent_dim], latent[..., self.layout.latent_dim :]

    def scales(self, layer: int) -> torch.Tensor:
        """Return a view of the scales of one layer's int8 codes, `[pages, P, 2] float32`, one for each part.

        Raises:
            ValueError: The layout is not int8.
        """
        if self.layout.dtype != "int8":
            raise ValueError(f"layout must be int8 to have scales, got {self.layout.dtype}")
        return self.memory.array(layer, "latent_scales")

    def write(self, layer: int, compressed: torch.Tensor, rotated: torch.Tensor, slots: torch.Tensor) -> None:
        """Write both parts of some tokens into one layer, in the layout's dtype.

        Args:
            layer: Layer, in [0, num_layers).
            compressed: `[tokens, latent_dim]` in any floating dtype, on the storage's device.
            rotated: `[tokens, rope_dim]`, the same.
            slots: `[tokens] int64` (or int32), `page * page_size + offset` of each token, distinct, on the same device.

        Raises:
            ValueError: A shape does not match.
            IndexError: A slot is outside the pool (on a CPU; a GPU reports it as a device-side assertion).
        """
        for name, part, dim in (
            ("compressed", compressed, self.layout.latent_dim),
            ("rotated", rotated, self.layout.rope_dim),
        ):
            if part.shape != (slots.shape[0], dim):
                raise ValueError(f"{name} must have shape {(slots.shape[0], dim)}, got {tuple(part.shape)}")
        where = locate_slots(slots, page_size=self.layout.page_size, num_pages=self.num_pages)
        for rows, values in zip(self._rows[layer], (compressed, rotated), strict=True):
            rows.write(where, values)

    def read(
        self, layer: int, slots: torch.Tensor, *, dtype: torch.dtype = torch.float32
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of both parts of some tokens of one layer, dequantised.

        Args:
            layer: Layer, in [0, num_layers).
            slots: `[tokens] int64` (or int32), on the storage's device.
            dtype: Dtype of the result.

        Returns:
            The compressed parts, `[tokens, latent_dim]`, and the rotated parts, `[tokens, rope_dim]`.

        Raises:
            IndexError: A slot is outside the pool (on a CPU; a GPU reports it as a device-side assertion).
        """
        where = locate_slots(slots, page_size=self.layout.page_size, num_pages=self.num_pages)
        compressed, rotated = (rows.read(where).to(dtype) for rows in self._rows[layer])
        return compressed, rotated

    def copy_pages(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        """Copy whole pages in every layer; see `PageMemory.copy_pages`."""
        self.memory.copy_pages(src, dst)

    def zero_pages(self, pages: torch.Tensor) -> None:
        """Fill whole pages with zeros in every layer; see `PageMemory.zero_pages`."""
        self.memory.zero_pages(pages)

    def checksum(self, page: int) -> int:
        """Return the CRC-32 of a page in all layers; see `PageMemory.checksum`."""
        return self.memory.checksum(page)
