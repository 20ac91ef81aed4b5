"""A device on the CPU that records every call that would wait: `runner.cuda.device.Device` without a GPU."""

# pyright: basic
# torch's dispatch modes have no types.

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from threading import RLock
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_WAITING = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "equal", "unique", "_unique2", "item")
"""Operations for which the host must know a result or its shape; on a GPU they wait for it."""


class RecordingEvent:
    """An event that is reached only when the host waits for it, as late as possible."""

    __slots__ = ("_device", "_number")

    def __init__(self, device: RecordingDevice, number: int) -> None:
        self._device = device
        self._number = number

    def synchronize(self) -> None:
        """Do the copies that were queued before the event."""
        self._device.pass_mark(self._number)


class RecordingStamp:
    """The time at which the host queued it, because the device computes immediately."""

    __slots__ = ("_time_s",)

    def __init__(self) -> None:
        self._time_s = perf_counter()

    def seconds_until(self, later: RecordingStamp) -> float:
        """Return the seconds to a later stamp."""
        return later._time_s - self._time_s


@dataclass(frozen=True, slots=True, kw_only=True)
class _Read:
    """A read of pinned memory by the device at any time before an event."""

    source: Tensor
    contents: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Write:
    """A copy to pinned memory."""

    source: Tensor
    target: Tensor


class RecordingDevice:
    """Computes immediately, on the CPU, but copies results back as late as possible.

    Invariant: `waits` names every call that would make the host wait for a GPU, and an AssertionError is raised if the
    host writes to pinned memory that a GPU might not have read yet.
    """

    def __init__(self, *, free_bytes: int = 1 << 30, peak_bytes: int = 0) -> None:
        """Report `free_bytes` of free memory, and `peak_bytes` as the peak of any work."""
        self._free_bytes = free_bytes
        self._peak_bytes = peak_bytes
        self.torch_device = torch.device("cpu")
        self.waits: list[str] = []
        self.num_replayed = 0
        """Number of replays of captured work."""
        self._pinned: list[Tensor] = []
        self._queued: list[_Read | _Write] = []  # written by: recording_device
        self._num_passed = 0  # written by: recording_device
        self._turn = RLock()
        """One thread may launch steps while another one waits for them."""

    def pinned(self, size: int, dtype: torch.dtype) -> Tensor:
        """Return memory that is treated as pinned."""
        memory = torch.empty(size, dtype=dtype)
        self._pinned.append(memory)
        return memory

    def upload(self, source: Tensor, target: Tensor) -> None:
        """Copy; from unpinned memory this counts as a wait."""
        self._check_pinned("upload", source)
        target.copy_(source)
        with self._turn:
            self._queued.append(_Read(source=source, contents=source.clone()))

    def computing(self) -> AbstractContextManager[object]:
        """Do nothing, because there is only one stream."""
        return nullcontext()

    def download(self, source: Tensor, target: Tensor) -> RecordingEvent:
        """Queue a copy that is done when the host waits; to unpinned memory this counts as a wait."""
        self._check_pinned("download", target)
        with self._turn:
            self._queued.append(_Write(source=source, target=target))
            return RecordingEvent(self, self._num_passed + len(self._queued))

    def stamp(self) -> RecordingStamp:
        """Return the time."""
        return RecordingStamp()

    def capture(self, work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        """Return the memory of a first result, and a function that computes it again."""
        result = work()

        def replay() -> None:
            self.num_replayed += 1
            result.copy_(work())

        return result, replay

    def finish(self) -> None:
        """Record a wait, and do all copies."""
        with self._turn:
            self.waits.append("device.finish")
            self._copy_until(self._num_passed + len(self._queued))

    def pass_mark(self, number: int) -> None:
        """Record a wait; do the first `number` of all copies ever queued."""
        with self._turn:
            self.waits.append("event.synchronize")
            self._copy_until(number)

    def _copy_until(self, number: int) -> None:
        while self._num_passed < number:
            copy = self._queued.pop(0)
            self._num_passed += 1
            if isinstance(copy, _Write):
                with torch.inference_mode():
                    copy.target.copy_(copy.source)
            else:
                now, read = (one.contiguous().view(torch.uint8).numpy() for one in (copy.source, copy.contents))
                assert np.array_equal(now, read), (
                    "pinned memory was written before the device was known to have read it"
                )

    def free_bytes(self) -> int:
        """Return the value given to the constructor."""
        return self._free_bytes

    def peak_bytes(self, work: Callable[[], None]) -> int:
        """Run `work`; return the value given to the constructor."""
        work()
        return self._peak_bytes

    @contextmanager
    def watching(self) -> Generator[None]:
        """Return a context that also records the torch operations that would wait."""
        with _Watch(self.waits):
            yield

    def _check_pinned(self, what: str, host: Tensor) -> None:
        if not any(host.untyped_storage().data_ptr() == p.untyped_storage().data_ptr() for p in self._pinned):
            self.waits.append(f"{what} of memory that is not pinned")


class _Watch(TorchDispatchMode):
    """Records the operations that wait."""

    def __init__(self, waits: list[str]) -> None:
        super().__init__()
        self._waits = waits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record an operation if it waits, and run it."""
        name = func.overloadpacket.__name__
        masked = name.startswith("index") and any(
            isinstance(x, Tensor) and x.dtype == torch.bool for x in (args[1] if isinstance(args[1], list) else ())
        )
        if name in _WAITING or masked:
            self._waits.append(f"torch.{name}")
        return func(*args, **(kwargs or {}))
