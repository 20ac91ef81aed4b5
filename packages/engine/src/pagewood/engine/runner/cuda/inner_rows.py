"""The experts and the hidden states of a step's positions on a CUDA device.

A step that reports some is computed without a graph, whose memory other steps use again. What may be reported is
copied to the host with the tokens; these say how much of it counts. Stages send the choices of their layers and of all
before behind the hidden states, so that the last one has all. Where requests are divided among ranks, each rank chooses
for the tokens of all.

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
from pagewood.engine.runner.cuda.division import RequestDivision
from pagewood.engine.runner.cuda.stage_relay import StageRelay
from pagewood.engine.runner.reported_places import Granted, has_rows


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
        division: of the requests among ranks; None: this one has all, or its part of all.
    """

    __slots__ = ("_device", "_division", "_model", "_narrows")

    def __init__(
        self, device: Device, model: object, captured: Sequence[int], division: RequestDivision | None
    ) -> None:
        self._device = device
        self._division = division
        self._model: Any = model if isinstance(model, Decoder) else None
        self._narrows = self._model is None or all(state < self._model.whole.num_layers for state in captured)

    @contextmanager
    def keeping(self, batch: Batch, tokens: Tensor) -> Generator[list[Tensor]]:
        """Keep the experts that are chosen while the model is queued, if the step reports them, see `queue`.

        In stages, those of earlier ones are received behind the model, and all are sent on. `tokens` are `[T, ...]`.
        """
        found: list[Tensor] = []
        if not len(batch.routed):
            yield found
            return
        self._model.ops.chosen = found
        try:
            yield found
        finally:
            self._model.ops.chosen = None
        relay: StageRelay | None = self._model.relay
        if relay is None:
            return
        sizes = [one.num_chosen for one in self._model.whole.routers[: self._model.stage.first] if one is not None]
        if sizes:
            found[:0] = relay.receive_numbers(tokens, sum(sizes)).split(sizes, 1)
        if found and not relay.is_last:
            relay.send_numbers(torch.cat(found, 1))

    def queue(
        self, batch: Batch, states: Tensor, chosen: Sequence[Tensor], gathered: Int32 | None
    ) -> PendingRows | None:
        """Queue the copies of what a step reports; None: it reports nothing.

        Args:
            batch: of the step.
            states: `[W, E]`, the last states, those kept beside others at the end.
            chosen: what was kept, `[T or W, experts of a token]` of each layer with experts.
            gathered: `[W]` where the tokens with a last state are among those of all ranks; None: in this order.
        """
        if not has_rows(batch):
            return None
        grants = Granted.of(batch)
        num_before = len(states) - int(grants.beside[:, 2].sum())

        def on_device(places: NDArray[Any]) -> Tensor:
            return torch.from_numpy(places).to(states.device, non_blocking=True)

        experts = own = None
        if len(batch.stated):
            _, kept = grants.places(batch.stated, grants.promised, num_before)
            own = _Pending.queued(self._device, batch.stated, states.index_select(0, on_device(kept)).float())
        if len(batch.routed):
            config, (tokens, kept) = self._model.whole, grants.places(batch.routed, grants.promised, num_before)
            if self._division is not None and gathered is not None:
                tokens, kept = self._division.token_places(batch)[tokens], gathered[kept]
            of_tokens, of_kept = on_device(tokens), on_device(kept)
            out = torch.zeros(len(tokens), *config.expert_shape, dtype=torch.int32, device=states.device)
            layers = [layer for layer, router in enumerate(config.routers) if router is not None]
            for layer, each in zip(layers, chosen, strict=True):
                is_narrow = self._narrows and layer == config.num_layers - 1
                out[:, layer, : each.shape[1]] = each.index_select(0, of_kept if is_narrow else of_tokens)
            experts = _Pending.queued(self._device, batch.routed, out)
        return PendingRows(grants=grants, experts=experts, states=own)
