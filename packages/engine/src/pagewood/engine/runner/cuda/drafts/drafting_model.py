"""A draft model on a CUDA device: it computes each row's latest tokens, then one draft after the other.

Its keys and values lie in pages with the ids of the target's. A draft is drawn with the target's parameters, seed and
position, so it equals the target's token wherever the two distributions are alike.

The host does not know where a row ends, but it has an upper bound on the tokens that the model has not computed yet:
two after a step with drafts (the last draft, if all were accepted, and the token after it), and one more after each
step without drafts.

Legend: D rows to draft for, T tokens of a pass.
"""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.core.messages.batch import Batch
from pagewood.engine.models.decoder import Decoder
from pagewood.engine.runner.cuda.attention import (
    HostArrays,
    PageArrays,
    Places,
    offsets_of,
)
from pagewood.engine.runner.cuda.device import Device
from pagewood.engine.runner.cuda.division import DividedGrants, of_own
from pagewood.engine.runner.cuda.drafts.masks import MaskShape, packed_masks
from pagewood.engine.runner.cuda.drafts.verify import DraftRequest
from pagewood.engine.runner.cuda.drawing.sampler import Sampler
from pagewood.engine.runner.cuda.kernels.flashinfer_api import FlashInfer
from pagewood.engine.runner.cuda.latent_attention import attention_over
from pagewood.engine.runner.storage import AnyStorage

MAX_REBUILT = 512
"""The most positions of a row that a step computes again; a row that needs more gets no drafts until it is done."""


