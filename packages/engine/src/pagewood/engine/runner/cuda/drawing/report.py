"""Log probabilities of tokens on a CUDA device: their computation in a step, and the host's view of them.

Legend: N rows of logits, J of them that are reported, V vocab_size, K most alternatives of a token.
"""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.core.messages.batch import Batch
from pagewood.engine.core.messages.logprobs import Logprobs
from pagewood.engine.runner.cuda.device import Device
from pagewood.engine.runner.cuda.drawing.sampler import Sampler
from pagewood.engine.runner.cuda.kernels.flashinfer_api import FlashInfer

_NUM_COLUMNS = 3
"""Words of a report without alternatives: token, log probability, rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingReport:
    """Reports of a step, which the host may read when the device has reached the end of the step."""

    words: Tensor
    """[J, 3 + 2K] int32 in pinned memory."""
    on_device: Tensor
    """The same on the device, kept until they are copied."""
    places: Int32
    """[N], index of each row's report among the J; -1: no report."""
    num_top: Int32
    """[N], alternatives of each row; -1: it is not reported."""
    kept: PendingKept | None = None
    """What the filters have left; None: no row reports it."""

    def of(self, rows: NDArray[np.int64]) -> Logprobs:
        """Return the reports of some of the N rows, in that order."""
        words = self.words.numpy()[self.places[rows]]  # a row without a report reads any other one
        most = (words.shape[1] - _NUM_COLUMNS) // 2
        split = _NUM_COLUMNS + most
        return Logprobs(
            tokens=words[:, 0].copy(),
            values=words[:, 1].copy().view(np.float32),
            ranks=words[:, 2].copy(),
            num_top=self.num_top[rows],
            top_ids=words[:, _NUM_COLUMNS:split].copy(),
            top_values=words[:, split:].copy().view(np.float32),
            **({} if self.kept is None else self.kept.of(self.places[rows])),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingKept:
    """What the filters have left for the J rows, as bits: their number is not known before."""

    has: NDArray[np.bool_]
    """[J], whether a row reports it."""
    bits: Tensor
    """[J, bytes] uint8 in pinned memory, the bits of a byte from the lowest one on."""
    on_device: Tensor
    """The same on the device, kept until they are copied."""

    @classmethod
    def queued(cls, device: Device, has: NDArray[np.bool_], is_left: Tensor) -> PendingKept:
        """Queue the copy of `is_left` `[J, V] bool` to the host."""
        whole = functional.pad(is_left.to(torch.uint8), (0, -is_left.shape[1] % 8)).view(len(is_left), -1, 8)
        places = torch.arange(8, dtype=torch.uint8, device=is_left.device)
        words = (whole << places).sum(-1, dtype=torch.uint8)
        pinned = device.pinned(words.numel(), torch.uint8)
        device.download(words.flatten(), pinned)
        return cls(has=has, bits=pinned.view(words.shape), on_device=words)

    def of(self, places: Int32) -> dict[str, Int32]:
        """Return the fields of `Logprobs` for some of the J rows; -1: a row that is not among them."""
        found = [
            np.flatnonzero(np.unpackbits(self.bits[place].numpy(), bitorder="little")).astype(np.int32)
            if place >= 0 and self.has[place]
            else None
            for place in places.tolist()
        ]
        nums = np.array([-1 if one is None else len(one) for one in found], np.int32)
        ids = [one for one in found if one is not None]
        return {"num_kept": nums, "kept": np.concatenate(ids) if ids else np.empty(0, np.int32)}


class RowReports:
    """The rows that are reported. A batch without such rows costs one check of a host array."""

    __slots__ = ("_device", "_has_kept", "_is_processed", "_num_top")

    def __init__(self, device: Device, *, max_rows: int) -> None:
        self._device = device
        self._num_top = np.full(max_rows, -1, np.int32)  # contents written by: admit
        self._is_processed = np.zeros(max_rows, np.bool_)  # contents written by: admit
        self._has_kept = np.zeros(max_rows, np.bool_)  # contents written by: admit

    def admit(self, batch: Batch) -> None:
        """Enter the reports that the admitted requests want; call it before the step is queued."""
        if len(batch.admitted):
            self._num_top[batch.rows[batch.admitted]] = -1
        if batch.reports is not None:
            self._num_top[batch.reports.rows] = batch.reports.num_top
            self._is_processed[batch.reports.rows] = batch.reports.is_processed
            self._has_kept[batch.reports.rows] = batch.reports.has_kept

    def drawn(
        self,
        rows: Int32,
        tokens: Tensor,
        *,
        raw: Tensor,
        changed: Tensor,
        sampler: Sampler,
        filters: FlashInfer | None,
    ) -> PendingReport | None:
        """Queue the reports of drawn tokens; None: no row is reported.

        Args:
            rows: `[N]`, row of each, on the host.
            tokens: `[N]`, the drawn tokens.
            raw: `[N, V]`, the model's logits.
            changed: `[N, V]`, the logits that tokens were drawn from.
            sampler: of the N rows.
            filters: of the sampler.
        """
        num_top = self._num_top[rows]
        which = np.flatnonzero(num_top >= 0)
        if not len(which):
            return None
        index = torch.from_numpy(which).to(raw.device, non_blocking=True)
        scores = raw.index_select(0, index).float()
        values = scores.log_softmax(-1)
        is_processed, has_kept, kept = self._is_processed[rows[which]], self._has_kept[rows[which]], None
        if is_processed.any() or has_kept.any():
            processed = torch.from_numpy(is_processed).to(raw.device, non_blocking=True)[:, None]
            drawn_from = sampler.log_probabilities(filters, changed).index_select(0, index)
            scores, values = (torch.where(processed, drawn_from, one) for one in (scores, values))
            kept = PendingKept.queued(self._device, has_kept, drawn_from > -torch.inf) if has_kept.any() else None
        found = self._queue(tokens.index_select(0, index), scores, values, which, num_top)
        return found if kept is None else replace(found, kept=kept)

    def scored(self, scored: Int32, tokens: Tensor, logits: Tensor) -> PendingReport:
        """Queue the reports of prompt tokens.

        Args:
            scored: `[Q, 3]`, see `Batch.scored`.
            tokens: `[N]`, the tokens.
            logits: `[N, V]`, those after the positions before.
        """
        num_top = np.repeat(scored[:, 2], scored[:, 1])
        scores = logits.float()
        return self._queue(tokens, scores, scores.log_softmax(-1), np.arange(len(num_top)), num_top)

    def _queue(
        self, tokens: Tensor, scores: Tensor, values: Tensor, which: NDArray[np.int64], num_top: Int32
    ) -> PendingReport:
        """Queue the reports of J rows; `scores` `[J, V]` give the order of tokens, `values` `[J, V]` are reported."""
        tokens = tokens.long()[:, None]
        own = scores.gather(1, tokens)
        ranks = 1 + (scores > own).sum(1, keepdim=True)
        most = min(int(num_top.max()), scores.shape[1])
        top = scores.sort(dim=-1, descending=True, stable=True).indices[:, :most]
        words = torch.cat(
            [
                tokens.int(),
                values.gather(1, tokens).view(torch.int32),
                ranks.int(),
                top.int(),
                values.gather(1, top).view(torch.int32),
            ],
            dim=1,
        )
        places = np.full(len(num_top), -1, np.int32)
        places[which] = np.arange(len(which), dtype=np.int32)
        pinned = self._device.pinned(words.numel(), torch.int32)
        self._device.download(words.flatten(), pinned)
        return PendingReport(
            words=pinned.view(words.shape), on_device=words, places=places, num_top=np.minimum(num_top, scores.shape[1])
        )
