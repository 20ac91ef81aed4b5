"""The CPU as a device of one stream: everything is done when its call returns."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter

import torch
from torch import Tensor


class PassedEvent:
    """An event that has been reached."""

    def synchronize(self) -> None:
        """Do nothing."""


class HostStamp:
    """The time at which it was made."""

    __slots__ = ("_time_s",)

    def __init__(self) -> None:
        self._time_s = perf_counter()

    def seconds_until(self, later: HostStamp) -> float:
        """Return the seconds to a later stamp."""
        return later._time_s - self._time_s


class HostDevice:
    """The CPU. Invariant: no work is ever queued; so a runner's `launch` returns when its step is computed."""

    __slots__ = ("_free_bytes", "torch_device")

    def __init__(self, *, free_bytes: int) -> None:
        """Use the CPU of a machine with `free_bytes` of memory available."""
        self._free_bytes = free_bytes
        self.torch_device = torch.device("cpu")

    def pinned(self, size: int, dtype: torch.dtype) -> Tensor:
        """Return memory."""
        return torch.empty(size, dtype=dtype)

    def upload(self, source: Tensor, target: Tensor) -> None:
        """Copy."""
        target.copy_(source)

    def computing(self) -> AbstractContextManager[object]:
        """Do nothing, because there is only one stream."""
        return nullcontext()

    def download(self, source: Tensor, target: Tensor) -> PassedEvent:
        """Copy."""
        target.copy_(source)
        return PassedEvent()

    def stamp(self) -> HostStamp:
        """Return the time."""
        return HostStamp()

    def capture(self, work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        """Return the memory of a first result, and a function that computes it again."""
        result = work()

        def replay() -> None:
            result.copy_(work())

        return result, replay

    def finish(self) -> None:
        """Do nothing."""

    def free_bytes(self) -> int:
        """Return the memory that was available when the device was made."""
        return self._free_bytes

    def peak_bytes(self, work: Callable[[], None]) -> int:
        """Run `work`; return 0, because memory in use is not counted."""
        work()
        return 0
