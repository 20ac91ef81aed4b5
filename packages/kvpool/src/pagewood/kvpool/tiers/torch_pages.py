"""Connects a pool's memory to the tiers: directly on a CPU, by copies on separate streams on a GPU."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import accumulate, pairwise
from typing import Any, Protocol

import torch

from pagewood.kvpool.memory import PageMemory
from pagewood.kvpool.tiers.pages.arrays import Bytes, page_aligned_zeros
from pagewood.kvpool.tiers.pages.device import ArrayPages, DevicePages
from pagewood.kvpool.tiers.pages.states import StatePages

# Largest device memory that a copy uses for page images at a time.
_CHUNK_BYTES = 64 * 2**20
# A piece of this size takes longer to move over a bus (10 us) than to queue.
_PIECE_BYTES = 512 * 2**10
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def device_pages(memory: PageMemory, *, after: torch.cuda.Stream | None = None) -> DevicePages:
    """Return the memory of a pool (such as `KVStorage.memory`) in the form that the tiers use.

    Args:
        memory: Memory on a CPU or a CUDA device.
        after: The stream that computes pages; only for a CUDA device, and for engines that publish pages before they
            are computed. A copy starts after all work that is in this stream at that time. If None, the host must have
            waited for pages before it publishes them.
    """
    layers = [memory.blocks(layer) for layer in range(memory.layout.num_layers)]
    if memory.device.type == "cpu":
        return ArrayPages([[block.numpy() for block in blocks] for blocks in layers])
    out, into = (CUDACopyStream(memory.device, after=after) for _ in range(2))
    return StagedPages(layers, out=out, into=into)


def with_states(pages: DevicePages, states: PageMemory | None, *, num_parts: int | None = None) -> StatePages:
    """Return pages together with the states of recurrent layers in memory, a page of it for each place.

    The host must have waited for a state before it publishes it, as for pages. For `num_parts` see `StatePages`;
    `states` may be None with it, if this process has none of the layers.
    """
    layers = [] if states is None else [states.blocks(layer) for layer in range(states.layout.num_layers)]
    if states is None or states.device.type == "cpu":
        return StatePages(pages, [[block.numpy() for block in blocks] for blocks in layers], num_parts=num_parts)
    out, into = (CUDACopyStream(states.device) for _ in range(2))
    return StatePages(pages, layers, num_parts=num_parts, copies=QueuedCopies(out, into))


def pinned_memory(num_pages: int, page_bytes: int) -> Bytes:
    """Return `[num_pages, page_bytes] uint8` that a GPU can copy from and to at full speed, for a `HostTier`.

    The memory is allocated by numpy and registered with the driver. torch's own pinned memory would be rounded up to
    the next power of two.

    Raises:
        RuntimeError: There is no CUDA device, or not enough memory that can be pinned.
    """
    return pinned(page_aligned_zeros(num_pages, page_bytes))


def pinned(memory: Bytes) -> Bytes:
    """Return `memory` itself, registered with the driver as long as it lives; errors as in `pinned_memory`."""
    runtime: Any = torch.cuda.cudart()
    start = memory.ctypes.data
    error = int(runtime.cudaHostRegister(start, memory.nbytes, 0))
    if error:
        raise RuntimeError(f"failed to pin {memory.nbytes / 1e9:.1f} GB of host memory, got CUDA error {error}")
    weakref.finalize(memory.base, runtime.cudaHostUnregister, start)  # the base outlives all views
    return memory


class CopyStream(Protocol):
    """A queue of copies that run beside the device's other work."""

    def queueing(self) -> AbstractContextManager[object]:
        """Return a context in which torch calls are queued on this stream."""
        ...

    def wait(self) -> None:
        """Make the host wait until all queued work is done."""
        ...


class CUDACopyStream:
    """A CUDA stream for copies."""

    __slots__ = ("_after", "_stream")

    def __init__(self, device: torch.device, *, after: torch.cuda.Stream | None = None) -> None:
        """Create a stream.

        Args:
            device: The device.
            after: A stream whose earlier work must be done before the work queued here; None for no such stream.
        """
        self._stream = torch.cuda.Stream(device)
        self._after = after

    def queueing(self) -> AbstractContextManager[object]:
        """Return a context, for any thread, in which torch calls are queued on this stream."""
        if self._after is not None:
            self._stream.wait_stream(self._after)
        return torch.cuda.stream(self._stream)

    def wait(self) -> None:
        """Make the host wait until all queued work is done."""
        self._stream.synchronize()


class QueuedCopies:
    """Copies states by streams of a device; satisfies `pages.states.StateCopies`.

    A state's arrays are contiguous within a place, and large, so each goes to or from its slot by copies of its own.
    """

    __slots__ = ("_into", "_out")

    def __init__(self, out: CopyStream, into: CopyStream) -> None:
        """Use a stream for each direction."""
        self._out, self._into = out, into

    def out(self) -> AbstractContextManager[object]:
        """Return a context for copies to the host, at whose end they are done."""
        return _waited_for(self._out)

    def into(self) -> AbstractContextManager[object]:
        """Return a context for copies to the device, at whose end they are done."""
        return _waited_for(self._into)

    def copy(self, target: torch.Tensor | Bytes, source: torch.Tensor | Bytes) -> None:
        """Queue the copy of bytes; one view is on the device, and the other one numpy's."""
        to, of = (one if isinstance(one, torch.Tensor) else torch.from_numpy(one) for one in (target, source))
        to.copy_(of, non_blocking=True)


