"""The runner of a CUDA device: `launch` queues a step, and `wait` on its handle returns its tokens.

Legend: T tokens of a step, G grants, S sampled grants, V vocab_size.
"""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagewood.engine.api import Progress
from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.core.messages.batch import Batch
from pagewood.engine.core.messages.result import StepResult
from pagewood.engine.models.decoder import Decoder
from pagewood.engine.models.rope import PositionTable, long_shift, values_by_place
from pagewood.engine.runner.cuda.adapters import CUDAAdapters
from pagewood.engine.runner.cuda.attention import (
    AttentionPlanner,
    HostArrays,
    Places,
)
from pagewood.engine.runner.cuda.device import Device, Event
from pagewood.engine.runner.cuda.division import DividedRows, OwnSampled, RequestDivision
from pagewood.engine.runner.cuda.drafts.ahead import HeldDrafts
from pagewood.engine.runner.cuda.drafts.masks import packed_masks
from pagewood.engine.runner.cuda.drafts.verify import (
    Drafter,
    DraftRequest,
    ExactPlaces,
    Extension,
    HeadDrafter,
    InexactRows,
    ToldDrafts,
    Yielded,
    count_accepted,
    exact_places,
    masked_positions,
    num_mask_bytes,
    result_size,
)
from pagewood.engine.runner.cuda.drafts.verify_arrays import VerifyArrays, VerifyStep, verify_step
from pagewood.engine.runner.cuda.drafts.verify_graphs import VerifyGraphs, capture_verify_graphs
from pagewood.engine.runner.cuda.drafts.verify_part import VerifyPart
from pagewood.engine.runner.cuda.drawing.adjust import RowAdjustments, forbid
from pagewood.engine.runner.cuda.drawing.report import PendingReport, RowReports
from pagewood.engine.runner.cuda.drawing.sampler import Sampler, is_broken, marked
from pagewood.engine.runner.cuda.expected import Elsewhere, Expected, OneEach
from pagewood.engine.runner.cuda.graphs import DecodeGraphs, capture_graphs
from pagewood.engine.runner.cuda.images import CUDAImages, ShownImages, StepImages
from pagewood.engine.runner.cuda.inner_rows import InnerReports
from pagewood.engine.runner.cuda.kernels.flashinfer_api import FlashInfer
from pagewood.engine.runner.cuda.latent_attention import AnyAttention, attention_over
from pagewood.engine.runner.cuda.pool import PendingSums, queue_sums
from pagewood.engine.runner.cuda.stage_relay import StageRelay
from pagewood.engine.runner.cuda.staging import StagingPool, StagingSlot, read
from pagewood.engine.runner.cuda.state_memory import CUDARecurrence, CUDAStates, exact_saves
from pagewood.engine.runner.cuda.step_arrays import StepArrays, TableShape, step_arrays
from pagewood.engine.runner.processors import Process, RowProcessors, processed
from pagewood.engine.runner.reported_places import has_rows
from pagewood.engine.runner.storage import AnyStorage
from pagewood.kvpool import LayerGroups
from pagewood.kvpool.memory import PageMemory

WITNESS_WORDS = 8
"""Words of what a rank says of a step beside its tokens."""


class CUDAStepHandle:
    """A launched step."""

    __slots__ = (
        "_constrained", "_draw", "_drawn", "_error", "_pool", "_result", "_settle", "_slot", "_told", "passed", "tables"
    )  # fmt: skip

    def __init__(
        self,
        pool: StagingPool,
        slot: StagingSlot,
        draw: Callable[[Int32 | None], tuple[Event, Expected]],
        settle: Callable[[StepResult], None],
        constrained: Int32,
        told: ToldDrafts | None,
    ) -> None:
        """Expect a result in `slot`.

        Args:
            pool: of the slot.
            slot: memory of the step.
            draw: called with the masks or None; queues the draws, and returns an event for the arrival of the result,
                and its layout.
            settle: called with the result.
            constrained: sampled grants that wait for masks.
            told: their drafts; None: no such grant has drafts.
        """
        self._constrained = constrained
        self._told = told
        self._pool = pool
        self._slot = slot
        self._draw = draw
        self._settle = settle
        self._drawn: tuple[Event, Expected] | None = None  # written by: draw
        self._error: Exception | None = None  # written by: constrain
        self._result: StepResult | None = None  # written by: wait
        self.tables = np.empty(0, np.int32)
        """[4], sums of the pages and of the tokens that a step of a rank has read, 64 bits each; see `_witnessed`."""
        # written by: wait
        self.passed = np.zeros(2, np.int64)
        """[2], sums of the bits of what a stage has sent, and of what it has received."""  # written by: wait

    @property
    def read(self) -> int:
        """The sum of the tokens that the step has read, if it says `tables`."""
        return int(np.array(self.tables[2:], np.int32).view(np.int64)[0]) if len(self.tables) else 0

    def drafts(self) -> Sequence[Sequence[int]]:
        """Wait for the drafts of the grants that wait for masks, and return them."""
        if self._told is None:
            return [()] * len(self._constrained)
        drafts = self._told.by_grant()
        return [drafts.get(grant, ()) for grant in self._constrained.tolist()]

    def draw(self, masks: Int32 | None) -> None:
        """Queue the draws; called once."""
        self._drawn = self._draw(masks)

    def constrain(self, masks: Int32) -> None:
        """Queue the draws; an error is raised by `wait`.

        Args:
            masks: `[>= grants and drafts, words of a mask]`: for each grant one, and one for each of its drafts.
        """
        try:
            self.draw(masks)
        except Exception as error:
            self._error = error

    def wait(self) -> StepResult:
        """Wait for the tokens of the sampled grants, and return them.

        Raises:
            Exception: the draws could not be queued.
            RuntimeError: the draws wait for masks.
        """
        if self._error is not None:
            raise self._error
        if self._drawn is None:
            raise RuntimeError("constrain must be called first for a step with constrained tokens")
        if self._result is None:
            done, expected = self._drawn
            done.synchronize()
            words = read(self._slot.on_host_result, expected.size)
            self._result = expected.result(words)
            if expected.witness is not None:
                witness = words[expected.tokens.size :][:WITNESS_WORDS]
                self.tables, passed = np.split(witness, 2)
                self.passed = np.array(passed, np.int32).view(np.int64)
            self._settle(self._result)
            self._pool.give_back(self._slot)
        return self._result


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """What differs in a runner whose model is divided among ranks."""

    witness_every: int
    """Steps after which it says what it has read of the tables."""
    num_in_flight: int
    """The most steps that are in flight when another one is launched."""


