"""The bridge from `KVStorage` to the tiers: on a CPU the memory itself, on a GPU copies through pinned memory."""

# pyright: basic
# torch is typed in part only.

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch

from pagewood.kvpool.storage import KVStorage
from pagewood.kvpool.tiers.arrays import Bytes
from pagewood.kvpool.tiers.device import ArrayPages, DevicePages

_CHUNK_BYTES = 16 * 2**20
"""Of pinned memory that one copy goes through; two of them take turns."""


def device_pages(storage: KVStorage) -> DevicePages:
    """Return the memory of a pool as the tiers see it."""
    layers = [_rows(storage.layer(layer)) for layer in range(storage.layout.num_layers)]
    if storage.device.type == "cpu":
        return ArrayPages([layer.numpy() for layer in layers])
    return CudaPages(layers)


def pinned_memory(num_pages: int, page_bytes: int) -> Bytes:
    """Return `[num_pages, page_bytes] uint8` that a GPU copies from and to at full speed, for a `HostTier`.

    Raises:
        RuntimeError: there is no CUDA device, or not so much memory that can be pinned.
    """
    return torch.empty((num_pages, page_bytes), dtype=torch.uint8, pin_memory=True).numpy()


class CudaPages:
    """The KV memory of a pool on a CUDA device.

    Invariant: copies run on a stream of their own; one begins after what the device has been told to do before it, and
    the call returns when it is done, so that what is launched afterwards sees it.

    Args:
        layers: `[num_pages, layer_bytes] uint8` each, on one device.
    """

    __slots__ = ("_layers", "_starts", "_stream")

    def __init__(self, layers: Sequence[torch.Tensor]) -> None:
        self._layers = list(layers)
        self._starts = [0, *accumulate(layer.shape[1] for layer in layers)]
        self._stream = torch.cuda.Stream(layers[0].device)

    @property
    def num_layers(self) -> int:
        """Layers."""
        return len(self._layers)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers."""
        return self._starts[-1]

    def read(self, pages: Sequence[int], memory: Bytes, slots: Sequence[int]) -> None:
        """Copy pages out: gathered on the device into images, then copied to the slots, run by run."""
        device, host = self._layers[0].device, torch.from_numpy(memory)
        step = max(1, _CHUNK_BYTES // self.page_bytes)
        with self._ordered():
            for start in range(0, len(pages), step):
                index = torch.tensor(pages[start : start + step], device=device)
                images = torch.empty((len(index), self.page_bytes), dtype=torch.uint8, device=device)
                for layer, (begin, end) in zip(self._layers, pairwise(self._starts), strict=True):
                    images[:, begin:end] = layer[index]
                for a, b in _runs(slots[start : start + step]):
                    slot = slots[start + a]
                    host[slot : slot + b - a].copy_(images[a:b], non_blocking=True)
            self._stream.synchronize()

    def write(self, layer: int, pages: Sequence[int], memory: Bytes, slots: Sequence[int]) -> None:
        """Copy one layer of pages in: gathered on the host into pinned memory, scattered on the device."""
        target = self._layers[layer]
        part = memory[:, self._starts[layer] : self._starts[layer + 1]]
        rows = np.asarray(slots, np.intp)
        with self._ordered():
            step = max(1, _CHUNK_BYTES // part.shape[1])
            for start in range(0, len(pages), step):
                count = min(step, len(pages) - start)
                pinned = torch.empty((count, part.shape[1]), dtype=torch.uint8, pin_memory=True)  # from torch's cache
                pinned.numpy()[:] = part[rows[start : start + count]]
                index = torch.tensor(pages[start : start + count], device=target.device)
                target.index_copy_(0, index, pinned.to(target.device, non_blocking=True))
            self._stream.synchronize()

    def _ordered(self) -> torch.cuda.StreamContext:
        self._stream.wait_stream(torch.cuda.default_stream(self._layers[0].device))
        return torch.cuda.stream(self._stream)


def _rows(layer: torch.Tensor) -> torch.Tensor:
    """View one layer as `[num_pages, layer_bytes] uint8`."""
    return layer.view(torch.uint8).view(layer.shape[0], -1)


def _runs(slots: Sequence[int]) -> list[tuple[int, int]]:
    """Return the runs `[a, b)` of consecutive numbers."""
    breaks = [index for index in range(1, len(slots)) if slots[index] != slots[index - 1] + 1]
    return list(pairwise([0, *breaks, len(slots)]))
