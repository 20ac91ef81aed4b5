"""From a configuration to the slots of adapters on a CUDA device."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

import importlib
import logging
from typing import Any

import torch
from torch.nn import functional

from pagewood.engine.api import EngineConfig
from pagewood.engine.runner.cuda.adapters import CUDAAdapters
from pagewood.engine.runner.cuda.device import Device
from pagewood.engine.runner.cuda.kernels.invariance import linear_by_row
from pagewood.engine.runner.cuda.low_rank import LowRankKernels, TorchLowRank

_log = logging.getLogger(__name__)


def cuda_adapters(config: EngineConfig, device: Device) -> CUDAAdapters | None:
    """Return the adapters of a runner, without a projection yet; None: the engine has no adapters."""
    if not config.max_adapters:
        return None
    return CUDAAdapters(
        num_slots=config.max_adapters,
        max_rank=config.max_adapter_rank,
        max_expert_rank=config.max_adapter_expert_rank,
        num_rows=config.num_rows,
        device=device,
        dtype=getattr(torch, config.resolved().dtype),
        kernels=_kernels(device.torch_device, batch_invariant=config.batch_invariant),
    )


def _kernels(device: torch.device, *, batch_invariant: bool) -> LowRankKernels:
    """Return what computes adapters: Triton's kernels on a device that has Triton, otherwise torch's."""
    if device.type != "cpu":
        try:
            kernels: Any = importlib.import_module("pagewood.engine.runner.cuda.kernels.adapters_triton")
        except ImportError as error:
            _log.warning("adapters are slow without Triton, which comes with torch for CUDA (%s)", error)
        else:
            return kernels
    return TorchLowRank(linear_by_row if batch_invariant else functional.linear)
