"""Pinned memory for copying the arrays of a step to the device and its result back; each step in flight has its own."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.runner.cuda.attention import STAGING_BYTES
from pagewood.engine.runner.cuda.device import Device

_ALIGNMENT = 4  # in int32 elements: every array starts at a multiple of 16 bytes


class StagingSlot:
    """The memory of one step in flight. Invariant: between `take` and `give_back` no other step touches it."""

    __slots__ = ("_device", "_drafting", "_on_device", "_on_host", "_on_host_told", "on_host_result", "plans", "result")

    def __init__(self, device: Device, *, windows: Sequence[int], result_size: int) -> None:
        """Allocate memory for a result of up to `result_size` words, and a plan buffer for each window."""
        self._device = device
        self._on_host = device.pinned(0, torch.int32)  # written by: upload
        self._on_device = self._on_host  # written by: upload
        self._on_host_told = self._on_host  # written by: on_host_told
        self._drafting: tuple[StagingSlot, StagingSlot] | None = None  # written by: drafting
        self.plans = {window: device.pinned(STAGING_BYTES, torch.uint8) for window in windows}
        """Buffers by window, which the wrappers use for their plans."""
        self.result = torch.empty(result_size, dtype=torch.int32, device=device.torch_device)
        """[result_size], sampled tokens and other results of the step, on the device."""
        self.on_host_result = device.pinned(result_size, torch.int32)
        """[result_size], the same in pinned memory."""

    def drafting(self, device: Device, *, windows: Sequence[int]) -> tuple[StagingSlot, StagingSlot]:
        """Return memory for the two plans that a draft model makes in a step, with the lifetime of this slot."""
        if self._drafting is None:
            first, later = (StagingSlot(device, windows=windows, result_size=0) for _ in range(2))
            self._drafting = first, later
        return self._drafting

    def on_host_told(self, size: int) -> Tensor:
        """Return pinned memory `[size] int32` for data that the host needs in the middle of the step."""
        if size > len(self._on_host_told):
            self._on_host_told = self._device.pinned(1 << (size - 1).bit_length(), torch.int32)
        return self._on_host_told[:size]

    def upload(self, words: Mapping[str, Int32]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Queue one copy of all arrays; return them in pinned memory and on the device."""
        spans: dict[str, tuple[int, int]] = {}
        end = 0
        for name, array in words.items():
            spans[name] = end, end + len(array)
            end += -(-len(array) // _ALIGNMENT) * _ALIGNMENT
        if end > len(self._on_host):
            capacity = 1 << (end - 1).bit_length()
            self._on_host = self._device.pinned(capacity, torch.int32)
            self._on_device = torch.empty(capacity, dtype=torch.int32, device=self._device.torch_device)
        target = self._on_host.numpy()
        for name, (start, stop) in spans.items():
            target[start:stop] = words[name]
        self._device.upload(self._on_host[:end], self._on_device[:end])
        return _cut(self._on_host, spans), _cut(self._on_device, spans)


class StagingPool:
    """Slots for all steps in flight. It makes a slot when none is free, so taking one never waits."""

    __slots__ = ("_device", "_free", "_result_size", "_windows")

    def __init__(self, device: Device, *, windows: Sequence[int], result_size: int) -> None:
        self._device = device
        self._windows = windows
        self._result_size = result_size
        self._free: list[StagingSlot] = []  # written by: take, give_back

    def take(self) -> StagingSlot:
        """Return a slot that no step in flight uses."""
        if self._free:
            return self._free.pop()
        return StagingSlot(self._device, windows=self._windows, result_size=self._result_size)

    def give_back(self, slot: StagingSlot) -> None:
        """Let other steps use a slot; the device must have finished with it."""
        self._free.append(slot)


def _cut(memory: Tensor, spans: Mapping[str, tuple[int, int]]) -> dict[str, Tensor]:
    return {name: memory[start:stop] for name, (start, stop) in spans.items()}


def read(words: Tensor, count: int) -> Int32:
    """Return a copy of the first `count` words in pinned memory; their copy to the host must be complete."""
    return np.array(words.numpy()[:count], np.int32)
