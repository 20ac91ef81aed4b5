"""The streams, events and pinned memory of a device, behind an interface that tests can replace."""

# pyright: basic
# torch.cuda has no types.

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor


class Event(Protocol):
    """A point in a stream."""

    def synchronize(self) -> None:
        """Make the host wait until the device has reached this point."""
        ...


class Stamp(Protocol):
    """A point in the compute stream, with the time at which the device reaches it."""

    def seconds_until(self, later: Any) -> float:
        """Return the seconds to a later stamp of the same device; both must have been reached."""
        ...


class Device(Protocol):
    """Two streams of one device: a compute stream, and a copy stream for results.

    Only `Event.synchronize`, `finish`, `free_bytes` and `peak_bytes` wait; everything else is queued.
    """

    @property
    def torch_device(self) -> torch.device:
        """The torch device of the tensors."""
        ...

    def pinned(self, size: int, dtype: torch.dtype) -> Tensor:
        """Return pinned host memory `[size]`, which the device copies asynchronously."""
        ...

    def upload(self, source: Tensor, target: Tensor) -> None:
        """Queue a copy of pinned `source` to `target` on the device."""
        ...

    def computing(self) -> AbstractContextManager[object]:
        """Return a context in which calls are queued on the compute stream."""
        ...

    def download(self, source: Tensor, target: Tensor) -> Event:
        """Queue a copy of `source` to pinned `target` on the copy stream, after all work queued on the compute stream.

        Returns:
            An event after the copy; until it is reached, `source` must not be written.
        """
        ...

    def stamp(self) -> Stamp:
        """Queue a stamp on the compute stream."""
        ...

    def capture(self, work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        """Record `work`, which must read and write the same memory in every call.

        Returns:
            The memory of its result, and a function that queues the recorded work again. The function keeps `work`
            alive, and with it the memory that the recorded work reads.
        """
        ...

    def finish(self) -> None:
        """Wait until all queued work is done."""
        ...

    def free_bytes(self) -> int:
        """Return the free memory of the device, bytes."""
        ...

    def peak_bytes(self, work: Callable[[], None]) -> int:
        """Run `work` and wait for it; return by how many bytes memory in use grew at its peak."""
        ...


class CUDAStamp:
    """A timed event."""

    __slots__ = ("_event",)

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record(stream)

    def seconds_until(self, later: CUDAStamp) -> float:
        """Return the seconds to a later stamp."""
        return self._event.elapsed_time(later._event) / 1e3


class _Replay:
    """Queues recorded work again.

    A graph has only addresses. Without a reference to `work`, torch would reuse the memory of its arguments.
    """

    __slots__ = ("_graph", "_work")

    def __init__(self, graph: torch.cuda.CUDAGraph, work: Callable[[], Tensor]) -> None:
        self._graph = graph
        self._work = work

    def __call__(self) -> None:
        """Queue the graph."""
        self._graph.replay()


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
        """Return a context in which calls are queued on the compute stream."""
        return torch.cuda.stream(self._compute)

    def download(self, source: Tensor, target: Tensor) -> torch.cuda.Event:
        """Queue a copy to the host on the copy stream.

        The caller may drop `source` at once: torch then gives its memory to nothing else before the copy has ended.
        """
        self._copy.wait_event(self._compute.record_event())
        source.record_stream(self._copy)
        with torch.cuda.stream(self._copy):
            target.copy_(source, non_blocking=True)
        event = torch.cuda.Event()
        event.record(self._copy)
        return event

    def stamp(self) -> CUDAStamp:
        """Queue a timed event."""
        return CUDAStamp(self._compute)

    def capture(self, work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        """Run `work` once to compile and allocate everything, then capture it as a CUDA graph."""
        with torch.cuda.stream(self._compute):
            work()
        self._compute.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._compute):
            result = work()
        return result, _Replay(graph, work)

    def finish(self) -> None:
        """Wait for all streams."""
        torch.cuda.synchronize()

    def free_bytes(self) -> int:
        """Return the memory that the driver reports as free, after torch has released its cached blocks."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]

    def peak_bytes(self, work: Callable[[], None]) -> int:
        """Return the peak growth of the memory that torch reserves, including unused parts of its blocks."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        torch.cuda.reset_peak_memory_stats()
        work()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_reserved()
        torch.cuda.empty_cache()
        return peak - before
