"""Pinned memory for copying the arrays of a step to the device and its tokens back; each step in flight has its own."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from pagewood.engine.core.arrays import Int32
from pagewood.engine.runner.cuda.attention import STAGING_BYTES
from pagewood.engine.runner.cuda.device import Device
from pagewood.engine.runner.cuda.step_arrays import StepArrays

_ALIGNMENT = 4  # in int32 elements: every array starts at a multiple of 16 bytes


class StagingSlot:
    """The memory of one step in flight. Invariant: between `take` and `give_back` no other step touches it."""

    __slots__ = ("_device", "_on_device", "_on_host", "on_host_tokens", "plans", "tokens")

    def __init__(self, device: Device, *, windows: Sequence[int], max_rows: int) -> None:
        """Allocate memory for a step of up to `max_rows` sampled grants, and a plan buffer for each window."""
        self._device = device
        self._on_host = device.pinned(0, torch.int32)  # written by: upload
        self._on_device = self._on_host  # written by: upload
        self.plans = {window: device.pinned(STAGING_BYTES, torch.uint8) for window in windows}
        """Buffers by window, which the wrappers use for their plans."""
        self.tokens = torch.empty(max_rows, dtype=torch.int32, device=device.torch_device)
        """[max_rows], sampled tokens on the device."""
        self.on_host_tokens = device.pinned(max_rows, torch.int32)
        """[max_rows], the same tokens in pinned memory."""

    def upload(self, arrays: StepArrays[Int32]) -> tuple[StepArrays[Tensor], StepArrays[Tensor]]:
        """Queue one copy of all arrays; return them in pinned memory and on the device."""
        words = arrays.words()
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

    __slots__ = ("_device", "_free", "_max_rows", "_windows")

    def __init__(self, device: Device, *, windows: Sequence[int], max_rows: int) -> None:
        self._device = device
        self._windows = windows
        self._max_rows = max_rows
        self._free: list[StagingSlot] = []  # written by: take, give_back

    def take(self) -> StagingSlot:
        """Return a slot that no step in flight uses."""
        if self._free:
            return self._free.pop()
        return StagingSlot(self._device, windows=self._windows, max_rows=self._max_rows)

    def give_back(self, slot: StagingSlot) -> None:
        """Let other steps use a slot; the device must have finished with it."""
        self._free.append(slot)


def _cut(memory: Tensor, spans: Mapping[str, tuple[int, int]]) -> StepArrays[Tensor]:
    return StepArrays.of_words({name: memory[start:stop] for name, (start, stop) in spans.items()})


def read(tokens: Tensor, count: int) -> Int32:
    """Return a copy of the first `count` tokens in pinned memory; their copy to the host must be complete."""
    return np.array(tokens.numpy()[:count], np.int32)
