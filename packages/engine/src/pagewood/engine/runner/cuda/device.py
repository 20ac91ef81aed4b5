"""The streams, events and pinned memory of a device, behind an interface that tests can watch."""

# pyright: basic
# torch.cuda has no types.

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor


class Event(Protocol):
    """A mark in a stream."""

    def synchronize(self) -> None:
        """Wait on the host until the device has passed the mark."""
        ...


class Device(Protocol):
    """Two streams of one device: one that computes, and one that copies results back.

    Only `Event.synchronize` and `finish` wait; everything else is queued.
    """

    @property
    def torch_device(self) -> torch.device:
        """Where tensors are allocated."""
        ...

    def pinned(self, size: int, dtype: torch.dtype) -> Tensor:
        """Return host memory `[size]` that the device can copy from and to by itself."""
        ...

    def upload(self, source: Tensor, target: Tensor) -> None:
        """Queue a copy of pinned `source` to `target` on the device."""
        ...

    def computing(self) -> AbstractContextManager[object]:
        """Queue what is called inside on the stream that computes."""
        ...

    def download(self, source: Tensor, target: Tensor) -> Event:
        """Queue a copy of `source` to pinned `target` on the other stream, after what has been queued to compute.

        Returns:
            The mark behind the copy; until then `source` must not be written.
        """
        ...

    def capture(self, work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        """Record `work`, which reads and writes the same memory in every call.

        Returns:
            The memory of its result, and a function that queues all of it once more.
        """
        ...

    def finish(self) -> None:
        """Wait until nothing is queued."""
        ...

    def free_bytes(self) -> int:
        """Return the memory that nobody has taken."""
        ...

    def peak_bytes(self, work: Callable[[], None]) -> int:
        """Do `work` and wait for it; return how much more memory was in use at the worst moment than before."""
        ...


class CUDADevice:
    """The current CUDA device."""

    __slots__ = ("_compute", "_copy", "_pool", "torch_device")

    def __init__(self) -> None:
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        self._compute = torch.cuda.Stream()
        self._copy = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()

    def pinned(self, size: int, dtype: torch.dtype) -> Tensor:
        """Return pinned memory."""
        return torch.empty(size, dtype=dtype, pin_memory=True)

    def upload(self, source: Tensor, target: Tensor) -> None:
        """Queue a copy to the device on the current stream."""
        target.copy_(source, non_blocking=True)

    def computing(self) -> AbstractContextManager[object]:
        """Queue on the computing stream."""
        return torch.cuda.stream(self._compute)

    def download(self, source: Tensor, target: Tensor) -> torch.cuda.Event:
        """Queue a copy to the host on the copying stream."""
        self._copy.wait_event(self._compute.record_event())
        with torch.cuda.stream(self._copy):
            target.copy_(source, non_blocking=True)
        event = torch.cuda.Event()
        event.record(self._copy)
        return event

    def capture(self, work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        """Run `work` once, so that everything is compiled and allocated, then capture it as a CUDA graph."""
        with torch.cuda.stream(self._compute):
            work()
        self._compute.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._compute):
            result = work()
        return result, graph.replay

    def finish(self) -> None:
        """Wait for all streams."""
        torch.cuda.synchronize()

    def free_bytes(self) -> int:
        """Return what the driver says is free, after giving it back what torch keeps for later."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]

    def peak_bytes(self, work: Callable[[], None]) -> int:
        """Return the largest growth of what torch has taken from the driver, with what its blocks leave unused."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        torch.cuda.reset_peak_memory_stats()
        work()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_reserved()
        torch.cuda.empty_cache()
        return peak - before
