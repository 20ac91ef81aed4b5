"""The runner of a CPU: one worker thread computes batches in the order in which they are launched.

A thread that waits for a step helps to compute it. So the engine's thread is one of the compute threads; while it
plans, the others continue without it.

Legend: T tokens of a step, G grants, S sampled grants, V vocab_size.
"""

# pyright: basic
# torch and numba are typed in part only.

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from pagewood.engine.core.arrays import Int32
from pagewood.engine.core.batch import Batch
from pagewood.engine.core.result import StepResult
from pagewood.engine.models.decoder import Decoder
from pagewood.engine.runner.cpu.attention import CPUAttention
from pagewood.engine.runner.cpu.compiled.kernel import Kernel
from pagewood.engine.runner.cpu.compiled.sampling import NUM_CHOICE_COLUMNS
from pagewood.engine.runner.cpu.sampling import choices_of, draw
from pagewood.engine.runner.cpu.tape import Buffer, Program, Rows, Run, StepTables, Tape
from pagewood.kvpool.storage import KVStorage

Float32 = NDArray[np.float32]
Result = TypeVar("Result")


class CPUStepHandle(Generic[Result]):
    """A launched step."""

    __slots__ = ("_result", "_run")

    def __init__(self, run: Future[Run] | None, result: Future[Result]) -> None:
        """Make `wait` compute `run`, if there is one, and then return `result`."""
        self._run = run
        self._result = result

    def wait(self) -> Result:
        """Help to compute the step until it is done, and return its result.

        Raises:
            Exception: the step failed.
        """
        if self._run is not None:
            self._run.result().work()
        return self._result.result()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """A batch that is ready for the worker."""

    batch: Batch
    token_rows: Int32
    """[T] row of each token."""
    positions: Int32
    """[T] its position in the row."""
    inputs: tuple[NDArray[np.generic], ...]
    """Inputs of the program besides the tokens: cosines, sines, wanted tokens, choices."""
    tables: StepTables
    run: Future[Run]
    """The instructions to compute, once their inputs are in place."""