class StatesModel(Protocol):
    """What a runner computes: a `Decoder` over tensors, or a model that is called like it."""

    @property
    def ropes(self) -> Sequence[PositionTable]:
        """The tables of positions that it needs."""
        ...

    @property
    def short_length(self) -> int | None:
        """The longest request that has the first of two sets of factors in them; None: there is one set."""
        ...

    def states(
        self,
        tokens: Tensor,
        rotations: Sequence[tuple[Tensor, Tensor]],
        attention: Any,
        wanted: Tensor,
        *,
        captured: Sequence[int] = (),
    ) -> tuple[Tensor, list[Tensor]]:
        """Compute a step up to the input of the output projection; see `Decoder.states`."""
        ...

    @property
    def head(self) -> Callable[[Tensor], Tensor]:
        """Returns the logits `[T, V]` of states `[T, E]` after the last norm."""
        ...


class CUDARunner:
    """Queues batches on one stream, and owns the KV memory, the token table and the page table.

    Invariant: all work of all steps is queued on one stream in the order of the launches, so a step can read tokens
    that the step before it samples. `launch` does not wait for the device unless it fails.

    A step that verifies drafts, or that follows one whose result the host does not know, computes on the device where
    its rows begin (`verify`). All other steps are computed as without drafts.
    """

    __slots__ = (
        "_adapters", "_adjustments", "_attention", "_device", "_division", "_drafter", "_feature_memory", "_features",
        "_filters", "_graphs", "_head", "_held", "_images", "_inexact", "_inner", "_learned", "_lengths",
        "_mask_windows", "_max_drafts", "_model", "_num_launched", "_page_table", "_planned", "_processors", "_ranked",
        "_relay", "_reports", "_rotations", "_shifts", "_staging", "_storage", "_tables", "_tokens", "_verify_graphs",
        "recurrent",
    )  # fmt: skip

    def __init__(
        self,
        model: StatesModel,
        storage: AnyStorage,
        flashinfer: FlashInfer | None,
        device: Device,
        *,
        max_rows: int,
        max_length: int,
        attention: AttentionPlanner | None = None,
        dtype: str | None = None,
        batch_invariant: bool = False,
        graph_sizes: Sequence[int] = (),
        drafter: Drafter | None = None,
        max_drafts: int = 0,
        drafts_ahead: bool = False,
        processors: Mapping[str, Process] | None = None,
        groups: LayerGroups | None = None,
        num_drafted_pages: int | None = None,
        ranked: Ranked | None = None,
        relay: StageRelay | None = None,
        division: RequestDivision | None = None,
        adapters: CUDAAdapters | None = None,
        states: PageMemory | None = None,
        images: CUDAImages | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Allocate the tables and capture the graphs.

        Args:
            model: to compute, on `device`.
            storage: its KV memory, heads in the order NHD; the runner uses the last page itself.
            flashinfer: the module, or a stand-in; None: tokens are drawn by torch alone, and `attention` is given.
            device: where to compute.
            max_rows: requests that can hold a row at the same time.
            max_length: longest sequence of a row.
            attention: over `storage`, for a model that calls it in a way of its own, without graphs; None:
                FlashInfer's, for a `Decoder`.
            dtype: of activations; None: that of the KV memory.
            batch_invariant: whether the logits of a token must not depend on the batch, see `invariance`; the
                projections of `model` must not depend on it either.
            graph_sizes: grants of the decode steps to capture; larger steps are computed without a graph.
            drafter: proposes the tokens that steps verify; None: no grant may promise more than one token.
            max_drafts: the most draft tokens of a grant; steps that verify have graphs for this many.
            drafts_ahead: whether the head of the last stage drafts at the end of a step for the next one of its rows,
                see `drafts.ahead`; it is then the `drafter` there, and other stages have none.
            processors: functions that requests name to change their logits; None: there are none.
            groups: of the layers, which share `storage`; None: all layers are one group.
            num_drafted_pages: pages of the drafter's memory, if batches announce pages; the runner uses the last one
                itself. None: it has the page ids of the first group, or no memory.
            ranked: what differs if the model is divided among ranks; None: it is whole.
            relay: of `model`, which is a stage of several; None: it has all layers.
            division: of the requests among ranks, each of which has pages of its own; None: this one has all, or its
                part of all.
            adapters: of the model's projections; None: there are none.
            states: the memory of the states of recurrent layers; the runner uses the last place itself. None: no layer
                is recurrent.
            images: of the rows, for a whole model; None: it takes none.
            progress: gets a report of every graph.

        Raises:
            ValueError: the tables have more places than 31 bits can address.
        """
        page_size = storage.layout.page_size
        pages_per_row = -(-(max_length + 1) // page_size)
        windows = (None,) if groups is None else groups.windows
        self._tables = TableShape(
            max_rows=max_rows,
            tokens_per_row=max_length + 1,
            pages_per_row=pages_per_row,
            page_size=page_size,
            windows=windows,
            long_shift=long_shift(model.short_length),
            has_pages=num_drafted_pages is not None,
            num_states=0 if states is None else states.num_pages,
        )
        if (max_rows + 1) * (max_length + 1) >= 1 << 31:
            raise ValueError(f"max_rows * max_length must be < 2**31, got {max_rows} * {max_length}")
        dtype = dtype or storage.layout.dtype
        self._model = model
        self._storage = storage
        self._filters = None if batch_invariant else flashinfer
        self._adapters = adapters
        self._images = images
        self._device = device
        options = {"dtype": torch.int32, "device": device.torch_device}
        with torch.inference_mode():
            self._tokens = torch.zeros((max_rows + 1) * (max_length + 1), **options)
            """[places] token ids; contents written by: launch"""
            num_places = self._tables.num_tables * self._tables.pages_per_group
            self._page_table = torch.full((num_places,), storage.num_pages - 1, **options)
            """[places] page ids, the tables of all groups; contents written by: launch"""
            if num_drafted_pages is not None:
                self._page_table[-self._tables.pages_per_group :] = num_drafted_pages - 1
            num_rotations = self._tables.long_shift + max_length + 1
            values = values_by_place(
                model.ropes, num_rotations, short_length=model.short_length, device=device.torch_device
            )
            self._rotations = [torch.cat(pair, -1) for pair in values]
            """[places, head_dim] float32 for each rope, the table of `CUDAOps`."""
            has_shifts = model.short_length is not None or (images is not None and images.shift_positions)
            self._shifts = torch.zeros(max_rows + 1, **options) if has_shifts else None
            """[rows], how far the place of a position is behind it; None: never. Contents written by: launch"""
            self._head = drafter if isinstance(drafter, HeadDrafter) else None
            self._held = HeldDrafts(max_rows) if drafts_ahead else None
            """What the last stage has drafted; None: drafts are made in the step that verifies them."""
            self._drafter = drafter if self._held is None else self._held
            self._max_drafts = max_drafts
            self._features: Tensor | None = None  # written by: runner
            """[T, E], features of the latest step, for the head."""
            largest = max(graph_sizes, default=0) * (1 + max_drafts) if self._head else 0
            size = self._head.feature_size if self._head else 1
            self._feature_memory = torch.zeros(largest, size, dtype=getattr(torch, dtype), device=device.torch_device)
            """[largest T of a graph, E], where graphs leave the features; contents written by: launch"""
            self._adjustments = RowAdjustments(
                max_rows=max_rows, tokens_per_row=max_length + 1, device=device.torch_device
            )
            self._processors = RowProcessors(processors, max_rows=max_rows)
            self._reports = RowReports(device, max_rows=max_rows)
            self._inner = InnerReports(device, model, self._head.captured if self._head else (), division)
            self._inexact = InexactRows(max_rows, num_in_flight=None if ranked is None else ranked.num_in_flight)
            self._ranked = ranked
            self._relay = relay
            self._division = division
            self._num_launched = 0  # written by: _launch
            self._learned: deque[tuple[Int32, Int32]] = deque()
            """Places in the token table, and tokens and drafts of the last stage for them, which the next launch writes
            there."""
            # contents written by: learn, _with_learned
            self._lengths = torch.ones(max_rows + 1, **options)
            """[rows] known tokens of rows that may be inexact; contents written by: launch"""
            self._graphs, self._verify_graphs = DecodeGraphs({}), VerifyGraphs({})  # written by: _capture, drop_graphs
            layers = (
                [] if attention is not None else [one.mixer for one in cast("Decoder[Tensor]", model).config.layers]
            )
            drafts = None if self._drafter is None else max_drafts
            self.recurrent = (
                None if states is None else CUDAStates(states, layers, self._tables, graph_sizes, max_drafts=drafts)
            )
            """What recurrent layers keep of requests; None: no layer is recurrent."""
            planned = None
            if attention is None:
                assert flashinfer is not None
                attention = planned = attention_over(
                    flashinfer, storage, layers, dtype=dtype, max_length=max_length, batch_invariant=batch_invariant,
                    verifies=self._drafter is not None or (images is not None and images.see_each_other), groups=groups,
                )  # fmt: skip
            self._attention: AttentionPlanner = attention
            self._mask_windows = sorted({*attention.mask_windows, *(self._head.mask_windows if self._head else ())})
            self._staging = StagingPool(
                device,
                windows=attention.windows,
                result_size=result_size(max_rows, 1 + max_drafts, ahead=drafts_ahead) + WITNESS_WORDS,
            )
            self._planned: tuple[AnyAttention, Sequence[int], Sequence[int]] | None = None
            """What graphs are captured of; None: there are none."""
            if planned is not None:
                verifies_in_graphs = drafter is not None and relay is None and division is None
                self._planned = planned, graph_sizes, (1 + max_drafts,) if verifies_in_graphs else ()
                self._capture(*self._planned, progress)

    def _capture(
        self,
        attention: AnyAttention,
        sizes: Sequence[int],
        widths: Sequence[int],
        progress: Progress | None,
    ) -> None:
        """Capture the graphs of decode steps, and of steps that verify if there are `widths`."""
        device, tables = self._device, self._tables
        slot = self._staging.take()
        device.finish()
        if self._adapters is not None:
            self._adapters.is_used = True
        with device.computing():
            if self.recurrent is not None:
                self.recurrent.clear_graph()
            self._graphs = capture_graphs(
                sizes,
                attention,
                self._forward_in_graph,
                device=device,
                padding_source=tables.max_rows * tables.tokens_per_row,
                padding_page=self._storage.num_pages - 1,
                pages_per_row=tables.pages_per_row,
                num_groups=len(tables.windows),
                num_ranks=1 if self._division is None else self._division.count,
                staging=slot.plans,
                progress=progress,
            )
            self._verify_graphs = capture_verify_graphs(
                sizes if widths else (),
                widths,
                attention,
                partial(self._forward_in_graph, width=max(widths, default=1)),
                device=device,
                padding_source=tables.max_rows * tables.tokens_per_row,
                padding_page=self._storage.num_pages - 1,
                pages_per_row=tables.pages_per_row,
                page_size=tables.page_size,
                num_groups=len(tables.windows),
                staging=slot.plans,
                progress=progress,
            )
        device.finish()
        self._staging.give_back(slot)

    def launch(self, batch: Batch) -> CUDAStepHandle:
        """Queue a step and return at once.

        Raises:
            Exception: the step could not be queued; the part that was queued is finished.
        """
        with torch.inference_mode(), self._device.computing():
            return self._launch(batch)

    def forward(self, batch: Batch) -> Tensor:
        """Compute a step without sampling, wait for it, and return the logits `[T, V]` of all its tokens."""
        with torch.inference_mode(), self._device.computing():
            slot = self._staging.take()
            num_empty = self._attention.num_empty_grants(batch.num_tokens, len(batch.rows))
            if self._adapters is not None:
                self._adapters.admit(batch)
            arrays = step_arrays(batch, self._tables, num_empty=num_empty, all_wanted=True)
            images = None if self._images is None else self._images.of_step(batch)
            host, step, extra = _upload(slot, arrays, images)
            indices, shown = self._update(host, step), self._shown(images, extra)
            states = self._states(host, step, indices, slot, is_decode=False, images=shown)
            logits = self._model.head(states)
        self._device.finish()
        self._staging.give_back(slot)
        return logits

    def close(self) -> None:
        """Wait for all launched steps, and drop the graphs, which keep this runner and its memory alive."""
        self.drop_graphs()

    def drop_graphs(self) -> None:
        """Wait for all launched steps, and compute without graphs; the memory of the model may then move."""
        self._device.finish()
        self._graphs, self._verify_graphs = DecodeGraphs({}), VerifyGraphs({})

    def capture_graphs(self) -> None:
        """Capture the graphs again that it began with."""
        if self._planned is not None:
            with torch.inference_mode():
                self._capture(*self._planned, None)

    def learn(self, batch: Batch, result: StepResult) -> None:
        """Take over the tokens of a step that the last stage has drawn, unless this is the last stage, and its drafts.

        The next launch writes them. Called from one thread, while another one may launch steps without these rows.
        """
        counts = result.counts
        width = np.int32(self._tables.tokens_per_row)
        if self._held is not None and result.ahead is not None:
            is_known = counts > 0
            rows, ends = batch.rows[batch.sampled], (first_yielded(batch) + counts).astype(np.int32)
            where, drafts = self._held.hold(rows[is_known], ends[is_known], result.ahead[is_known])
            self._learned.append((where[:, 0] * width + where[:, 1], drafts))
        if self._relay is None or self._relay.is_last:
            return
        self._clean(batch, result)
        places = batch.rows[batch.sampled] * width + first_yielded(batch)
        steps = np.arange(len(result.tokens), dtype=np.int32) - np.repeat(np.cumsum(counts) - counts, counts)
        self._learned.append((np.repeat(places, counts) + steps.astype(np.int32), result.tokens))

    def _with_learned(self, batch: Batch) -> Batch:
        """Return a batch that also writes the tokens that were learned; what it says itself of a place holds."""
        width = np.int32(self._tables.tokens_per_row)
        said = batch.token_rows * width + batch.token_positions
        while self._learned:
            places, tokens = self._learned.popleft()
            is_new = ~np.isin(places, said)
            batch = replace(
                batch,
                token_rows=np.concatenate([batch.token_rows, places[is_new] // width]),
                token_positions=np.concatenate([batch.token_positions, places[is_new] % width]),
                token_ids=np.concatenate([batch.token_ids, tokens[is_new]]),
            )
        return batch

    def _launch(self, batch: Batch) -> CUDAStepHandle:
        slot = self._staging.take()
        self._num_launched += 1
        batch = self._with_learned(batch) if self._learned else batch
        batch = batch if self._division is None else self._division.note(batch)
        self._inexact.admit(batch)
        self._adjustments.admit(batch)
        self._processors.admit(batch)
        self._reports.admit(batch)
        if self._adapters is not None:
            self._adapters.admit(batch)
        if self._drafter is not None:
            self._drafter.note(batch)
        try:
            draw, told = self._queue(batch, slot)
            launch = self._inexact.mark(batch)
            handle = CUDAStepHandle(
                self._staging,
                slot,
                partial(self._finish, draw, slot),
                partial(self._settle, launch, batch),
                batch.constrained,
                told,
            )
            if not len(batch.constrained):
                handle.draw(None)
        except Exception:
            self._device.finish()  # work that is queued already may read the slot
            self._staging.give_back(slot)
            raise
        return handle

    def _finish(
        self, draw: Callable[[Int32 | None], Expected], slot: StagingSlot, masks: Int32 | None
    ) -> tuple[Event, Expected]:
        """Queue the draws of a step and the copy of its result; return an event after the copy, and the layout."""
        with torch.inference_mode(), self._device.computing():
            expected = draw(masks)
            size = expected.size
            if more := expected.more:
                slot.result[expected.tokens.size : size].copy_(torch.cat(more))
            return self._device.download(slot.result[:size], slot.on_host_result[:size]), expected

    def _settle(self, launch: int, batch: Batch, result: StepResult) -> None:
        """Note that the host knows the result of a step."""
        self._inexact.settle(launch)
        if self._is_last:
            self._clean(batch, result)

    def _clean(self, batch: Batch, result: StepResult) -> None:
        """Clear the KV of grants whose logits are not numbers.

        A mask hides a position by a weight of zero, and zero times NaN is NaN. So a page must not keep a NaN. This work
        is queued before the page is given to another request. Steps that verify store finite numbers only, because a
        rejected position may be read by the next step.
        """
        if self._drafter is None or (result.counts.all() and result.vectors is None):
            return
        broken = batch.sampled[result.counts == 0]
        if result.vectors is not None:
            broken = np.append(broken, batch.pooled[~np.isfinite(result.vectors).all(axis=1), 0])
        if self._division is not None:
            broken = broken[self._division.is_own(batch.rows[broken])]
        ends = -(-(batch.starts + batch.counts)[broken] // self._tables.page_size)
        with torch.inference_mode(), self._device.computing():
            places = [
                (group * self._tables.pages_per_group + row * self._tables.pages_per_row, end)
                for row, end in zip(batch.rows[broken].tolist(), ends.tolist(), strict=True)
                for group in range(len(self._tables.windows))
            ]
            for first, end in places:
                pages = self._page_table[first : first + end].long()
                for layer in range(self._storage.layout.num_layers):
                    memory = self._storage.layer(layer)
                    clean = memory.index_select(0, pages).float().nan_to_num(0.0, 0.0, 0.0)
                    memory.index_copy_(0, pages, clean.to(memory.dtype))

    def _queue(self, batch: Batch, slot: StagingSlot) -> tuple[Callable[[Int32 | None], Expected], ToldDrafts | None]:
        """Queue a step up to its logits; return a function that queues the rest, given masks or None, and the
        drafts."""
        is_inexact = self._inexact.of(batch)
        if is_inexact.any() or (batch.num_promised > 1).any():
            return self._queue_verify(batch, is_inexact, slot)
        return self._queue_plain(batch, slot), None

    def _queue_plain(self, batch: Batch, slot: StagingSlot) -> Callable[[Int32 | None], Expected]:
        """Queue a step without drafts, of rows whose start the host knows."""
        num_grants, division = len(batch.rows), self._division
        is_decode = batch.num_tokens == num_grants and not len(batch.scored) and not len(batch.pooled)
        sums, inner, rows = None, None, None
        own = batch if division is None else division.own(batch)
        extended: OwnSampled | None = None
        images = None if self._images is None else self._images.of_step(batch)
        if is_decode and not has_rows(batch) and not (images is not None and images.is_shown):
            size = self._graphs.size_for(num_grants if division is None else division.most_grants(batch))
        else:
            size = None
        if size is None:
            num_empty = self._attention.num_empty_grants(max(1, own.num_tokens), max(1, len(own.rows)))
            if division is None:
                arrays = step_arrays(batch, self._tables, num_empty=num_empty)
            else:
                arrays, rows = division.arrays(batch, self._tables, num_empty=num_empty)
                if self._head is not None:
                    extended = division.sampled(batch, rows)
            host, step, extra = _upload(slot, arrays, extended or images)
            indices, shown = self._update(host, step), self._shown(images, extra)
            with self._inner.keeping(batch, step.sources) as chosen:
                states = self._states(host, step, indices, slot, is_decode=is_decode, division=rows, images=shown)
            if not self._is_last:
                return self._drawn_elsewhere(batch, self._witnessed(partial(self._rows_of, step), step.sources))
            logits, sums = self._logits(states, batch, step)
            inner = self._inner.queue(batch, states, chosen, arrays.gathered)
        else:
            if division is None:
                arrays = step_arrays(batch, self._tables, num_padding=size - num_grants)
            else:
                arrays, rows = division.arrays(batch, self._tables, size=size)
                if self._head is not None:
                    extended = division.sampled(batch, rows)
            host, step, extra = _upload(slot, arrays, extended or images)
            indices, _ = self._update(host, step), self._shown(images, extra)
            graph = self._graphs.of(size)
            arrays, frames = _host_arrays(host, is_decode=True), indices[: len(self._tables.windows)]
            if self._relay is not None:
                self._relay.fill_graph(size)
            if self.recurrent is not None:
                self.recurrent.fill_graph(step.states, step.state_saves)
            logits = graph.launch(arrays, step.sources, step.positions, frames, slot.plans)
            if self._relay is not None:
                self._relay.send_graph(size)
            if not self._is_last:
                return self._drawn_elsewhere(batch, self._witnessed(partial(self._rows_of, step), step.sources))
            if division is not None:
                logits = logits.index_select(0, step.gathered)
            elif num_grants == len(batch.sampled):
                logits = logits[:num_grants]
            else:
                logits = logits.index_select(0, step.wanted)
            self._features = self._feature_memory[:size]
        scored = self._report_prompts(batch, step.scored, step.sources, logits)
        witness = self._witnessed(partial(self._rows_of, step), step.sources)

        def draw(masks: Int32 | None) -> Expected:
            drawn = None
            if len(batch.sampled):
                target = slot.result[: len(batch.sampled)]
                drawn = self._sample(batch, step, logits[: len(batch.sampled)], masks, target)
            if self._head is not None:
                self._extend_plain(host, step, indices, slot, extended, extra, is_decode=is_decode)
            ahead = self._draft_ahead(batch, self._rows_of(step), step.drawn_positions + 1, slot)
            tokens = OneEach(size=len(batch.sampled))
            return Expected(
                tokens=tokens, drawn=drawn, scored=scored, sums=sums, inner=inner, witness=witness, ahead=ahead
            )

        return draw

    @property
    def _is_last(self) -> bool:
        """Whether this has the output projection."""
        return self._relay is None or self._relay.is_last

    def _rows_of(self, step: StepArrays[Tensor]) -> Tensor:
        """Return the rows of the sampled grants, `[S] int64`."""
        return step.targets.view(torch.int64) // self._tables.tokens_per_row

    def _drawn_elsewhere(self, batch: Batch, witness: Tensor | None) -> Callable[[Int32 | None], Expected]:
        """Return what queues nothing, and expects nothing but what this stage has read and passed on."""

        def draw(masks: Int32 | None) -> Expected:
            return Expected(tokens=Elsewhere(num=len(batch.sampled)), witness=witness)

        return draw

    def _witnessed(self, rows: Callable[[], Tensor], sources: Tensor) -> Tensor | None:
        """Queue what the other ranks compare; None: there are none, or they compare nothing of this step.

        Args:
            rows: returns the rows of the sampled grants, `[S]`.
            sources: of the step.

        Returns:
            `[4] int64`, sums of the page tables of these rows and of the tokens that the step reads, both 0 but in each
            step whose number `Ranked.witness_every` divides, or in all where stages draft; and of the bits of what a
            stage has sent and received.
        """
        if self._ranked is None:
            return None
        has_drafts = self._relay is not None and self._drafter is not None  # each stage makes its own
        says_tables = has_drafts or self._num_launched % self._ranked.witness_every == 0
        if self._relay is None and not says_tables:
            return None
        where = self._device.torch_device
        read = torch.zeros(2, dtype=torch.int64, device=where)
        if says_tables:
            tokens = self._tokens.index_select(0, sources).long() * (sources + 1)
            tables = self._page_table.view(self._tables.num_tables, -1, self._tables.pages_per_row)
            read = torch.stack([tables.index_select(1, rows()).sum(dtype=torch.int64), tokens.sum()])
        passed = torch.zeros_like(read) if self._relay is None else self._relay.take_sums(where)
        return torch.cat([read, passed])

    def _queue_verify(
        self, batch: Batch, is_inexact: NDArray[np.bool_], slot: StagingSlot
    ) -> tuple[Callable[[Int32 | None], Expected], ToldDrafts | None]:
        """Queue a step that computes from the exact end of its rows, and verifies its own drafts."""
        shape = None
        images = None if self._images is None else self._images.of_step(batch)
        is_even = len(batch.sampled) == len(batch.rows) and (batch.counts == batch.num_promised).all()
        if is_even and not has_rows(batch) and not (images is not None and images.is_shown):
            shape = self._verify_graphs.shape_for(len(batch.rows), int(batch.counts.max()))
        if shape is None:
            num_empty = self._attention.num_empty_grants(batch.num_tokens, len(batch.rows))
        else:
            num_empty = self._verify_graphs.of(shape).num_empty
        verify = verify_step(batch, self._tables, is_inexact=is_inexact, graph=shape, num_empty=num_empty)
        verify = verify if self._held is None else self._held.limited(batch, verify)
        part = None if self._division is None else self._part(batch, self._division)
        more = part or images
        pinned, on_device = slot.upload(verify.arrays.words() | (more.words() if more else {}))
        host, step = VerifyArrays.of_words(pinned), VerifyArrays.of_words(on_device)
        self._apply_updates(step)
        shown = self._shown(images, on_device)
        where = exact_places(step, self._lengths, self._tables.tokens_per_row)
        own_host, own, own_verify, own_where = host, step, verify, where
        if part is not None:
            own_host, own = part.of_words(pinned), part.of_words(on_device)
            own_verify, own_where = part.verify, exact_places(own, self._lengths, self._tables.tokens_per_row)
        indices = self._indices(own_host, own, own_where.starts)
        stamps = [self._device.stamp()]
        num_drafted = self._draft(batch, verify, step, where, slot)
        told = self._tell(verify, step, where, num_drafted, slot)
        stamps.append(self._device.stamp())
        places = Places(
            grants=own.token_grants,
            positions=own_where.positions,
            kv_indptr=own.kv_indptr,
            kv_indices=indices[0],
            more_indices=indices[1 : len(self._tables.windows)],
            last_page_len=own.last_page_len,
            is_finite=(own.is_draft > 0)[:, None],
        )
        masks = packed_masks(
            own_where.positions, own.qo_indptr, own.kv_lens, own.mask_offsets, self._mask_windows,
            num_bytes=num_mask_bytes(own_verify), rows_per_byte=own_verify.mask.rows_per_byte,
            last_seen=None if shown is None else shown.last_seen(where.positions),
        )  # fmt: skip
        arrays, sources = _host_arrays(own_host, is_decode=False), own_where.sources
        if part is not None:
            sources = part.rows.gather_numbers(sources)

        def rows_of() -> Tensor:
            return step.rows.index_select(0, step.token_grants.index_select(0, step.first_tokens))

        if shape is None:
            planned = self._attention.plan_verify(arrays, places, masks, slot.plans)
            wanted, rows = (_wanted(step), None) if part is None else (part.wanted(own), part.rows)
            recurrence = None if self.recurrent is None else self.recurrent.of_verify(own_host, own, own_where)
            gathered = on_device.get("gathered")  # None without a division
            with self._inner.keeping(batch, sources) as chosen:
                states = self._last_states(
                    sources, own_where.positions, planned, wanted, rows, gathered, recurrence=recurrence, images=shown
                )
            if not self._is_last:
                return self._drawn_elsewhere(batch, self._witnessed(rows_of, where.sources)), told
            logits, sums = self._logits(states, batch, step)
            inner = self._inner.queue(batch, states, chosen, None if part is None else part.gathered)
        else:
            sums = inner = None
            if self.recurrent is not None:
                self.recurrent.fill_graph(step.states, exact_saves(step, where))
            logits = self._verify_graphs.of(shape).launch(arrays, where.sources, places, masks, slot.plans)
            logits = logits.index_select(0, step.wanted)
            self._features = self._feature_memory[: shape[0] * shape[1]]
        scored = self._report_prompts(batch, step.scored, where.sources, logits)
        witness = self._witnessed(rows_of, where.sources)

        def draw(allowed: Int32 | None) -> Expected:
            last, rows, drawn = step.wanted, where.positions[:0].long(), None
            if len(batch.sampled):
                verified = logits[: len(step.wanted)]
                last, rows, drawn = self._accept(
                    batch, verify, step, where, num_drafted, verified, allowed, told, slot.result
                )
            stamps.append(self._device.stamp())
            if self._head is not None:
                assert self._features is not None
                following = self._tokens.index_select(0, sources + 1)
                own_rows, division = rows, None
                if part is not None:
                    division = part.extended.rows
                    last, own_rows = part.last(own, last - step.first_tokens, rows, on_device)
                self._head.extend(
                    Extension(
                        host=arrays, places=self._drafted(places, indices), masks=masks, tokens=following,
                        features=self._features, wanted=last, rows=own_rows, slot=slot, division=division,
                    )
                )  # fmt: skip
            ahead = self._draft_ahead(batch, rows, self._lengths.index_select(0, rows), slot)
            stamps.append(self._device.stamp())
            tokens = Yielded(promised=batch.num_promised, stamps=stamps)
            return Expected(
                tokens=tokens, drawn=drawn, scored=scored, sums=sums, inner=inner, witness=witness, ahead=ahead
            )

        return draw, told

    def _part(self, batch: Batch, division: RequestDivision) -> VerifyPart:
        """Return this rank's part of a step that verifies."""
        own = division.verified(batch, self._tables)
        num_empty = self._attention.num_empty_grants(own.batch.num_tokens, len(own.batch.rows))
        is_inexact = self._inexact.of(own.batch)
        return VerifyPart(
            verify=verify_step(own.batch, self._tables, is_inexact=is_inexact, num_empty=num_empty),
            num_verified=int(own.batch.num_promised.sum()),
            gathered=own.gathered,
            rows=own.rows,
            extended=division.sampled(batch, own.rows),
        )

    def _report_prompts(self, batch: Batch, scored: Tensor, sources: Tensor, logits: Tensor) -> PendingReport | None:
        """Queue the reports of prompt tokens, whose `logits` are the last ones."""
        if not len(batch.scored):
            return None
        tokens = self._tokens.index_select(0, sources.index_select(0, scored) + 1)
        return self._reports.scored(batch.scored, tokens, logits[-len(scored) :])

    def _draft(
        self, batch: Batch, verify: VerifyStep, step: VerifyArrays[Tensor], where: ExactPlaces, slot: StagingSlot
    ) -> Tensor:
        """Write drafts to the token table; return the number of each sampled grant, `[S] int32`."""
        num_drafted = torch.zeros(len(step.first_tokens), dtype=torch.int32, device=self._device.torch_device)
        if not len(step.drafting):
            return num_drafted
        if self._drafter is None:
            raise ValueError("num_promised must be 1 for a runner without a drafter")
        drafting = verify.arrays.drafting
        grants = batch.sampled[drafting]
        firsts = step.first_tokens.index_select(0, step.drafting)
        drafts, found = self._drafter.draft(
            DraftRequest(
                tokens=self._tokens.view(-1, self._tables.tokens_per_row),
                page_table=self._drafted_pages,
                rows=step.rows.index_select(0, step.token_grants.index_select(0, firsts)),
                lengths=where.positions.index_select(0, firsts) + 1,
                num_drafts=verify.width - 1,
                longest=verify.longest,
                host_rows=batch.rows[grants],
                host_starts=batch.starts[grants],
                kv_lens=batch.starts[grants] + batch.counts[grants],
                sampling=batch.sampling.take(drafting),
                tables=self._tables,
                slot=slot,
                division=self._division,
            )
        )
        places = where.sources.index_select(0, step.draft_tokens).long()
        self._tokens.index_copy_(0, places, drafts.flatten().index_select(0, step.draft_cells))
        return num_drafted.index_copy_(0, step.drafting.long(), torch.minimum(found, step.most_drafts))

    @property
    def _drafted_pages(self) -> Tensor:
        """The page table of the drafter."""
        return self._page_table[-self._tables.pages_per_group :] if self._tables.has_pages else self._page_table

    def _draft_ahead(self, batch: Batch, rows: Tensor, lengths: Tensor, slot: StagingSlot) -> Tensor | None:
        """Queue drafts for the next step of the sampled grants; see `StepResult.ahead`.

        Args:
            batch: of the step, whose tokens are in the table.
            rows: `[S]`, of the sampled grants.
            lengths: `[S] int32`, known tokens of these rows now.
            slot: of the step.
        """
        if self._held is None or self._head is None or not batch.is_followed or not len(batch.sampled):
            return None
        tables, ends = self._tables, (batch.starts + batch.counts)[batch.sampled]
        drafts, found = self._head.draft(
            DraftRequest(
                tokens=self._tokens.view(-1, tables.tokens_per_row),
                page_table=self._drafted_pages,
                rows=rows.int(),
                lengths=lengths,
                num_drafts=self._max_drafts,
                longest=int(ends.max()) + 1 + self._max_drafts,
                host_rows=batch.rows[batch.sampled],
                host_starts=ends,
                kv_lens=ends + -ends % np.int32(tables.page_size),
                sampling=batch.sampling,
                tables=tables,
                slot=slot,
                spare_page=self._storage.num_pages - 1,
            )
        )
        most = torch.minimum(found, tables.tokens_per_row - lengths)
        steps = torch.arange(self._max_drafts, dtype=torch.int32, device=drafts.device)
        return torch.where(steps < most[:, None], drafts, -1)

    def _tell(
        self,
        verify: VerifyStep,
        step: VerifyArrays[Tensor],
        where: ExactPlaces,
        num_drafted: Tensor,
        slot: StagingSlot,
    ) -> ToldDrafts | None:
        """Queue a copy of the drafts for which the host must make masks; None: there are no such drafts."""
        if not len(step.told):
            return None
        drafts = self._tokens.index_select(0, where.sources.index_select(0, step.told_tokens))
        words = torch.cat([num_drafted.index_select(0, step.told), drafts])
        on_host = slot.on_host_told(len(words))
        done = self._device.download(words, on_host)
        return ToldDrafts(done, on_host, grants=verify.arrays.told, size=verify.width - 1)

    def _accept(
        self,
        batch: Batch,
        verify: VerifyStep,
        step: VerifyArrays[Tensor],
        where: ExactPlaces,
        num_drafted: Tensor,
        logits: Tensor,
        allowed: Int32 | None,
        told: ToldDrafts | None,
        target: Tensor,
    ) -> tuple[Tensor, Tensor, PendingReport | None]:
        """Draw at every verified position, and write the tokens, the new lengths of the rows, and the result.

        Returns:
            `[S] int32`, the token at the last accepted position of each sampled grant; `[S] int64`, its row; and the
            reports of the drawn tokens.
        """
        positions = where.positions.index_select(0, step.wanted) + 1
        sampler = Sampler.of(batch.sampling, step.sampling, positions)
        places = where.sources.index_select(0, step.wanted).long() + 1
        host = verify.arrays
        host_rows = host.rows[host.token_grants[host.wanted]]
        changed = self._adjustments.apply(logits, host_rows, places, self._tokens)
        if allowed is not None:
            masked = masked_positions(batch, told)
            changed = forbid(changed, masked, allowed[: len(masked)])
        # Only the device knows where the text of a verified position ends, so a step with such rows waits for it.
        changed = self._process(changed, host_rows, places.tolist)
        chosen, largest = sampler.tokens(self._filters, changed)
        tokens = chosen.int()
        drawn = self._reports.drawn(
            host_rows, tokens, raw=logits, changed=changed, sampler=sampler, filters=self._filters
        )
        is_equal = self._tokens.index_select(0, places) == tokens
        counts = count_accepted(is_equal, is_broken(largest), step.cells, num_drafted, verify.width)
        # The table gets tokens beyond the accepted ones, too; no step reads them before they are replaced.
        self._tokens.index_copy_(0, places, tokens)
        rows = step.rows.index_select(0, step.token_grants.index_select(0, step.first_tokens)).long()
        ends = where.positions.index_select(0, step.first_tokens) + 1
        yielded = counts.clamp(min=1)
        self._lengths.index_copy_(0, rows, ends + yielded)
        torch.cat([marked(tokens, largest), counts, num_drafted], out=target[: len(tokens) + 2 * len(counts)])
        return step.first_tokens + yielded - 1, rows, drawn

    def _sample(
        self, batch: Batch, step: StepArrays[Tensor], logits: Tensor, allowed: Int32 | None, target: Tensor
    ) -> PendingReport | None:
        """Draw the token of each sampled grant; return the reports of these tokens."""
        sampler = Sampler.of(batch.sampling, step.sampling, step.drawn_positions)
        places = step.targets.view(torch.int64)
        rows = batch.rows[batch.sampled]
        changed = self._adjustments.apply(logits, rows, places, self._tokens)
        if allowed is not None:
            changed = forbid(changed, batch.constrained.astype(np.int64), allowed[: len(batch.constrained)])
        changed = self._process(changed, rows, partial(self._ends, batch))
        chosen, largest = sampler.tokens(self._filters, changed)
        tokens = chosen.int()
        # The table needs a valid token for every row: the next step may have been launched already, and reads it.
        self._tokens.index_copy_(0, places, tokens)
        target.copy_(marked(tokens, largest))
        return self._reports.drawn(rows, tokens, raw=logits, changed=changed, sampler=sampler, filters=self._filters)

    def _process(self, logits: Tensor, rows: Int32, places: Callable[[], list[int]]) -> Tensor:
        """Return the logits after the processors of some rows have changed them.

        Args:
            logits: `[N, V]`.
            rows: `[N]`, row of each.
            places: returns the places in the token table for the drawn tokens, where its texts end; may wait.
        """
        calls = self._processors.of(rows)
        if not calls:
            return logits
        ends, width = places(), self._tables.tokens_per_row
        return processed(logits, calls, lambda index: self._tokens[ends[index] // width * width : ends[index]].clone())

    def _ends(self, batch: Batch) -> list[int]:
        """Return the places in the token table for the drawn tokens of a plain step."""
        places = batch.rows.astype(np.int64) * self._tables.tokens_per_row + batch.starts + batch.counts
        return places[batch.sampled].tolist()

    def _extend_plain(
        self,
        host: StepArrays[Tensor],
        step: StepArrays[Tensor],
        indices: tuple[Tensor, ...],
        slot: StagingSlot,
        extended: OwnSampled | None,
        extra: Mapping[str, Tensor],
        *,
        is_decode: bool,
    ) -> None:
        """Queue the head's part of a step without drafts; `extended` and its arrays are this rank's part of it."""
        assert self._head is not None
        assert self._features is not None
        wanted, rows = step.wanted, self._rows_of(step)
        if extended is not None:
            wanted, rows = extra["own_wanted"], rows.index_select(0, extra["own_sampled"])
        self._head.extend(
            Extension(
                host=_host_arrays(host, is_decode=is_decode),
                places=self._drafted(_places(step, indices), indices),
                masks=None,
                tokens=self._tokens.index_select(0, step.sources + 1),
                features=self._features,
                wanted=wanted,
                rows=rows,
                slot=slot,
                division=None if extended is None else extended.rows,
            )
        )

    def _logits(
        self, states: Tensor, batch: Batch, step: StepArrays[Tensor] | VerifyArrays[Tensor]
    ) -> tuple[Tensor, PendingSums | None]:
        """Queue the logits of tokens from the last `states` of `_wanted`, and the sums of those that are pooled."""
        num_logits = len(states) - len(step.pooled)
        sums = queue_sums(self._device, batch.pooled, states[num_logits:])
        return self._model.head(states[:num_logits]), sums

    def _shown(self, images: StepImages | None, words: Mapping[str, Tensor]) -> ShownImages | None:
        """Queue what images change on the device; return those of the step, if it shows any."""
        if self._images is None or images is None:
            return None
        return self._images.on_device(images, words, self._shifts)

    def _states(
        self,
        host: StepArrays[Tensor],
        step: StepArrays[Tensor],
        indices: tuple[Tensor, ...],
        slot: StagingSlot,
        *,
        is_decode: bool,
        division: DividedRows | None = None,
        images: ShownImages | None = None,
    ) -> Tensor:
        """Queue a step without a graph; return the last states of the tokens of `_wanted`."""
        places = _places(step, indices[: len(self._tables.windows)])
        masks = None if images is None else images.masks(host, step, self._mask_windows)
        if masks is None:
            planned = self._attention.plan(_host_arrays(host, is_decode=is_decode), places, slot.plans)
        else:
            planned = self._attention.plan_verify(_host_arrays(host, is_decode=False), places, masks, slot.plans)
        recurrence = None
        if self.recurrent is not None:
            sources = step.sources if division is None else division.own(step.sources)
            recurrence = self.recurrent.of_step(host, step, sources)
        wanted, gathered = (_wanted(step), None) if division is None else (step.wanted, step.gathered)
        return self._last_states(
            step.sources, step.positions, planned, wanted, division, gathered, recurrence=recurrence, images=images
        )

    def _update(self, host: StepArrays[Tensor], step: StepArrays[Tensor]) -> tuple[Tensor, ...]:
        """Queue the updates of a step without drafts, and return the page ids of all grants; see `_indices`."""
        self._apply_updates(step)
        firsts = step.qo_indptr[:-1].clamp(max=len(step.positions) - 1)  # an empty grant has no pages either
        return self._indices(host, step, step.positions.index_select(0, firsts))

    def _apply_updates(self, step: StepArrays[Tensor] | VerifyArrays[Tensor]) -> None:
        """Queue what the batch changes in the tables."""
        if len(step.adapter_slots) and self._adapters is not None:
            self._adapters.note_rows(step.adapted_rows.view(torch.int64), step.adapter_slots, step.adapter_starts)
        if len(step.shifts) and self._shifts is not None:
            self._shifts.index_copy_(0, step.shifted_rows.view(torch.int64), step.shifts)
        if len(step.page_ids):
            self._page_table.index_copy_(0, step.page_places.view(torch.int64), step.page_ids)
        if len(step.token_ids):
            self._tokens.index_copy_(0, step.token_places.view(torch.int64), step.token_ids)

    def _indices(
        self,
        host: StepArrays[Tensor] | VerifyArrays[Tensor],
        step: StepArrays[Tensor] | VerifyArrays[Tensor],
        starts: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return the page ids of all grants in each group of layers, and those of pages, `[pages of the step]` each.

        Those behind a window, whose memory may have another owner by now, are the padding page: kernels read them too
        and multiply by zero, so they must be numbers. `starts` `[G]` are the first positions of the grants with pages.
        """
        num_pages = int(host.kv_indptr.numpy()[-1])
        pages = torch.arange(num_pages, dtype=torch.int32, device=self._device.torch_device)
        grants = torch.searchsorted(step.kv_indptr[1:], pages, right=True, out_int32=True)
        places = step.page_shifts.index_select(0, grants).add_(pages)
        found: list[Tensor] = []
        for group, window in enumerate(self._tables.windows):
            indices = self._page_table.index_select(0, places + group * self._tables.pages_per_group)
            if window is not None:
                behind = (starts + (1 - window)).clamp_(min=0).div(self._tables.page_size, rounding_mode="floor")
                columns = pages - step.kv_indptr.index_select(0, grants)
                is_behind = columns < behind.index_select(0, grants)
                indices = torch.where(is_behind, self._storage.num_pages - 1, indices)
            found.append(indices)
        if self._tables.has_pages:
            found.append(self._page_table.index_select(0, places + len(found) * self._tables.pages_per_group))
        return tuple(found)

    def _drafted(self, places: Places, indices: tuple[Tensor, ...]) -> Places:
        """Return the places of a step's tokens in the memory of the head."""
        if not self._tables.has_pages:
            return places
        return replace(places, kv_indices=indices[-1], more_indices=())

    def _last_states(
        self,
        sources: Tensor,
        positions: Tensor,
        attention: Any,
        wanted: Tensor,
        division: DividedRows | None = None,
        gathered: Tensor | None = None,
        *,
        recurrence: CUDARecurrence | None = None,
        images: ShownImages | None = None,
    ) -> Tensor:
        """Queue the model; return the states of the wanted tokens after the last norm, or what a stage has sent.

        With `division`, `sources` are those of all ranks, and so is the result, or its rows at `gathered`; all other
        arguments are of this one.
        """
        captured = () if self._head is None else self._head.captured
        places = positions
        if self._adapters is not None:
            self._adapters.begin(sources, self._tables.tokens_per_row, division)
        if self._shifts is not None:
            own = sources if division is None else division.own(sources)
            rows = torch.div(own, self._tables.tokens_per_row, rounding_mode="floor")
            places = positions + self._shifts.index_select(0, rows)
        rotations = [(images and images.rotation(table, positions)) or (places, table) for table in self._rotations]
        parts = {"division": division, "recurrence": recurrence, "visual": images}
        more: dict[str, Any] = {name: part for name, part in parts.items() if part is not None}
        last, states = self._model.states(
            self._tokens.index_select(0, sources), rotations, attention, wanted, captured=captured, **more
        )
        if self._head is not None:
            self._features = self._head.features(states)
        if gathered is None:
            return last
        if self._adapters is not None:
            self._adapters.pick(gathered)
        return last.index_select(0, gathered)

    def _forward_in_graph(
        self, sources: Tensor, positions: Tensor, attention: Any, wanted: Tensor, *, width: int = 1
    ) -> Tensor:
        rows = None if self._division is None else self._division.of_graph(len(positions))
        own = sources if rows is None else rows.own(sources)
        recurrence = None if self.recurrent is None else self.recurrent.of_graph(own, width=width)
        with nullcontext() if self._relay is None else self._relay.in_graph():
            states = self._last_states(sources, positions, attention, wanted, rows, recurrence=recurrence)
        if not self._is_last:
            return states
        logits = self._model.head(states)
        if self._features is not None:
            self._feature_memory[: len(self._features)].copy_(self._features)
        return logits


def first_yielded(batch: Batch) -> Int32:
    """Return the position of the first token that each sampled grant yields, `[S]`, of rows whose start is exact."""
    return (batch.starts + batch.counts)[batch.sampled] - batch.num_promised + 1


def _upload(
    slot: StagingSlot, arrays: StepArrays[Int32], more: OwnSampled | StepImages | None = None
) -> tuple[StepArrays[Tensor], StepArrays[Tensor], Mapping[str, Tensor]]:
    """Queue the copy of the arrays of a step; return them in pinned memory and on the device, and all of the latter."""
    pinned, on_device = slot.upload(arrays.words() | ({} if more is None else more.words()))
    return StepArrays.of_words(pinned), StepArrays.of_words(on_device), on_device


def _wanted(step: StepArrays[Tensor] | VerifyArrays[Tensor]) -> Tensor:
    """Return the tokens whose last states are needed: first those whose logits are needed."""
    if not len(step.scored) and not len(step.pooled):
        return step.wanted
    return torch.cat([step.wanted, step.scored, step.pooled])


def _places(step: StepArrays[Tensor], indices: tuple[Tensor, ...]) -> Places:
    return Places(
        grants=step.grants,
        positions=step.positions,
        kv_indptr=step.kv_indptr,
        kv_indices=indices[0],
        more_indices=indices[1:],
        last_page_len=step.last_page_len,
    )


def _host_arrays(host: StepArrays[Tensor] | VerifyArrays[Tensor], *, is_decode: bool) -> HostArrays:
    return HostArrays(
        is_decode=is_decode,
        qo_indptr=host.qo_indptr,
        kv_indptr=host.kv_indptr,
        last_page_len=host.last_page_len,
        kv_lens=host.kv_lens,
    )
