"""Sums of hidden states on a CUDA device, of the prompts that become vectors.

Legend: P pooled grants, K tokens of them whose states are added, E elements of a hidden state.
"""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.core.messages.batch import Batch
from pagewood.engine.runner.cuda.device import Device
from pagewood.engine.runner.reported_places import Granted, has_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingSums:
    """Sums of a step, which the host may read when the device has reached the end of the step."""

    sums: Tensor
    """[P, E] float32 in pinned memory."""
    on_device: Tensor
    """The same on the device, kept until they are copied."""

    def read(self) -> NDArray[np.float32]:
        """Return a copy of the sums."""
        return self.sums.numpy().copy()


def pooled_entries(batch: Batch) -> Int32:
    """Return `Batch.pooled`, and behind it what is kept beside it, see `runner.reported_places`; `[n, 3]`."""
    return np.concatenate([batch.pooled, Granted.of(batch).beside]) if has_rows(batch) else batch.pooled


def pooled_tokens(batch: Batch, offsets: Int32) -> Int32:
    """Return the tokens of `pooled_entries`, one grant after the other; `offsets` is the first token of each."""
    entries = pooled_entries(batch).tolist()
    spans = [np.arange(num, dtype=np.int32) + offsets[grant] + first for grant, first, num in entries]
    return np.concatenate(spans) if spans else np.empty(0, np.int32)


def queue_sums(device: Device, pooled: Int32, states: Tensor) -> PendingSums | None:
    """Queue the sums of the pooled grants, and their copy to the host; None if no grant is pooled.

    Each sum is a reduction of its own, so it does not depend on the other grants of the step.

    Args:
        device: computes and copies.
        pooled: `[P, 3]`, see `Batch.pooled`.
        states: `[>= K, E]`, of `pooled_tokens`.
    """
    if not len(pooled):
        return None
    parts = states[: pooled[:, 2].sum()].split(pooled[:, 2].tolist())
    sums = torch.stack([part.float().sum(0) for part in parts])
    pinned = device.pinned(sums.numel(), torch.float32)
    device.download(sums.flatten(), pinned)
    return PendingSums(sums=pinned.view(sums.shape), on_device=sums)