@contextmanager
def _waited_for(stream: CopyStream) -> Generator[None]:
    """Queue on a stream inside, and wait for it at the end, also if there is an error."""
    try:
        with stream.queueing():
            yield
    finally:
        stream.wait()


class StagedPages:
    """KV memory that numpy cannot access, such as a GPU's: copies go through page images on the device.

    Invariant: the copies of a call are done when it returns or raises. So work that is launched afterwards sees their
    result, and no copy accesses pages or slots that have a new owner. A page image has the format of `ArrayPages`.
    Thread-safe.

    Attributes:
        page_bytes: Size of one page over all layers, in bytes.
    """

    __slots__ = ("_device", "_groups", "_into", "_out", "_parts", "_word", "page_bytes")

    def __init__(self, layers: Sequence[Sequence[torch.Tensor]], *, out: CopyStream, into: CopyStream) -> None:
        """Use existing memory.

        Args:
            layers: For each layer its arrays, `[num_pages, num_bytes] uint8` each, all on one device.
            out: Stream of this device, for reading.
            into: Another stream of this device, for writing, so that neither direction waits for the other.
        """
        widths = [array.shape[1] for arrays in layers for array in arrays]
        ends = list(accumulate(widths, initial=0))
        self.page_bytes = ends[-1]  # written by: __init__
        places = [
            number for arrays in layers for array in arrays for number in (array.stride(0), array.storage_offset())
        ]
        self._word = _WORDS[math.gcd(8, *widths, *places)]  # the widest word that fits: a GPU copies element by element
        size = self._word.itemsize
        begins = iter(begin // size for begin in ends)
        # For each layer, its arrays and their offsets in a page image, in words.
        self._parts = [[(array.view(self._word), next(begins)) for array in arrays] for arrays in layers]
        self._groups = self._grouped()
        self._device = layers[0][0].device
        self._out, self._into = out, into

    def read(self, pages: Sequence[int], memory: Bytes, slots: Sequence[int]) -> None:
        """Copy pages out: gather them into images, and copy these to the slots, consecutive slots together."""
        host = torch.from_numpy(memory).view(self._word)
        try:
            with self._out.queueing():
                index = torch.tensor(pages, device=self._device)
                for a, b in self._chunks(len(pages), host.shape[1]):
                    images = torch.empty((b - a, host.shape[1]), dtype=self._word, device=self._device)
                    for array, begin in (part for parts in self._parts for part in parts):
                        torch.index_select(array, 0, index[a:b], out=images[:, begin : begin + array.shape[1]])
                    for first, last in _runs(slots[a:b]) if host.is_contiguous() else pairwise(range(b - a + 1)):
                        slot = slots[a + first]
                        host[slot : slot + last - first].copy_(images[first:last], non_blocking=True)
        finally:
            self._out.wait()

    def write(self, pages: Sequence[int], memory: Bytes, slots: Sequence[int], arrived: Callable[[int], None]) -> None:
        """Copy pages in, in pieces that are large enough for a bus: a piece has one layer or several neighbours."""
        host = torch.from_numpy(memory).view(self._word)
        try:
            with self._into.queueing():
                index = torch.tensor(pages, device=self._device)
            for layers in self._groups:
                with self._into.queueing():
                    self._write_layers(layers, index, host, slots)
                self._into.wait()
                arrived(layers.stop)
        finally:
            self._into.wait()

    def _write_layers(self, layers: range, index: torch.Tensor, host: torch.Tensor, slots: Sequence[int]) -> None:
        parts = [part for layer in layers for part in self._parts[layer]]
        begin, end = parts[0][1], parts[-1][1] + parts[-1][0].shape[1]
        for a, b in self._chunks(len(slots), end - begin):
            images = torch.empty((b - a, end - begin), dtype=self._word, device=self._device)
            # If a piece is only part of an image, or images are parts of wider ones, several rows of it are strided on
            # the host. torch would gather them there and wait, so each row is copied separately.
            is_whole = len(layers) == len(self._parts) and host.is_contiguous()
            for first, last in _runs(slots[a:b]) if is_whole else pairwise(range(b - a + 1)):
                slot = slots[a + first]
                images[first:last].copy_(host[slot : slot + last - first, begin:end], non_blocking=True)
            for array, at in parts:
                array.index_copy_(0, index[a:b], images[:, at - begin : at - begin + array.shape[1]])

    def _chunks(self, num_pages: int, num_words: int) -> list[tuple[int, int]]:
        step = max(1, _CHUNK_BYTES // (num_words * self._word.itemsize))
        return [(start, min(start + step, num_pages)) for start in range(0, num_pages, step)]

    def _grouped(self) -> list[range]:
        """Return the layers in groups whose parts of a page make a piece; the last group may be smaller."""
        groups: list[range] = []
        start, num_bytes = 0, 0
        for layer, parts in enumerate(self._parts):
            num_bytes += sum(array.shape[1] for array, _ in parts) * self._word.itemsize
            if num_bytes >= _PIECE_BYTES or layer == len(self._parts) - 1:
                groups.append(range(start, layer + 1))
                start, num_bytes = layer + 1, 0
        return groups


def _runs(slots: Sequence[int]) -> list[tuple[int, int]]:
    """Return the runs `[a, b)` of consecutive slots."""
    breaks = [index for index in range(1, len(slots)) if slots[index] != slots[index - 1] + 1]
    return list(pairwise([0, *breaks, len(slots)]))
