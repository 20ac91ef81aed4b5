"""A drafting head on a CUDA device: it reads the hidden states of the target after each step, and drafts in the next.

At the end of a step, the head computes the pairs of all positions of the step, and keeps for each row its hidden state
at the last accepted one. The next step draws the first draft from that, and each further draft costs a pass over one
pair. Every step does so, with drafts or without, so the head's KV is complete wherever the target's is.

Legend: D rows to draft for, T tokens of a step, S sampled grants, E elements of a hidden state of the head.
"""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.core.messages.batch import Batch
from pagewood.engine.models.head import Head
from pagewood.engine.runner.cuda.attention import (
    HostArrays,
    PageArrays,
    Places,
    offsets_of,
)
from pagewood.engine.runner.cuda.device import Device
from pagewood.engine.runner.cuda.division import of_own
from pagewood.engine.runner.cuda.drafts.masks import MaskShape, packed_masks
from pagewood.engine.runner.cuda.drafts.verify import DraftRequest, Extension
from pagewood.engine.runner.cuda.drawing.sampler import Sampler
from pagewood.engine.runner.cuda.kernels.flashinfer_api import FlashInfer
from pagewood.engine.runner.cuda.latent_attention import attention_over
from pagewood.engine.runner.storage import AnyStorage

_NEVER = -math.inf


