"""The runner of a CUDA device: `launch` queues a step, and `wait` on its handle returns its tokens.

Legend: T tokens of a step, G grants, S sampled grants, V vocab_size.
"""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pagewood.engine.api import Progress
from pagewood.engine.core.batch import Batch
from pagewood.engine.core.result import StepResult
from pagewood.engine.models.decoder import Decoder
from pagewood.engine.runner.cuda.attention import (
    AttentionShape,
    FlashInferAttention,
    HostArrays,
    Places,
    PlannedAttention,
)
from pagewood.engine.runner.cuda.device import Device, Event
from pagewood.engine.runner.cuda.flashinfer_api import FlashInfer
from pagewood.engine.runner.cuda.graphs import capture_graphs
from pagewood.engine.runner.cuda.sampling import Sampler
from pagewood.engine.runner.cuda.staging import StagingPool, StagingSlot, read
from pagewood.engine.runner.cuda.step_arrays import StepArrays, TableShape, step_arrays
from pagewood.kvpool.storage import KVStorage

NO_TOKEN = -1
"""Stands for the token of a row whose logits are not numbers, see `StepResult.of_one_each`."""


class CUDAStepHandle:
    """A launched step."""

    __slots__ = ("_count", "_done", "_pool", "_result", "_slot")

    def __init__(self, pool: StagingPool, slot: StagingSlot, done: Event, count: int) -> None:
        self._pool = pool
        self._slot = slot
        self._done = done
        self._count = count
        self._result: StepResult | None = None  # written by: wait

    def wait(self) -> StepResult:
        """Wait for the tokens, one for each sampled grant, and return them."""
        if self._result is None:
            self._done.synchronize()
            self._result = StepResult.of_one_each(read(self._slot.on_host_tokens, self._count))
            self._pool.give_back(self._slot)
        return self._result


