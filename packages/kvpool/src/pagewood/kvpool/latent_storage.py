"""Memory for a pool of compressed keys and values (MLA), as torch tensors."""

import torch

from pagewood.kvpool.codes import CodedRows
from pagewood.kvpool.latent import LatentLayout
from pagewood.kvpool.memory import PageMemory, memory_for
from pagewood.kvpool.scatter import locate_slots


class LatentStorage:
    """The latents of all tokens in all layers, for every page of a pool.

    Invariant: the contents of a page change only through the methods of this class and through writes to the views that
    they return. The caller keeps track of which request owns a page. Methods queue their work on the device's current
    stream and do not wait for it. `memory` copies, zeroes and sums whole pages.

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
            memory: Memory with this layout and number of pages, for instance that of a part of a `JointLayout`. If
                None, memory is allocated here: zeros, one contiguous array for each layer.

        Raises:
            ValueError: `num_pages` is less than 1, or `memory` has another number of pages or other arrays.
        """
        self.layout = layout
        self.memory = memory_for(layout, num_pages, device=device, memory=memory)
        self.num_pages = num_pages
        self._rows = [self._coded(layer) for layer in range(layout.num_layers)]
        """For each layer, the rows of each part that has its own scale: of both together without scales."""

    @property
    def device(self) -> torch.device:
        """The device that holds the memory."""
        return self.memory.device

    def layer(self, layer: int) -> torch.Tensor:
        """Return a view of one layer, `[pages, P, C + R]` in the layout's dtype; in int8 these are the codes."""
        return self.memory.array(layer, "latent")

    def scales(self, layer: int) -> torch.Tensor:
        """Return a view of the scales of one layer's int8 codes, `[pages, P, 2] float32`: of both parts of a token.

        Raises:
            ValueError: The layout is not int8.
        """
        if self.layout.dtype != "int8":
            raise ValueError(f"layout must be int8 to have scales, got {self.layout.dtype}")
        return self.memory.array(layer, "latent_scales")

    def parts(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of one layer's compressed and rotated parts, `[pages, P, C]` and `[pages, P, R]`.

        They are the `ckv_cache` and `kpe_cache` of FlashInfer's MLA kernels.
        """
        latent = self.layer(layer)
        return latent[..., : self.layout.latent_dim], latent[..., self.layout.latent_dim :]

    def write(self, layer: int, latents: torch.Tensor, slots: torch.Tensor) -> None:
        """Write the latents of some tokens into one layer, in the layout's dtype.

        Args:
            layer: Layer, in [0, num_layers).
            latents: `[tokens, C + R]` in any floating dtype, on the storage's device. For fp8, numbers out of range
                become its largest number. For int8, each part of a token is scaled by its largest magnitude.
            slots: `[tokens] int64` (or int32), `page * page_size + offset` of each token, distinct, on the same device.

        Raises:
            ValueError: The shape does not match.
            IndexError: A slot is outside the pool (on a CPU; a GPU reports it as a device-side assertion).
        """
        expected = (slots.shape[0], self.layout.latent_dim + self.layout.rope_dim)
        if latents.shape != expected:
            raise ValueError(f"latents must have shape {expected}, got {tuple(latents.shape)}")
        where = locate_slots(slots, page_size=self.layout.page_size, num_pages=self.num_pages)
        rows, size = self._rows[layer], self.layout.latent_dim
        parts = [latents] if len(rows) == 1 else [latents[:, :size], latents[:, size:]]
        for own, part in zip(rows, parts, strict=True):
            own.write(where, part)

    def read(self, layer: int, slots: torch.Tensor, *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return copies of the latents of some tokens of one layer, `[tokens, C + R]`, dequantised.

        Args:
            layer: Layer, in [0, num_layers).
            slots: `[tokens] int64` (or int32), on the storage's device.
            dtype: Dtype of the result.

        Raises:
            IndexError: A slot is outside the pool (on a CPU; a GPU reports it as a device-side assertion).
        """
        where = locate_slots(slots, page_size=self.layout.page_size, num_pages=self.num_pages)
        return torch.cat([rows.read(where) for rows in self._rows[layer]], -1).to(dtype)

    def _coded(self, layer: int) -> list[CodedRows]:
        if self.layout.dtype != "int8":
            return [CodedRows(self.layer(layer), None)]
        scales = self.scales(layer).unbind(-1)
        return [CodedRows(codes, own) for codes, own in zip(self.parts(layer), scales, strict=True)]