class DraftModel:
    """`Drafter` with a model of the target's vocabulary.

    Invariant: before a row's drafts, its KV is computed from the first position that may lack it. A cached prefix
    counts as computed if it is trusted, so a prefix that was never drafted for makes drafts worse. The text never
    depends on it.
    """

    __slots__ = (
        "_attention", "_device", "_done", "_filters", "_lags", "_max_rebuilt", "_model", "_rotations", "_trusts_cached",
    )  # fmt: skip

    def __init__(
        self,
        model: Decoder[Tensor],
        storage: AnyStorage,
        flashinfer: FlashInfer,
        device: Device,
        *,
        max_rows: int,
        max_length: int,
        dtype: str | None = None,
        batch_invariant: bool = False,
        max_rebuilt: int = MAX_REBUILT,
        trusts_cached: bool = True,
    ) -> None:
        """Draft with `model`.

        Args:
            model: to compute, on `device`.
            storage: its KV memory, with the page ids of the target's.
            flashinfer: see `CUDARunner`, also for the next ones.
            device: where to compute.
            max_rows: of the runner.
            max_length: of the runner.
            dtype: of activations.
            batch_invariant: whether drafts must not depend on the batch; the text does not in either case.
            max_rebuilt: see `MAX_REBUILT`.
            trusts_cached: whether cached prefixes count as computed. A page may be copied to lower tiers before a step
                computes its drafts or afterwards, so it may not be the same in all stages when it comes back.
        """
        config = model.config
        self._model = model
        self._device = device
        self._filters = None if batch_invariant else flashinfer
        self._max_rebuilt = max_rebuilt
        self._trusts_cached = trusts_cached
        self._done = np.zeros(max_rows, np.int32)  # contents written by: note
        """[rows] positions of each row that are computed, until its first drafts."""
        self._lags = np.zeros(max_rows, np.int32)  # contents written by: note, _spans
        """[rows] after its first drafts, the largest possible number of known tokens of each row that are not computed;
        0: no drafts yet."""
        with torch.inference_mode():
            points = torch.arange(max_length + 1, device=device.torch_device)
            self._rotations = [torch.cat(rope(points), -1) for rope in model.ropes]
            self._attention = attention_over(
                flashinfer,
                storage,
                config.paged,
                dtype=dtype or storage.layout.dtype,
                max_length=max_length,
                batch_invariant=batch_invariant,
                verifies=True,
            )

    @property
    def windows(self) -> Sequence[int]:
        """The windows for which plans need memory."""
        return self._attention.windows

    def note(self, batch: Batch) -> None:
        """Follow the rows of a step; called before its drafts, if it has any."""
        admitted = batch.rows[batch.admitted]
        self._done[admitted], self._lags[admitted] = batch.starts[batch.admitted] * self._trusts_cached, 0
        plain = batch.rows[batch.sampled[batch.num_promised == 1]]
        self._lags[plain] += self._lags[plain] > 0

    def draft(self, request: DraftRequest) -> tuple[Tensor, Tensor]:
        """Return drafts; see `Drafter`."""
        tables, layout = request.tables, self._attention.layout
        lags, counts = self._spans(request)
        is_late = (lags > self._max_rebuilt).astype(np.int32)
        kv_lens, rows = request.kv_lens, request.host_rows
        divided: list[DividedGrants] = []  # of the first pass, and of later ones
        if request.division is not None:
            divided = [request.division.grants(rows, one) for one in (counts, np.ones_like(counts))]
            of = divided[0].of
            lags, counts, kv_lens, rows = of(lags, 1), of(counts, 1), of(kv_lens, 1), of(rows, tables.max_rows)
        pages = PageArrays.of(kv_lens, page_size=layout.page_size)
        offsets = offsets_of(counts)
        ones = np.ones_like(counts)
        grants = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        masks = MaskShape.of(counts, kv_lens), MaskShape.of(ones, kv_lens)
        sampling = request.sampling
        words: dict[str, Int32] = {
            "lags": lags,
            "grants": grants,
            "offsets": np.arange(offsets[-1], dtype=np.int32) - offsets[:-1][grants],
            "ends": offsets[1:] - 1,
            "is_late": is_late,
            "kv_indptr": pages.kv_indptr,
            "page_shifts": rows * np.int32(tables.pages_per_row) - pages.kv_indptr[:-1],
            "last_page_len": pages.last_page_len,
            "kv_lens": kv_lens,
            "qo_indptr": offsets,
            "qo_indptr_1": offsets_of(ones),
            "mask_offsets": masks[0].offsets,
            "mask_offsets_1": masks[1].offsets,
            "sampling": sampling.flat(),
            **(divided[0].words() if divided else {}),
        }
        first, later = request.slot.drafting(self._device, windows=self.windows)
        host, step = first.upload(words)
        indices = request.pages_of(step["kv_indptr"], step["page_shifts"], int(pages.kv_indptr[-1]))
        lengths = own_lengths = request.lengths
        own_rows = request.rows
        if divided:
            own_lengths = of_own(lengths, step["own"], 1)
            own_rows = of_own(own_rows, step["own"], tables.max_rows)
        begins = own_lengths - step["lags"]
        positions = (begins.index_select(0, step["grants"]) + step["offsets"]).clamp_(min=0)
        sources = own_rows.index_select(0, step["grants"]) * tables.tokens_per_row + positions
        tokens = request.tokens.view(-1).index_select(0, sources)
        every = torch.arange(len(counts), dtype=torch.int32, device=lengths.device)
        drafts: list[Tensor] = []
        for depth in range(request.num_drafts):
            is_first = depth == 0
            suffix = "" if is_first else "_1"
            if not is_first:
                # A row with fewer drafts computes its last slot repeatedly; that draft is not used.
                positions = torch.minimum(own_lengths - 1 + depth, step["kv_lens"] - 1)
                tokens = of_own(drafts[-1], step["own"], 0) if divided else drafts[-1]
            where = Places(
                grants=step["grants"] if is_first else every,
                positions=positions,
                kv_indptr=step["kv_indptr"],
                kv_indices=indices,
                last_page_len=step["last_page_len"],
            )
            shape = masks[0] if is_first else masks[1]
            packed = packed_masks(
                positions, step[f"qo_indptr{suffix}"], step["kv_lens"], step[f"mask_offsets{suffix}"],
                self._attention.mask_windows,
                num_bytes=int(shape.offsets[-1]), rows_per_byte=shape.rows_per_byte,
            )  # fmt: skip
            if depth < 2:  # later passes differ only in their masks
                arrays = HostArrays(
                    is_decode=False, qo_indptr=host[f"qo_indptr{suffix}"], kv_indptr=host["kv_indptr"],
                    last_page_len=host["last_page_len"], kv_lens=host["kv_lens"],
                )  # fmt: skip
                planned = self._attention.plan_verify(arrays, where, packed, (first if is_first else later).plans)
            else:
                planned = self._attention.replan_masks(where, packed)
            wanted = step["ends"] if is_first else every
            rotations, division = [(positions, table) for table in self._rotations], None
            if divided:
                division = divided[min(depth, 1)].rows
                tokens = division.gather_numbers(tokens)
            states, _ = self._model.states(tokens, rotations, planned, wanted, division=division)
            logits = self._model.head(states.index_select(0, step["gathered"]) if divided else states)
            sampler = Sampler.of(sampling, step["sampling"], lengths + depth)
            drafts.append(sampler.tokens(self._filters, logits)[0].int())
        found = torch.where(step["is_late"] > 0, 0, request.num_drafts)
        return torch.stack(drafts, 1), found.int()

    def _spans(self, request: DraftRequest) -> tuple[Int32, Int32]:
        """Return for each row the tokens from the start of the pass to its end, and the tokens to compute, `[D]`
        each."""
        rows = request.host_rows
        lags = np.where(self._lags[rows] > 0, self._lags[rows], request.host_starts + 1 - self._done[rows])
        lags = np.maximum(lags, 1).astype(np.int32)
        counts = np.minimum(lags, self._max_rebuilt)
        self._lags[rows] = np.where(lags > self._max_rebuilt, lags - counts + 1, 2)
        return lags, counts.astype(np.int32)
