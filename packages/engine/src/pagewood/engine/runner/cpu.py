"""The runner of a CPU: one worker thread computes batches in the order in which they are launched.

Legend: T tokens of a step, G grants, S sampled grants, V vocab_size.
"""

# pyright: basic
# torch and numba are typed in part only.

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

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
from pagewood.engine.runner.tape import Buffer, Program, Rows, StepTables, Tape
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """A batch, made ready for the worker."""

    batch: Batch
    token_rows: Int32
    """[T] row of each token."""
    positions: Int32
    """[T] where it stands in its row."""
    inputs: tuple[NDArray[np.generic], ...]
    """What the program is given besides the tokens: cosines, sines, wanted tokens, choices."""
    tables: StepTables


class CPURunner:
    """Computes batches on a worker thread, and owns the KV memory, the token table and the page table.

    The model is written down on a tape once, for steps of up to so many tokens; a step only fills in its numbers.

    Invariant: what a step computes and keeps happens on the worker, in the order of the launches, so a step may read
    tokens that the one before it samples. Call it from one thread.
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
        self._cosines: Float32 = np.empty((0, config.head_dim // 2), np.float32)  # written by: the caller
        self._sines: Float32 = self._cosines  # written by: the caller
        self._program = self._write_down(1, 1)  # written by: the worker
        self._worker = ThreadPoolExecutor(1, "runner", _set_threads, (self._num_threads,))

    def launch(self, batch: Batch) -> StepHandle:
        """Queue a step and return at once."""
        ends = batch.starts[batch.sampled] + batch.counts[batch.sampled]
        last = np.cumsum(batch.counts, dtype=np.int32)[batch.sampled] - 1
        return StepHandle(self._worker.submit(self._step, self._prepare(batch, last, choices_of(batch, ends)), ends))

    def forward(self, batch: Batch) -> Float32:
        """Compute a step without sampling; return the logits `[T, V]` of all its tokens, when it is done."""
        wanted = np.arange(batch.num_tokens, dtype=np.int32)
        choices = np.zeros((len(wanted), NUM_CHOICE_COLUMNS), np.float32)
        return self._worker.submit(self._all_logits, self._prepare(batch, wanted, choices)).result()

    def close(self) -> None:
        """Finish what has been launched and end the worker; a second call does nothing."""
        self._worker.shutdown()

    def _prepare(self, batch: Batch, wanted: Int32, choices: Float32) -> _Step:
        """Work out all that does not depend on the steps before, here and not between two steps on the worker.

        Args:
            batch: what to compute.
            wanted: `[W]` tokens of the step whose logits are wanted.
            choices: `[W, NUM_CHOICE_COLUMNS]`, how to draw the token that follows each.
        """
        rows, starts, counts = batch.rows.copy(), batch.starts.copy(), batch.counts.copy()  # kernels may not read others
        positions = np.arange(counts.sum(), dtype=np.int32)
        positions += np.repeat(starts - (np.cumsum(counts) - counts).astype(np.int32), counts)
        return _Step(
            batch=batch,
            token_rows=np.repeat(rows, counts),
            positions=positions,
            inputs=(*self._rotations(positions), wanted[:, None], choices),
            tables=self._attention.plan(rows, starts, counts),
        )

    def _step(self, step: _Step, ends: Int32) -> Int32:
        _, tokens = self._compute(step)
        if (tokens < 0).any():
            raise ValueError("logits must be numbers, got NaN")
        batch = step.batch
        self._tokens[batch.rows[batch.sampled], ends] = tokens
        return tokens.copy()

    def _all_logits(self, step: _Step) -> Float32:
        return self._compute(step)[0].copy()

    def _compute(self, step: _Step) -> tuple[Float32, Int32]:
        """Return `[W, V]` logits and `[W]` tokens, which the next step overwrites.

        Raises:
            IndexError: a token is not in the vocabulary.
        """
        batch = step.batch
        self._page_table[batch.page_rows, batch.page_columns] = batch.page_ids
        self._tokens[batch.token_rows, batch.token_positions] = batch.token_ids
        tokens = self._tokens[step.token_rows, step.positions]
        vocab_size = self._model.config.vocab_size
        if not 0 <= tokens.min() <= tokens.max() < vocab_size:
            raise IndexError(f"tokens must be in [0, {vocab_size}), got {tokens.tolist()}")
        num_wanted = len(step.inputs[-1])
        sizes = (len(tokens), num_wanted)
        if any(size > most for size, most in zip(sizes, self._program.capacity, strict=True)):
            self._program = self._write_down(*(max(pair) for pair in zip(sizes, self._program.capacity, strict=True)))
        for target, source in zip(self._program.inputs, (tokens[:, None], *step.inputs), strict=True):
            target.view(source.dtype)[: len(source)] = source
        self._program.run(sizes, step.tables, num_threads=self._num_threads)
        logits, drawn = self._program.outputs
        return logits[:num_wanted], drawn.view(np.int32)[:num_wanted, 0]

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
