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
from numpy.typing import NDArray

from pagewood.engine.arrays import Int32
from pagewood.engine.batch import Batch
from pagewood.engine.models.decoder import Decoder
from pagewood.engine.runner.attention_cpu import CPUAttention
from pagewood.engine.runner.compiled.kernel import Kernel
from pagewood.engine.runner.compiled.sampling import NUM_CHOICE_COLUMNS
from pagewood.engine.runner.sampling import choices_of, draw
from pagewood.engine.runner.tape import Buffer, Program, Rows, Tape
from pagewood.kvpool.storage import KVStorage

Float32 = NDArray[np.float32]


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

    The model is written down on a tape once, for steps of up to so many tokens; a step only fills in its numbers.

    Invariant: everything of a step happens on the worker, in the order of the launches, so a step may read tokens that
    the one before it samples.
    """

    __slots__ = (
        "_attention", "_cosines", "_kernel", "_model", "_num_threads", "_page_table", "_program", "_sines", "_tokens",
        "_worker",
    )  # fmt: skip

    def __init__(
        self,
        model: Decoder[Buffer],
        storage: KVStorage,
        kernel: Kernel,
        *,
        max_rows: int,
        max_length: int,
        num_threads: int,
    ) -> None:
        """Allocate the tables and start the worker.

        Args:
            model: what to compute.
            storage: its KV memory, in a layout of order HND.
            kernel: of the model's head_dim, compiled.
            max_rows: requests that can hold a row at the same time.
            max_length: longest sequence of a row.
            num_threads: that compute, the worker included.
        """
        config, page_size = model.config, storage.layout.page_size
        self._model = model
        self._kernel = kernel
        self._num_threads = min(num_threads, numba.get_num_threads())
        self._tokens: Int32 = np.zeros((max_rows, max_length + 1), np.int32)  # written by: the worker
        num_pages = -(-(max_length + 1) // page_size)
        self._page_table: Int32 = np.zeros((max_rows, num_pages), np.int32)  # written by: the worker
        self._attention = CPUAttention(storage, self._page_table, num_heads=config.num_heads, windows=config.windows)
        self._cosines: Float32 = np.empty((0, config.head_dim // 2), np.float32)  # written by: the worker
        self._sines: Float32 = self._cosines  # written by: the worker
        self._program = self._write_down(1, 1)  # written by: the worker
        self._worker = ThreadPoolExecutor(1, "runner", _set_threads, (self._num_threads,))

    def launch(self, batch: Batch) -> StepHandle:
        """Queue a step and return at once."""
        return StepHandle(self._worker.submit(self._step, batch))

    def forward(self, batch: Batch) -> Float32:
        """Compute a step without sampling; return the logits `[T, V]` of all its tokens, when it is done."""
        return self._worker.submit(self._all_logits, batch).result()

    def close(self) -> None:
        """Finish what has been launched and end the worker; a second call does nothing."""
        self._worker.shutdown()

    def _step(self, batch: Batch) -> Int32:
        ends = batch.starts[batch.sampled] + batch.counts[batch.sampled]
        last = np.cumsum(batch.counts, dtype=np.int32)[batch.sampled] - 1
        _, tokens = self._compute(batch, last, choices_of(batch, ends))
        if (tokens < 0).any():
            raise ValueError("logits must be numbers, got NaN")
        self._tokens[batch.rows[batch.sampled], ends] = tokens
        return tokens.copy()

    def _all_logits(self, batch: Batch) -> Float32:
        wanted = np.arange(batch.num_tokens, dtype=np.int32)
        logits, _ = self._compute(batch, wanted, np.zeros((len(wanted), NUM_CHOICE_COLUMNS), np.float32))
        return logits.copy()

    def _compute(self, batch: Batch, wanted: Int32, choices: Float32) -> tuple[Float32, Int32]:
        """Compute a step.

        Args:
            batch: what to compute.
            wanted: `[W]` tokens of the step whose logits are wanted.
            choices: `[W, NUM_CHOICE_COLUMNS]`, how to draw the token that follows each.

        Returns:
            `[W, V]` logits and `[W]` tokens, which the next step overwrites.

        Raises:
            IndexError: a token is not in the vocabulary.
        """
        self._page_table[batch.page_rows, batch.page_columns] = batch.page_ids
        self._tokens[batch.token_rows, batch.token_positions] = batch.token_ids
        rows, starts, counts = batch.rows.copy(), batch.starts.copy(), batch.counts.copy()
        positions = np.arange(counts.sum(), dtype=np.int32)
        positions += np.repeat(starts - (np.cumsum(counts) - counts).astype(np.int32), counts)
        tokens = self._tokens[np.repeat(rows, counts), positions]
        vocab_size = self._model.config.vocab_size
        if not 0 <= tokens.min() <= tokens.max() < vocab_size:
            raise IndexError(f"tokens must be in [0, {vocab_size}), got {tokens.tolist()}")
        sizes = (len(positions), len(wanted))
        if any(size > most for size, most in zip(sizes, self._program.capacity, strict=True)):
            self._program = self._write_down(*(max(pair) for pair in zip(sizes, self._program.capacity, strict=True)))
        inputs = (tokens[:, None], *self._rotations(positions), wanted[:, None], choices)
        for target, source in zip(self._program.inputs, inputs, strict=True):
            target.view(source.dtype)[: len(source)] = source
        self._program.run(sizes, self._attention.plan(rows, starts, counts), num_threads=self._num_threads)
        logits, drawn = self._program.outputs
        return logits[: len(wanted)], drawn.view(np.int32)[: len(wanted), 0]

    def _write_down(self, num_tokens: int, num_wanted: int) -> Program:
        """Return the model as a program for steps of up to so many tokens, rounded up to a power of two."""
        tape, half = Tape(), self._model.config.head_dim // 2
        tokens, wanted = tape.buffer(Rows.TOKENS, 1), tape.buffer(Rows.WANTED, 1)
        cosines, sines = tape.buffer(Rows.TOKENS, half), tape.buffer(Rows.TOKENS, half)
        choices = tape.buffer(Rows.WANTED, NUM_CHOICE_COLUMNS)
        logits = self._model(tokens, (cosines, sines), self._attention, wanted)
        drawn = draw(logits, choices)
        capacity = tuple(1 << (size - 1).bit_length() for size in (max(num_tokens, 1), max(num_wanted, 1)))
        inputs = (tokens, cosines, sines, wanted, choices)
        return tape.program(self._kernel, capacity, inputs=inputs, outputs=(logits, drawn))

    def _rotations(self, positions: Int32) -> tuple[Float32, Float32]:
        """Return the cosines and sines of positions, from a table that grows to the furthest position seen."""
        end = int(positions.max()) + 1
        if end > len(self._cosines):
            with torch.inference_mode():
                cosines, sines = self._model.rope(torch.arange(1 << (end - 1).bit_length()))
            self._cosines, self._sines = cosines.numpy(), sines.numpy()
        return self._cosines[positions], self._sines[positions]


def _set_threads(num_threads: int) -> None:
    """Let the calling thread's compiled loops use `num_threads`, a number that numba keeps per thread.

    torch gets one: what it is left with is small, and a second pool of threads would wait for work on the same cores.
    """
    torch.set_num_threads(1)
    numba.set_num_threads(num_threads)
