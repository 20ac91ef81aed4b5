"""The experts and the hidden states of a step's positions on a CUDA device.

A step that reports some is computed without a graph, whose memory other steps use again. What may be reported is
copied to the host with the tokens; these say how much of it counts.

Legend: T tokens, W tokens with a last state, R reported positions at most, L layers, K most experts of a token.
"""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.core.messages.batch import Batch
from pagewood.engine.models.decoder import Decoder
from pagewood.engine.runner.cuda.device import Device
from pagewood.engine.runner.reported_places import Granted


def has_rows(batch: Batch) -> bool:
    """Return whether a step reports experts or hidden states."""
    return len(batch.routed) > 0 or len(batch.stated) > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pending:
    """Rows of one kind, which the host may read when the device has reached the end of the step."""

    entries: Int32
    """[n, 2], see `Batch.routed`."""
    on_host: Tensor
    """[R, ...] in pinned memory."""
    on_device: Tensor
    """The same on the device, kept until they are copied."""

    @classmethod
    def queued(cls, device: Device, entries: Int32, rows: Tensor) -> _Pending:
        """Queue the copy of `rows` to the host."""
        rows = rows.contiguous()
        pinned = device.pinned(rows.numel(), rows.dtype)
        device.download(rows.flatten(), pinned)
        return cls(entries=entries, on_host=pinned.view(rows.shape), on_device=rows)

    def read(self, grants: Granted, yielded: Int32) -> NDArray[Any]:
        """Return a copy of the rows that count, given the tokens `[S]` of each sampled grant."""
        most, nums = (grants.num_rows(self.entries, each) for each in (grants.promised, yielded))
        place = np.arange(most.sum()) - np.repeat(np.cumsum(most) - most, most)
        return self.on_host.numpy()[place < np.repeat(nums, most)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingRows:
    """Inner rows of a step."""

    grants: Granted
    experts: _Pending | None
    states: _Pending | None

    def read(self, yielded: Int32) -> dict[str, NDArray[Any]]:
        """Return the fields of `StepResult`, given the tokens `[S]` of each sampled grant."""
        parts = {"experts": self.experts, "states": self.states}
        return {name: part.read(self.grants, yielded) for name, part in parts.items() if part is not None}


class InnerReports:
    """Reports the inner rows of a model.

    Args:
        device: of the model.
        model: whose choices of experts are reported if it is a `Decoder` over `CUDAOps`.
        captured: states that its steps keep, see `Decoder.states`: after the last layer, all tokens may be among them.
    """

    __slots__ = ("_device", "_model", "_narrows")

    def __init__(self, device: Device, model: object, captured: Sequence[int]) -> None:
        self._device = device
        self._model: Any = model if isinstance(model, Decoder) else None
        self._narrows = self._model is None or all(state < self._model.whole.num_layers for state in captured)

    @contextmanager
    def keeping(self, batch: Batch) -> Generator[list[Tensor]]:
        """Keep the experts that are chosen while the model is queued, if the step reports them."""
        found: list[Tensor] = []
        if not len(batch.routed):
            yield found
            return
        self._model.ops.chosen = found
        try:
            yield found
        finally:
            self._model.ops.chosen = None

    def queue(self, batch: Batch, states: Tensor, chosen: Sequence[Tensor]) -> PendingRows | None:
        """Queue the copies of what a step reports; None: it reports nothing.

        Args:
            batch: of the step.
            states: `[W, E]`, the last states, those kept beside others at the end.
            chosen: what was kept, `[T or W, experts of a token]` of each layer with experts.
        """
        if not has_rows(batch):
            return None
        grants = Granted.of(batch)
        num_before = len(states) - int(grants.beside[:, 2].sum())

        def places(entries: Int32) -> list[Tensor]:
            found = grants.places(entries, grants.promised, num_before)
            return [torch.from_numpy(one).to(states.device, non_blocking=True) for one in found]

        experts = own = None
        if len(batch.stated):
            kept = places(batch.stated)[1]
            own = _Pending.queued(self._device, batch.stated, states.index_select(0, kept).float())
        if len(batch.routed):
            config, (tokens, kept) = self._model.whole, places(batch.routed)
            out = torch.zeros(len(tokens), *config.expert_shape, dtype=torch.int32, device=states.device)
            layers = [layer for layer, router in enumerate(config.routers) if router is not None]
            for layer, each in zip(layers, chosen, strict=True):
                is_narrow = self._narrows and layer == config.num_layers - 1
                out[:, layer, : each.shape[1]] = each.index_select(0, kept if is_narrow else tokens)
            experts = _Pending.queued(self._device, batch.routed, out)
        return PendingRows(grants=grants, experts=experts, states=own)