class EagleDrafter:
    """`HeadDrafter` with a head. Invariant: a row drafts only from a state that its own latest step has left.

    A slot of a cached prefix holds a pair with the token after it. So the last slot of a prefix is out of date for a
    row that continues differently; this is one key among many.
    """

    __slots__ = (
        "_attention", "_device", "_filters", "_head", "_rotations", "_states", "_token_map",
    )  # fmt: skip

    def __init__(
        self,
        head: Head[Tensor],
        storage: AnyStorage,
        flashinfer: FlashInfer,
        device: Device,
        *,
        max_rows: int,
        max_length: int,
        dtype: str | None = None,
        batch_invariant: bool = False,
    ) -> None:
        """Draft with `head`; the other arguments are those of `DraftModel`."""
        layer = head.config.layer
        dtype = dtype or storage.layout.dtype
        self._head = head
        self._device = device
        self._filters = None if batch_invariant else flashinfer
        where = device.torch_device
        with torch.inference_mode():
            points = torch.arange(max_length + 1, device=where)
            self._rotations = [torch.cat(rope(points), -1) for rope in head.ropes]
            self._attention = attention_over(
                flashinfer,
                storage,
                layer.paged,
                dtype=dtype,
                max_length=max_length,
                batch_invariant=batch_invariant,
                verifies=True,
            )
            self._states = torch.zeros(max_rows + 1, layer.hidden_size, dtype=getattr(torch, dtype), device=where)
            """[rows, E], the state of each row at its last accepted position; contents written by: extend"""
            self._token_map = None if head.token_map is None else head.token_map.to(where)

    @property
    def windows(self) -> Sequence[int]:
        """Windows for which plans need memory."""
        return self._attention.windows

    @property
    def mask_windows(self) -> Sequence[int]:
        """Windows for which extensions need masks."""
        return self._attention.mask_windows

    @property
    def captured(self) -> Sequence[int]:
        """Numbers of the target's hidden states that it reads, see `Decoder.states`."""
        return self._head.config.captured

    @property
    def feature_size(self) -> int:
        """E."""
        return self._head.config.layer.hidden_size

    def features(self, states: Sequence[Tensor]) -> Tensor:
        """Return `[T, E]` of the captured `states`."""
        return self._head.features(states)

    def note(self, batch: Batch) -> None:
        """Do nothing: every step is extended."""

    def extend(self, extension: Extension) -> None:
        """Compute the pairs of a step, and keep the states of its rows."""
        _, later = extension.slot.drafting(self._device, windows=self.windows)
        if extension.masks is None:
            planned = self._attention.plan(extension.host, extension.places, later.plans)
        else:
            planned = self._attention.plan_verify(extension.host, extension.places, extension.masks, later.plans)
        rotations = [(extension.places.positions, table) for table in self._rotations]
        hidden = self._head.advance(
            extension.tokens, extension.features, rotations, planned, extension.wanted, division=extension.division
        )
        if num := len(extension.rows):
            self._states.index_copy_(0, extension.rows, hidden[:num].to(self._states.dtype))

    def draft(self, request: DraftRequest) -> tuple[Tensor, Tensor]:
        """Return drafts; see `Drafter`."""
        tables, page_size = request.tables, self._attention.layout.page_size
        num_spare = 0 if request.spare_page is None else page_size
        divided, rows = None, request.host_rows
        all_lens = kv_lens = request.kv_lens + np.int32(num_spare)
        if request.division is not None:
            divided = request.division.grants(rows, np.ones_like(rows))
            rows, kv_lens = divided.of(rows, tables.max_rows), divided.of(kv_lens, 1)
        pages = PageArrays.of(kv_lens, page_size=page_size)
        ones = np.ones_like(kv_lens)
        shape, sampling = MaskShape.of(ones, kv_lens), request.sampling
        words: dict[str, Int32] = {
            "kv_indptr": pages.kv_indptr,
            "page_shifts": rows * np.int32(tables.pages_per_row) - pages.kv_indptr[:-1],
            "last_page_len": pages.last_page_len,
            "kv_lens": kv_lens,
            "all_lens": all_lens,
            "last": np.minimum(kv_lens, np.int32(tables.tokens_per_row)) - 1,
            "qo_indptr": offsets_of(ones),
            "mask_offsets": shape.offsets,
            "sampling": sampling.flat(),
            **({} if divided is None else divided.words()),
        }
        first, _ = request.slot.drafting(self._device, windows=self.windows)
        host, step = first.upload(words)
        indices = request.pages_of(step["kv_indptr"], step["page_shifts"], int(pages.kv_indptr[-1]))
        if request.spare_page is not None:
            indices.index_fill_(0, step["kv_indptr"][1:].long() - 1, request.spare_page)
        lengths = own_lengths = request.lengths
        own_rows, division = request.rows, None
        if divided is not None:
            division = divided.rows
            own_lengths = of_own(lengths, step["own"], 1)
            own_rows = of_own(own_rows, step["own"], tables.max_rows)
        every = torch.arange(len(kv_lens), dtype=torch.int32, device=lengths.device)
        hidden = self._states.index_select(0, own_rows)
        logits = self._head.logits(hidden, division=division)
        drafts: list[Tensor] = []
        for depth in range(request.num_drafts):
            if depth > 0:
                # A row with fewer drafts computes its last slot repeatedly; that draft is not used.
                positions = torch.minimum(own_lengths - 2 + depth, step["last"])
                tokens = drafts[-1]
                if division is not None:
                    tokens = division.gather_numbers(of_own(tokens, step["own"], 0))
                where = Places(
                    grants=every, positions=positions, kv_indptr=step["kv_indptr"], kv_indices=indices,
                    last_page_len=step["last_page_len"],
                )  # fmt: skip
                masks = packed_masks(
                    positions, step["qo_indptr"], step["kv_lens"], step["mask_offsets"],
                    self.mask_windows,
                    num_bytes=int(shape.offsets[-1]), rows_per_byte=shape.rows_per_byte,
                )  # fmt: skip
                if depth == 1:  # later passes differ only in their masks
                    arrays = HostArrays(
                        is_decode=False, qo_indptr=host["qo_indptr"], kv_indptr=host["kv_indptr"],
                        last_page_len=host["last_page_len"], kv_lens=host["kv_lens"],
                    )  # fmt: skip
                    planned = self._attention.plan_verify(arrays, where, masks, first.plans)
                else:
                    planned = self._attention.replan_masks(where, masks)
                rotations = [(positions, table) for table in self._rotations]
                logits, hidden = self._head(tokens, hidden, rotations, planned, every, division=division)
            if divided is not None:
                logits = logits.index_select(0, step["gathered"])
            sampler = Sampler.of(sampling, step["sampling"], lengths + depth)
            drafts.append(sampler.tokens(self._filters, self._spread(logits))[0].int())
        # The first draft needs no slot, and the second one that of the last known token.
        room = step["all_lens"] - num_spare + 2 - lengths
        return torch.stack(drafts, 1), room.clamp_(0, request.num_drafts)

    def _spread(self, logits: Tensor) -> Tensor:
        """Return logits over the target's vocabulary, so that a token is drawn with noise of its own."""
        if self._token_map is None:
            return logits
        everything = torch.full(
            (len(logits), self._head.config.layer.vocab_size), _NEVER, dtype=torch.float32, device=logits.device
        )
        return everything.index_copy_(1, self._token_map, logits.float())
