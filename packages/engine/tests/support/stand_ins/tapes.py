"""Runs single operations of the CPU runner's tape on arrays, for tests and measurements."""

# pyright: basic
# numba's kernels have no types.

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from pagewood.engine.runner.cpu.compiled.kernel import Kernel
from pagewood.engine.runner.cpu.tape import Buffer, Rows, StepTables, Tape

Float32 = NDArray[np.float32]


def write_down(
    operation: Callable[..., Buffer],
    *arrays: NDArray[np.generic],
    kernel: Kernel,
    num_threads: int,
    tables: StepTables | None = None,
) -> Callable[[], Float32]:
    """Write an operation to a tape; return a function that runs it and returns its result, a view of the tape's memory.

    Args:
        operation: gets a buffer for each array, and returns the buffer of its result.
        arrays: `[rows, size]` of four-byte elements, all with the same number of rows.
        kernel: a compiled kernel.
        num_threads: threads that share the work.
        tables: positions and pages of the rows, for attention.
    """
    tape, num_rows = Tape(), len(arrays[0])
    buffers = [tape.buffer(Rows.TOKENS, array.shape[1]) for array in arrays]
    program = tape.program(kernel, (num_rows, 1), inputs=buffers, outputs=[operation(*buffers)])
    crew = ThreadPoolExecutor(max(1, num_threads - 1))
    empty = np.zeros(1, np.int32)
    tables = tables or StepTables(
        page_table=empty[None], rows=empty, starts=empty, offsets=empty, items=np.zeros((0, 4), np.int32), memory_size=0
    )

    def run() -> Float32:
        for target, array in zip(program.inputs, arrays, strict=True):
            target.view(array.dtype)[:] = array
        started = program.start((num_rows, 0), tables)
        helpers = [crew.submit(started.work) for _ in range(num_threads - 1)]
        started.work()
        for helper in helpers:
            helper.result()
        return program.outputs[0][:num_rows]

    return run
