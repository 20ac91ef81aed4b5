"""Memory for a pool of keys and values, as torch tensors."""

import torch

from pagewood.kvpool.codes import CodedRows
from pagewood.kvpool.layout import MultiHeadLayout
from pagewood.kvpool.memory import PageMemory, memory_for
from pagewood.kvpool.scatter import locate_slots


class KVStorage:
    """The keys and values of all layers, for every page of a pool.

    Invariant: the contents of a page change only through the methods of this class and through writes to the views that
    they return. The caller keeps track of which request owns a page. All methods except `checksum` queue their work on
    the device's current stream and do not wait for it.

    Attributes:
        layout: The layout of a page.
        memory: The same memory as bytes, for code that moves pages without knowing what they hold.
        num_pages: Number of pages.
    """

    __slots__ = ("_halves", "_rows", "layout", "memory", "num_pages")

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
            layout: The layout of a page.
            num_pages: Number of pages, at least 1; `layout.pages_for` returns how many fit a budget.
            device: Where to allocate the memory, if `memory` is None.
            memory: Memory with this layout and number of pages, for instance that of a part of a `JointLayout`. If
                None, memory is allocated here: zeros, each array of each layer contiguous.

        Raises:
            ValueError: `num_pages` is less than 1, or `memory` has another number of pages or other arrays.
        """
        self.layout = layout
        self.memory = memory_for(layout, num_pages, device=device, memory=memory)
        self.num_pages = num_pages
        self._halves = [self._pair(layer, "") for layer in range(layout.num_layers)]
        self._rows: list[list[CodedRows]] = []
        for layer, halves in enumerate(self._halves):
            scales = map(self._by_token, self._pair(layer, "_scales")) if layout.dtype == "int8" else (None, None)
            self._rows.append([CodedRows(*both) for both in zip(map(self._by_token, halves), scales, strict=True)])

    @property
    def device(self) -> torch.device:
        """The device that holds the memory."""
        return self.memory.device

    def layer(self, layer: int) -> torch.Tensor:
        """Return a view of one layer's keys and values, `layout.shape(num_pages)` in the layout's dtype.

        It is contiguous, unless the memory is that of a group. In int8 these are the codes; `scales` returns their
        scales.

        Raises:
            ValueError: The layout has separate arrays for keys and values; see `halves`.
        """
        self._check_joint()
        return self.memory.array(layer, "kv")

    def scales(self, layer: int) -> torch.Tensor:
        """Return a view of the scales of one layer's int8 codes: float32, with the axes of `layer` except the last.

        The shape is `[pages, 2, P, H]` in NHD and `[pages, 2, H, P]` in HND.

        Raises:
            ValueError: The layout has separate arrays for keys and values, or is not int8.
        """
        self._check_joint()
        if self.layout.dtype != "int8":
            raise ValueError(f"layout must be int8 to have scales, got {self.layout.dtype}")
        return self.memory.array(layer, "kv_scales")

    def halves(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of one layer's keys and of its values, the pair that FlashInfer accepts.

        Each is `[pages, P, H, D]` in NHD and `[pages, H, P, D]` in HND. They are contiguous if the layout has separate
        arrays for keys and values.
        """
        return self._halves[layer]

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        """Write the keys and values of some tokens into one layer, in the layout's dtype.

        For fp8, numbers out of range become its largest number. For int8, every head of a token is scaled by its
        largest magnitude.

        Args:
            layer: Layer, in [0, num_layers).
            k: `[tokens, num_kv_heads, head_dim]` in any floating dtype, on the storage's device.
            v: As `k`.
            slots: `[tokens] int64` (or int32), `page * page_size + offset` of each token, distinct, on the same device.

        Raises:
            ValueError: A shape does not match.
            IndexError: A slot is outside the pool (on a CPU; a GPU reports it as a device-side assertion).
        """
        layout = self.layout
        expected = (slots.shape[0], layout.num_kv_heads, layout.head_dim)
        if k.shape != expected or v.shape != expected:
            raise ValueError(f"k and v must have shape {expected}, got {tuple(k.shape)} and {tuple(v.shape)}")
        where = locate_slots(slots, page_size=layout.page_size, num_pages=self.num_pages)
        for rows, values in zip(self._rows[layer], (k, v), strict=True):
            rows.write(where, values)

    def read(
        self, layer: int, slots: torch.Tensor, *, dtype: torch.dtype = torch.float32
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of the keys and values of some tokens of one layer, dequantised.

        Args:
            layer: Layer, in [0, num_layers).
            slots: `[tokens] int64` (or int32), on the storage's device.
            dtype: Dtype of the result.

        Returns:
            Keys and values, `[tokens, num_kv_heads, head_dim]` each.

        Raises:
            IndexError: A slot is outside the pool (on a CPU; a GPU reports it as a device-side assertion).
        """
        where = locate_slots(slots, page_size=self.layout.page_size, num_pages=self.num_pages)
        k, v = (rows.read(where).to(dtype) for rows in self._rows[layer])
        return k, v

    def copy_pages(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        """Copy whole pages in every layer; see `PageMemory.copy_pages`."""
        self.memory.copy_pages(src, dst)

    def zero_pages(self, pages: torch.Tensor) -> None:
        """Fill whole pages with zeros in every layer; see `PageMemory.zero_pages`."""
        self.memory.zero_pages(pages)

    def checksum(self, page: int) -> int:
        """Return the CRC-32 of a page in all layers; see `PageMemory.checksum`."""
        return self.memory.checksum(page)

    def _pair(self, layer: int, suffix: str) -> tuple[torch.Tensor, torch.Tensor]:
        if self.layout.halves == "pair":
            return self.memory.array(layer, f"k{suffix}"), self.memory.array(layer, f"v{suffix}")
        k, v = self.memory.array(layer, f"kv{suffix}").unbind(1)
        return k, v

    def _by_token(self, half: torch.Tensor) -> torch.Tensor:
        """Return a view of `half` with the axes page, offset, head (and dim), whatever the order of the layout."""
        return half.transpose(1, 2) if self.layout.order == "HND" else half

    def _check_joint(self) -> None:
        if self.layout.halves != "joint":
            raise ValueError(f"layout must have joint halves, got {self.layout.halves!r}; see `halves`")