class CUDARunner:
    """Queues batches on one stream, and owns the KV memory, the token table and the page table.

    Invariant: all work of all steps is queued on one stream in the order of the launches, so a step can read tokens
    that the step before it samples. `launch` does not wait for the device unless it fails.
    """

    __slots__ = (
        "_attention", "_device", "_filters", "_graphs", "_model", "_page_table", "_rotations", "_staging", "_tables",
        "_tokens",
    )  # fmt: skip

    def __init__(
        self,
        model: Decoder[Tensor],
        storage: KVStorage,
        flashinfer: FlashInfer,
        device: Device,
        *,
        max_rows: int,
        max_length: int,
        dtype: str | None = None,
        batch_invariant: bool = False,
        graph_sizes: Sequence[int] = (),
        progress: Progress | None = None,
    ) -> None:
        """Allocate the tables and capture the graphs.

        Args:
            model: to compute, on `device`.
            storage: its KV memory, in a layout of order NHD; the runner uses the last page itself.
            flashinfer: the module, or a stand-in.
            device: where to compute.
            max_rows: requests that can hold a row at the same time.
            max_length: longest sequence of a row.
            dtype: of activations; None: that of the KV memory.
            batch_invariant: whether the logits of a token must not depend on the batch, see `invariance`; the
                projections of `model` must not depend on it either.
            graph_sizes: grants of the decode steps to capture; larger steps are computed without a graph.
            progress: gets a report of every graph.

        Raises:
            ValueError: the tables have more places than 31 bits can address.
        """
        config, page_size = model.config, storage.layout.page_size
        pages_per_row = -(-(max_length + 1) // page_size)
        self._tables = TableShape(
            max_rows=max_rows, tokens_per_row=max_length + 1, pages_per_row=pages_per_row, page_size=page_size
        )
        if (max_rows + 1) * (max_length + 1) >= 1 << 31:
            raise ValueError(f"max_rows * max_length must be < 2**31, got {max_rows} * {max_length}")
        self._model = model
        self._filters = None if batch_invariant else flashinfer
        self._device = device
        options = {"dtype": torch.int32, "device": device.torch_device}
        with torch.inference_mode():
            self._tokens = torch.zeros((max_rows + 1) * (max_length + 1), **options)
            """[places] token ids; contents written by: launch"""
            self._page_table = torch.full(((max_rows + 1) * pages_per_row,), storage.num_pages - 1, **options)
            """[places] page ids; contents written by: launch"""
            points = torch.arange(max_length + 1, device=device.torch_device)
            self._rotations = torch.cat(model.rope(points), -1)
            """[max_length + 1, head_dim] float32, the table of `CUDAOps`."""
            dtype = dtype or storage.layout.dtype
            shape = AttentionShape(num_heads=config.num_heads, windows=config.windows, dtype=dtype)
            self._attention = FlashInferAttention(flashinfer, storage, shape, batch_invariant=batch_invariant)
            self._staging = StagingPool(device, windows=shape.all_windows_left, max_rows=max_rows)
            slot = self._staging.take()
            device.finish()
            with device.computing():
                self._graphs = capture_graphs(
                    graph_sizes,
                    self._attention,
                    self._forward,
                    device=device,
                    padding_source=max_rows * (max_length + 1),
                    padding_page=storage.num_pages - 1,
                    pages_per_row=pages_per_row,
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
            arrays = step_arrays(batch, self._tables, num_empty=num_empty, all_wanted=True)
            host, step = slot.upload(arrays)
            logits = self._logits(host, step, slot, is_decode=False)
        self._device.finish()
        self._staging.give_back(slot)
        return logits

    def close(self) -> None:
        """Wait for all launched steps."""
        self._device.finish()

    def _launch(self, batch: Batch) -> CUDAStepHandle:
        slot = self._staging.take()
        try:
            self._queue(batch, slot)
        except Exception:
            self._device.finish()  # work that is queued already may read the slot
            self._staging.give_back(slot)
            raise
        count = len(batch.sampled)
        done = self._device.download(slot.tokens[:count], slot.on_host_tokens[:count])
        return CUDAStepHandle(self._staging, slot, done, count)

    def _queue(self, batch: Batch, slot: StagingSlot) -> None:
        """Queue a step, up to the tokens on the device."""
        num_grants = len(batch.rows)
        is_decode = batch.num_tokens == num_grants
        size = self._graphs.size_for(num_grants) if is_decode else None
        if size is None:
            num_empty = self._attention.num_empty_grants(batch.num_tokens, num_grants)
            host, step = slot.upload(step_arrays(batch, self._tables, num_empty=num_empty))
            logits = self._logits(host, step, slot, is_decode=is_decode)
        else:
            host, step = slot.upload(step_arrays(batch, self._tables, num_padding=size - num_grants))
            indices = self._apply_updates(host, step)
            graph = self._graphs.of(size)
            logits = graph.launch(_host_arrays(host, is_decode=True), step.sources, step.positions, indices, slot.plans)
            logits = logits[:num_grants] if num_grants == len(batch.sampled) else logits.index_select(0, step.wanted)
        if len(batch.sampled):
            self._sample(batch, step, logits, slot.tokens[: len(batch.sampled)])

    def _sample(self, batch: Batch, step: StepArrays[Tensor], logits: Tensor, target: Tensor) -> None:
        sampler = Sampler.of(batch.sampling, step)
        chosen, is_broken = sampler.tokens(self._filters, logits)
        tokens = chosen.int()
        # The table needs a valid token for every row: the next step may have been launched already, and reads it.
        self._tokens.index_copy_(0, step.targets.view(torch.int64), tokens)
        target.copy_(torch.where(is_broken, NO_TOKEN, tokens))

    def _logits(
        self, host: StepArrays[Tensor], step: StepArrays[Tensor], slot: StagingSlot, *, is_decode: bool
    ) -> Tensor:
        """Queue a step without a graph; return the logits of the wanted tokens."""
        places = Places(
            grants=step.grants,
            positions=step.positions,
            kv_indptr=step.kv_indptr,
            kv_indices=self._apply_updates(host, step),
            last_page_len=step.last_page_len,
        )
        planned = self._attention.plan(_host_arrays(host, is_decode=is_decode), places, slot.plans)
        return self._forward(step.sources, step.positions, planned, step.wanted)

    def _apply_updates(self, host: StepArrays[Tensor], step: StepArrays[Tensor]) -> Tensor:
        """Queue the page and token updates of the batch; return the page ids of all grants, `[pages of the step]`."""
        if len(step.page_ids):
            self._page_table.index_copy_(0, step.page_places.view(torch.int64), step.page_ids)
        if len(step.token_ids):
            self._tokens.index_copy_(0, step.token_places.view(torch.int64), step.token_ids)
        num_pages = int(host.kv_indptr.numpy()[-1])
        pages = torch.arange(num_pages, dtype=torch.int32, device=self._device.torch_device)
        grants = torch.searchsorted(step.kv_indptr[1:], pages, right=True, out_int32=True)
        return self._page_table.index_select(0, step.page_shifts.index_select(0, grants).add_(pages))

    def _forward(self, sources: Tensor, positions: Tensor, attention: PlannedAttention, wanted: Tensor) -> Tensor:
        tokens = self._tokens.index_select(0, sources)
        return self._model(tokens, (positions, self._rotations), attention, wanted)


def _host_arrays(host: StepArrays[Tensor], *, is_decode: bool) -> HostArrays:
    return HostArrays(
        is_decode=is_decode,
        qo_indptr=host.qo_indptr,
        kv_indptr=host.kv_indptr,
        last_page_len=host.last_page_len,
        kv_lens=host.kv_lens,
    )
