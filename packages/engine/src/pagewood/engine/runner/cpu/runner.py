"""The runner of a CPU: one worker thread computes batches in the order in which they are launched.

A thread that waits for a step helps to compute it. So the engine's thread is one of the compute threads; while it
plans, the others continue without it.

Legend: G grants, S sampled grants, W wanted tokens, V vocab_size.
"""

# pyright: basic
# torch and numba are typed in part only.

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from pagewood.engine.api import SamplingParams
from pagewood.engine.core.batch import Batch
from pagewood.engine.core.result import StepResult
from pagewood.engine.core.sampling import SamplingArrays
from pagewood.engine.models.decoder import Decoder
from pagewood.engine.runner.cpu.attention import CPUAttention
from pagewood.engine.runner.cpu.compiled.kernel import Kernel
from pagewood.engine.runner.cpu.compiled.layout import Outcome, collect
from pagewood.engine.runner.cpu.compiled.step import Operation
from pagewood.engine.runner.cpu.passes import Grants, Pass, Rotations, RowTables
from pagewood.engine.runner.cpu.sampling import draw
from pagewood.engine.runner.cpu.tape import Buffer, Program, Run, Tape
from pagewood.kvpool.storage import KVStorage

Float32 = NDArray[np.float32]
Int64 = NDArray[np.int64]
Array = TypeVar("Array", bound=NDArray[Any])
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
    grants: Grants
    samples: bool
    """Whether tokens are drawn; otherwise the logits of all tokens of sampled grants are computed."""
    run: Future[Run]
    """The instructions to compute, once their inputs are in place."""


