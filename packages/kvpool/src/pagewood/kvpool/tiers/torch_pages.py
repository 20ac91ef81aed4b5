"""The bridge from a pool's memory to the tiers: on a CPU the memory itself, on a GPU copies through pinned memory."""

# pyright: basic
# torch is typed in part only.

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch

from pagewood.kvpool.memory import PageMemory
from pagewood.kvpool.tiers.arrays import Bytes
from pagewood.kvpool.tiers.device import ArrayPages, DevicePages

_CHUNK_BYTES = 16 * 2**20
"""Of memory that a copy goes through at a time."""


def device_pages(memory: PageMemory) -> DevicePages:
    """Return the memory of a pool (such as `KVStorage.memory`) as the tiers see it."""
    layers = [memory.blocks(layer) for layer in range(memory.layout.num_layers)]
    if memory.device.type == "cpu":
        return ArrayPages([[block.numpy() for block in blocks] for blocks in layers])
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
        layers: for each layer its arrays, `[num_pages, num_bytes] uint8` each, on one device.
    """

    __slots__ = ("_parts", "_stream", "page_bytes")

    def __init__(self, layers: Sequence[Sequence[torch.Tensor]]) -> None:
        self._parts: list[list[tuple[torch.Tensor, int]]] = []  # of each layer: arrays, and where they lie in an image
        self.page_bytes = 0
        """Bytes of one page over all layers."""  # written by: __init__
        for arrays in layers:
            ends = list(accumulate((array.shape[1] for array in arrays), initial=self.page_bytes))
            self._parts.append(list(zip(arrays, ends, strict=False)))
            self.page_bytes = ends[-1]
        self._stream = torch.cuda.Stream(layers[0][0].device)

    @property
    def num_layers(self) -> int:
        """Layers."""
        return len(self._parts)

    def read(self, pages: Sequence[int], memory: Bytes, slots: Sequence[int]) -> None:
        """Copy pages out: gathered on the device into images, then copied to the slots, run by run."""
        device, host = self._stream.device, torch.from_numpy(memory)
        step = max(1, _CHUNK_BYTES // self.page_bytes)
        with self._ordered():
            for start in range(0, len(pages), step):
                index = torch.tensor(pages[start : start + step], device=device)
                images = torch.empty((len(index), self.page_bytes), dtype=torch.uint8, device=device)
                for array, begin in (part for parts in self._parts for part in parts):
                    images[:, begin : begin + array.shape[1]] = array[index]
                for a, b in _runs(slots[start : start + step]):
                    slot = slots[start + a]
                    host[slot : slot + b - a].copy_(images[a:b], non_blocking=True)
            self._stream.synchronize()

    def write(self, layer: int, pages: Sequence[int], memory: Bytes, slots: Sequence[int]) -> None:
        """Copy one layer of pages in: gathered on the host into pinned memory, scattered on the device."""
        rows = np.asarray(slots, np.intp)
        with self._ordered():
            for target, begin in self._parts[layer]:
                part = memory[:, begin : begin + target.shape[1]]
                step = max(1, _CHUNK_BYTES // part.shape[1])
                for start in range(0, len(pages), step):
                    count = min(step, len(pages) - start)
                    pinned = torch.empty((count, part.shape[1]), dtype=torch.uint8, pin_memory=True)  # torch keeps some
                    pinned.numpy()[:] = part[rows[start : start + count]]
                    index = torch.tensor(pages[start : start + count], device=target.device)
                    target.index_copy_(0, index, pinned.to(target.device, non_blocking=True))
            self._stream.synchronize()

    def _ordered(self) -> torch.cuda.StreamContext:
        self._stream.wait_stream(torch.cuda.default_stream(self._stream.device))
        return torch.cuda.stream(self._stream)


def _runs(slots: Sequence[int]) -> list[tuple[int, int]]:
    """Return the runs `[a, b)` of consecutive numbers."""
    breaks = [index for index in range(1, len(slots)) if slots[index] != slots[index - 1] + 1]
    return list(pairwise([0, *breaks, len(slots)]))
