"""Runs single operations of the CPU runner's tape on arrays, for tests and measurements."""

# pyright: basic
# numba's kernels have no types.

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.core.messages.sampling_table import SamplingArrays
from pagewood.engine.models.parts.rope import RopeConfig
from pagewood.engine.models.rope import Rope
from pagewood.engine.runner.cpu.compiled.layout import NUM_KINDS, Column
from pagewood.engine.runner.cpu.compiled.step import StepKernel
from pagewood.engine.runner.cpu.program.attention import AnyCPUAttention
from pagewood.engine.runner.cpu.program.passes import Grants, Pass, Rotations, RowTables
from pagewood.engine.runner.cpu.program.tape import Buffer, Tape

Float32 = NDArray[np.float32]


def write_down(
    operation: Callable[..., Buffer],
    *arrays: NDArray[np.generic],
    kernel: StepKernel,
    num_threads: int,
    attention: GrantedAttention | None = None,
) -> Callable[[], Float32]:
    """Write an operation to a tape; return a function that runs it and returns its result, a view of the tape's memory.

    Args:
        operation: gets a buffer for each array, and returns the buffer of its result.
        arrays: `[rows, size]` of four-byte elements, all with the same number of rows.
        kernel: a compiled kernel.
        num_threads: threads that share the work.
        attention: positions and pages of the rows, if the operation attends.
    """
    tape, num_rows = Tape(), len(arrays[0])
    one = attention.scope(tape) if attention else None
    scope = one.scope if one else tape.scope()
    buffers = [tape.buffer(scope.tokens, array.shape[1]) for array in arrays]
    program = tape.program(kernel, (num_rows,) * NUM_KINDS, inputs=buffers, outputs=[operation(*buffers)])
    crew = ThreadPoolExecutor(max(1, num_threads - 1))

    def run() -> Float32:
        for target, array in zip(program.inputs, arrays, strict=True):
            target.view(array.dtype)[:] = array
        scopes, counts = program.scopes.copy(), np.zeros(len(program.capacity), np.int64)
        counts[0] = num_rows
        if attention and one:
            one.lay_out(scopes, counts, attention.grants())
        started = program.start(counts, scopes)
        helpers = [crew.submit(started.help) for _ in range(num_threads - 1)]
        started.work()
        for helper in helpers:
            helper.result()
        return program.outputs[0][:num_rows]

    return run


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantedAttention:
    """Attention, and the grants that attend: grant g computes `counts[g]` tokens of a row from `starts[g]` on."""

    attention: AnyCPUAttention
    page_table: Int32
    rows: Int32
    starts: Int32
    counts: Int32
    begins: Int32 | None = None
    """[G], first position that each grant attends to; None: 0."""

    def scope(self, tape: Tape) -> Pass:
        """Return a new pass on a tape, for rows whose tokens are all 0."""
        num_rows, length = len(self.page_table), int((self.starts + self.counts).max())
        tables = RowTables.allocate(num_rows=num_rows, num_tokens=length, num_pages=self.page_table.shape[1])
        tables = replace(tables, lengths=np.full(num_rows, length, np.int32), pages=self.page_table)
        rope = Rope(RopeConfig(head_dim=2, theta=10000.0, scaling=None), device=torch.device("cpu"))
        one = Pass(tape, tables, self.attention, Rotations([rope], num_rows=num_rows), vocab_size=1)
        if self.begins is not None:
            tape.fill(one.scope, {Column.BEGINS: self.begins})
        return one

    def grants(self) -> Grants:
        """Return the grants, none of which is sampled."""
        empty = np.empty(0, np.int32)
        return Grants(
            rows=self.rows, starts=self.starts, counts=self.counts, sampled=empty, promised=empty,
            sampling=SamplingArrays.of([], []),
        )  # fmt: skip