class CPURunner:
    """Computes batches on a worker thread, and owns the KV memory and the tables of tokens, lengths and pages.

    The model is recorded on a tape once, for steps up to some number of tokens; a step only fills in its numbers.

    Invariant: the worker starts steps and keeps their results in the order of the launches, so a step can read tokens
    that the step before it samples. Use it from one thread.
    """

    __slots__ = (
        "_attention", "_helpers", "_kernel", "_model", "_num_threads", "_pass", "_program", "_rotations", "_rows", "_worker",
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
        num_pages = -(-(max_length + 1) // page_size)
        self._rows = RowTables(  # contents written by: the worker
            tokens=np.zeros((max_rows, max_length + 1), np.int32),
            lengths=np.zeros(max_rows, np.int32),
            pages=np.zeros((max_rows, num_pages), np.int32),
        )
        self._attention = CPUAttention(storage, num_heads=config.num_heads, windows=config.windows)
        self._rotations = Rotations(model.rope)  # contents written by: the worker
        self._pass, self._program = self._write_down((1, 1, 1))  # written by: the worker
        self._worker = ThreadPoolExecutor(1, "runner", torch.set_num_threads, (1,))  # torch computes little here
        self._helpers = ThreadPoolExecutor(max(1, num_threads - 2), "runner-helper")

    def launch(self, batch: Batch) -> CPUStepHandle[StepResult]:
        """Queue a step and return at once."""
        grants = Grants(
            rows=_writable(batch.rows),
            starts=_writable(batch.starts),
            counts=_writable(batch.counts),
            sampled=_writable(batch.sampled),
            promised=_writable(batch.num_promised),
            sampling=SamplingArrays(**{name: _writable(array) for name, array in batch.sampling.fields().items()}),
        )
        step = _Step(batch=batch, grants=grants, samples=True, run=Future())
        return self._handle(step, self._worker.submit(self._step, step))

    def forward(self, batch: Batch) -> Float32:
        """Compute a step without sampling, wait for it, and return the logits `[T, V]` of all its T tokens."""
        num_grants = len(batch.rows)
        promised = np.ones(num_grants, np.int32)
        promised[batch.sampled] = batch.num_promised
        grants = Grants(
            rows=batch.rows.copy(),
            starts=batch.starts.copy(),
            counts=batch.counts.copy(),
            sampled=np.arange(num_grants, dtype=np.int32),
            promised=promised,
            sampling=SamplingArrays.of([SamplingParams(temperature=0.0)] * num_grants, [0] * num_grants),
        )
        step = _Step(batch=batch, grants=grants, samples=False, run=Future())
        return self._handle(step, self._worker.submit(self._all_logits, step)).wait()

    def close(self) -> None:
        """Finish the launched steps and end the threads; a second call does nothing."""
        self._worker.shutdown()
        self._helpers.shutdown()

    def _handle(self, step: _Step, result: Future[Result]) -> CPUStepHandle[Result]:
        return CPUStepHandle(step.run if self._num_threads > 1 else None, result)

    def _step(self, step: _Step) -> StepResult:
        scopes, counts = self._compute(step)
        _, drawn, found, num_found = (output.view(np.int32) for output in self._program.outputs)
        num_wanted, num_sampled = counts[self._pass.scope.wanted.index], counts[self._pass.scope.sampled.index]
        if num_wanted == num_sampled:
            return StepResult.of_one_each(drawn[:num_wanted, 0].copy())
        tokens, yielded = np.empty(num_wanted, np.int32), num_found[:num_sampled, 0].copy()
        num_tokens = collect(scopes, self._pass.scope.index, found[:num_wanted, 0], yielded, tokens)
        return StepResult(tokens=tokens[:num_tokens], counts=yielded)

    def _all_logits(self, step: _Step) -> Float32:
        _, counts = self._compute(step)
        return self._program.outputs[0][: counts[self._pass.scope.wanted.index]].copy()

    def _compute(self, step: _Step) -> tuple[Int64, Int64]:
        """Compute a step; return its scopes and counts. The next step overwrites the outputs of the program.

        Raises:
            IndexError: a token is not in the vocabulary.
        """
        try:
            self._update(step.batch)
            scopes, counts = self._lay_out(step)
            run = self._program.start(counts, scopes)
        except Exception as error:
            step.run.set_exception(error)
            raise
        step.run.set_result(run)
        for _ in range(self._num_threads - 2):
            self._helpers.submit(run.work)
        run.work()
        return scopes, counts

    def _update(self, batch: Batch) -> None:
        """Apply what the batch says about rows."""
        rows = self._rows
        if len(batch.page_ids) > 0:
            rows.pages[batch.page_rows, batch.page_columns] = batch.page_ids
        if len(batch.token_ids) > 0:
            rows.tokens[batch.token_rows, batch.token_positions] = batch.token_ids
            rows.lengths[batch.token_rows] = batch.token_positions + 1  # ascending: the last of a row counts

    def _lay_out(self, step: _Step) -> tuple[Int64, Int64]:
        """Fill in the inputs of the program, with memory for more tokens if needed; return its scopes and counts."""
        while True:
            program = self._program
            scopes, counts = program.scopes.copy(), np.zeros(len(program.capacity), np.int64)
            outcome = self._pass.lay_out(scopes, counts, step.grants, all_wanted=not step.samples)
            if outcome != Outcome.TOO_LARGE:
                break
            needed = zip(counts.tolist(), program.capacity, strict=True)
            self._pass, self._program = self._write_down([max(pair) for pair in needed])
        scope = self._pass.scope
        if outcome == Outcome.BAD_TOKEN:
            tokens = program.inputs[0].view(np.int32)[: counts[scope.tokens.index], 0]
            raise IndexError(f"tokens must be in [0, {self._model.config.vocab_size}), got {tokens.tolist()}")
        if not step.samples:
            counts[scope.sampled.index] = 0
        return scopes, counts

    def _write_down(self, sizes: Sequence[int]) -> tuple[Pass, Program]:
        """Return the model's pass, and a program for steps up to these sizes, rounded up to powers of two."""
        tape, config = Tape(), self._model.config
        one = Pass(
            tape, self._rows, self._attention, self._rotations, half=config.head_dim // 2, vocab_size=config.vocab_size
        )
        logits = self._model(one.tokens, (one.cosines, one.sines), self._attention, one.wanted)
        drawn = draw(logits, one.choices)
        found, num_found = tape.buffer(one.scope.wanted, 1), tape.buffer(one.scope.sampled, 1)
        tape.emit(Operation.ACCEPT, one.scope.sampled, one.scope.index, drawn, found, num_found)
        capacity = [1 << (max(size, 1) - 1).bit_length() for size in sizes]
        outputs = (logits, drawn, found, num_found)
        return one, tape.program(self._kernel, capacity, inputs=(one.tokens,), outputs=outputs)


def _writable(array: Array) -> Array:
    """Return `array`, or a copy if it is read-only; kernels are compiled for writable arrays."""
    return array if array.flags.writeable else array.copy()