class CPURunner:
    """Computes batches on a worker thread, and owns the KV memory, the token table and the page table.

    The model is recorded on a tape once, for steps up to some number of tokens; a step only fills in its numbers.

    Invariant: the worker starts steps and keeps their results in the order of the launches, so a step can read tokens
    that the step before it samples. Use it from one thread.
    """

    __slots__ = (
        "_attention", "_cosines", "_helpers", "_kernel", "_model", "_num_threads", "_page_table", "_program", "_sines",
        "_tokens", "_worker",
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
            model: to compute.
            storage: its KV memory, in a layout of order HND.
            kernel: compiled for the model's head_dim.
            max_rows: requests that can hold a row at the same time.
            max_length: longest sequence of a row.
            num_threads: threads that compute: the worker, the thread that waits for the step, and helpers beyond two.
        """
        config, page_size = model.config, storage.layout.page_size
        self._model = model
        self._kernel = kernel
        self._num_threads = num_threads
        self._tokens: Int32 = np.zeros((max_rows, max_length + 1), np.int32)  # written by: the worker
        num_pages = -(-(max_length + 1) // page_size)
        self._page_table: Int32 = np.zeros((max_rows, num_pages), np.int32)  # written by: the worker
        self._attention = CPUAttention(storage, self._page_table, num_heads=config.num_heads, windows=config.windows)
        self._cosines: Float32 = np.empty((0, config.head_dim // 2), np.float32)  # written by: the caller
        self._sines: Float32 = self._cosines  # written by: the caller
        self._program = self._write_down(1, 1)  # written by: the worker
        self._worker = ThreadPoolExecutor(1, "runner", torch.set_num_threads, (1,))  # torch computes little here
        self._helpers = ThreadPoolExecutor(max(1, num_threads - 2), "runner-helper")

    def launch(self, batch: Batch) -> CPUStepHandle[StepResult]:
        """Queue a step and return at once; each of its sampled grants yields one token."""
        ends = batch.starts[batch.sampled] + batch.counts[batch.sampled]
        last = np.cumsum(batch.counts, dtype=np.int32)[batch.sampled] - 1
        step = self._prepare(batch, last, choices_of(batch.sampling, ends))
        return self._handle(step, self._worker.submit(self._step, step, ends))

    def forward(self, batch: Batch) -> Float32:
        """Compute a step without sampling, wait for it, and return the logits `[T, V]` of all its tokens."""
        wanted = np.arange(batch.num_tokens, dtype=np.int32)
        step = self._prepare(batch, wanted, np.zeros((len(wanted), NUM_CHOICE_COLUMNS), np.float32))
        return self._handle(step, self._worker.submit(self._all_logits, step)).wait()

    def close(self) -> None:
        """Finish the launched steps and end the threads; a second call does nothing."""
        self._worker.shutdown()
        self._helpers.shutdown()

    def _handle(self, step: _Step, result: Future[Result]) -> CPUStepHandle[Result]:
        return CPUStepHandle(step.run if self._num_threads > 1 else None, result)

    def _prepare(self, batch: Batch, wanted: Int32, choices: Float32) -> _Step:
        """Prepare all that does not depend on earlier steps in the calling thread, not between two steps on the worker.

        Args:
            batch: to compute.
            wanted: `[W]` tokens of the step whose logits are needed.
            choices: `[W, NUM_CHOICE_COLUMNS]`, how to draw the token after each.
        """
        # copied, because a batch may be read-only, and kernels are compiled for writable arrays
        rows, starts, counts = (array.copy() for array in (batch.rows, batch.starts, batch.counts))
        positions = np.arange(counts.sum(), dtype=np.int32)
        positions += np.repeat(starts - (np.cumsum(counts) - counts).astype(np.int32), counts)
        return _Step(
            batch=batch,
            token_rows=np.repeat(rows, counts),
            positions=positions,
            inputs=(*self._rotations(positions), wanted[:, None], choices),
            tables=self._attention.plan(rows, starts, counts),
            run=Future(),
        )

    def _step(self, step: _Step, ends: Int32) -> StepResult:
        _, drawn = self._compute(step)
        batch = step.batch
        # A row without a token gets 0: the next step may have been launched already, and reads it.
        self._tokens[batch.rows[batch.sampled], ends] = np.maximum(drawn, 0)
        return StepResult.of_one_each(drawn.copy())

    def _all_logits(self, step: _Step) -> Float32:
        return self._compute(step)[0].copy()

    def _compute(self, step: _Step) -> tuple[Float32, Int32]:
        """Return logits `[W, V]` and tokens `[W]`; the next step overwrites them.

        Raises:
            IndexError: a token is not in the vocabulary.
        """
        try:
            run = self._start(step)
        except Exception as error:
            step.run.set_exception(error)
            raise
        step.run.set_result(run)
        for _ in range(self._num_threads - 2):
            self._helpers.submit(run.work)
        run.work()
        logits, drawn = self._program.outputs
        num_wanted = len(step.inputs[-1])
        return logits[:num_wanted], drawn.view(np.int32)[:num_wanted, 0]

    def _start(self, step: _Step) -> Run:
        """Apply the updates of the batch and fill in the inputs of the program."""
        batch = step.batch
        self._page_table[batch.page_rows, batch.page_columns] = batch.page_ids
        self._tokens[batch.token_rows, batch.token_positions] = batch.token_ids
        tokens = self._tokens[step.token_rows, step.positions]
        vocab_size = self._model.config.vocab_size
        if not 0 <= tokens.min() <= tokens.max() < vocab_size:
            raise IndexError(f"tokens must be in [0, {vocab_size}), got {tokens.tolist()}")
        sizes = (len(tokens), len(step.inputs[-1]))
        if any(size > most for size, most in zip(sizes, self._program.capacity, strict=True)):
            self._program = self._write_down(*(max(pair) for pair in zip(sizes, self._program.capacity, strict=True)))
        for target, source in zip(self._program.inputs, (tokens[:, None], *step.inputs), strict=True):
            target.view(source.dtype)[: len(source)] = source
        return self._program.start(sizes, step.tables)

    def _write_down(self, num_tokens: int, num_wanted: int) -> Program:
        """Return a program that computes the model for steps up to these sizes, rounded up to powers of two."""
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
