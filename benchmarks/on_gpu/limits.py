"""Measures the limits of the device: bytes read and written per second, and multiplications per second."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch

from pagewood.engine.runner.cuda.device import Device


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Each is the best of several passes."""

    copy_gb_s: float
    """Of a copy: bytes read and bytes written together."""
    read_gb_s: float
    """Of a sum: bytes read."""
    matmul_tflops: float

    @property
    def bytes_per_s(self) -> float:
        """The memory roofline: the better of the two."""
        return max(self.copy_gb_s, self.read_gb_s) * 1e9


def measure_limits(device: Device, *, dtype: str, stream_bytes: int, matmul_size: int) -> Limits:
    """Measure on an idle device."""
    where = device.torch_device
    source = torch.ones(stream_bytes // 4, dtype=torch.float32, device=where)
    target = torch.empty_like(source)
    copy_s = best_seconds(device, lambda: target.copy_(source))
    read_s = best_seconds(device, source.sum)
    left, right = (torch.randn(matmul_size, matmul_size, device=where).to(getattr(torch, dtype)) for _ in range(2))
    matmul_s = best_seconds(device, lambda: left @ right)
    return Limits(
        copy_gb_s=2 * stream_bytes / copy_s / 1e9,
        read_gb_s=stream_bytes / read_s / 1e9,
        matmul_tflops=2 * matmul_size**3 / matmul_s / 1e12,
    )


def best_seconds(device: Device, work: Callable[[], object], *, num_calls: int = 5, num_passes: int = 4) -> float:
    """Return the seconds per call in the best of several passes, after one call to warm up."""
    best = float("inf")
    for number in range(num_passes + 1):
        device.finish()
        start_s = perf_counter()
        for _ in range(num_calls):
            work()
        device.finish()
        if number:
            best = min(best, (perf_counter() - start_s) / num_calls)
    return best
