"""The runner of a CPU: one worker thread computes batches in the order in which they are launched.

Legend: T tokens of a step, G grants, S sampled grants, V vocab_size.
"""

# pyright: basic
# torch and numba are typed in part only.

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import numba
import numpy as np
import torch
from torch import Tensor

from pagewood.engine.arrays import Int32
from pagewood.engine.batch import Batch
from pagewood.engine.models.decoder import Decoder
from pagewood.engine.runner.attention_cpu import CPUAttention
from pagewood.engine.runner.compiled.attention import AttentionKernels
from pagewood.engine.runner.sampling import sample
from pagewood.kvpool.storage import KVStorage


class StepHandle:
    """The result of a step that has been launched."""

    __slots__ = ("_tokens",)

    def __init__(self, tokens: Future[Int32]) -> None:
        self._tokens = tokens

    def wait(self) -> Int32:
        """Return the sampled tokens `[S] int32`, in the order of `batch.sampled`; waits until the step is computed.

        Raises:
            Exception: what went wrong in the step.
        """
        return self._tokens.result()


class CPURunner:
    """Computes batches on a worker thread, and owns the KV memory, the token table and the page table.

    Invariant: everything of a step happens on the worker, in the order of the launches, so a step may read tokens that
    the one before it samples.
    """

    __slots__ = ("_attention", "_model", "_page_table", "_tokens", "_worker")

    def __init__(
        self,
        model: Decoder,
        storage: KVStorage,
        kernels: AttentionKernels,
        *,
        max_rows: int,
        max_length: int,
        num_threads: int,
    ) -> None:
        """Allocate the tables and start the worker.

        Args:
            model: computes the steps.
            storage: its KV memory, in a layout of order HND.
            kernels: of the model's head_dim, compiled.
            max_rows: requests that can hold a row at the same time.
            max_length: longest sequence of a row.
            num_threads: that compute, the worker included.
        """
        config, page_size = model.config, storage.layout.page_size
        self._model = model
        self._tokens: Int32 = np.zeros((max_rows, max_length + 1), np.int32)  # written by: the worker
        num_pages = -(-(max_length + 1) // page_size)
        self._page_table: Int32 = np.zeros((max_rows, num_pages), np.int32)  # written by: the worker
        self._attention = CPUAttention(
            storage,
            self._page_table,
            kernels,
            num_heads=config.num_heads,
            windows=config.windows,
            num_threads=num_threads,
        )
        self._worker = ThreadPoolExecutor(1, "runner", _set_threads, (num_threads,))

    def launch(self, batch: Batch) -> StepHandle:
        """Queue a step and return at once."""
        return StepHandle(self._worker.submit(self._step, batch))

    def forward(self, batch: Batch) -> Tensor:
        """Compute a step without sampling; return the logits `[T, V] float32` of all its tokens, when it is done."""
        return self._worker.submit(self._all_logits, batch).result()

    def close(self) -> None:
        """Finish what has been launched and end the worker; a second call does nothing."""
        self._worker.shutdown()

    def _step(self, batch: Batch) -> Int32:
        with torch.inference_mode():
            last = np.cumsum(batch.counts)[batch.sampled] - 1
            hidden = self._hidden(batch, torch.from_numpy(last))
            if not len(batch.sampled):
                return np.empty(0, np.int32)
            ends = batch.starts[batch.sampled] + batch.counts[batch.sampled]
            tokens = sample(self._model.logits(hidden), batch, ends)
        self._tokens[batch.rows[batch.sampled], ends] = tokens
        return tokens

    def _all_logits(self, batch: Batch) -> Tensor:
        with torch.inference_mode():
            return self._model.logits(self._hidden(batch, None))

    def _hidden(self, batch: Batch, wanted: Tensor | None) -> Tensor:
        self._page_table[batch.page_rows, batch.page_columns] = batch.page_ids
        self._tokens[batch.token_rows, batch.token_positions] = batch.token_ids
        rows, starts, counts = batch.rows.copy(), batch.starts.copy(), batch.counts.copy()
        self._attention.plan(rows, starts, counts)
        positions = np.arange(counts.sum(), dtype=np.int32)
        positions += np.repeat(starts - (np.cumsum(counts) - counts).astype(np.int32), counts)
        tokens = self._tokens[np.repeat(rows, counts), positions]
        return self._model(torch.from_numpy(tokens), torch.from_numpy(positions), self._attention, wanted=wanted)


def _set_threads(num_threads: int) -> None:
    """Let the calling thread's compiled loops use `num_threads`, a number that numba keeps per thread.

    torch gets one: what it is left with is small, and a second pool of threads would wait for work on the same cores.
    The threads of the pool spin for a while between two loops, and should: to wake one that sleeps was measured to
    cost 60 microseconds, five times a layer (so do not set OMP_WAIT_POLICY=passive).
    """
    torch.set_num_threads(1)
    numba.set_num_threads(min(num_threads, numba.get_num_threads()))  # at first it is the most that there can be
