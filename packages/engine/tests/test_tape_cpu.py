"""Runs of a program that several threads share: each instruction is computed once, also if threads join late."""

# pyright: basic
# numba's kernels have no types.

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import pytest

from pagewood.engine.runner.cpu.compiled.layout import NUM_KINDS
from pagewood.engine.runner.cpu.compiled.step import Operation, StepKernel
from pagewood.engine.runner.cpu.kernels import warm_up
from pagewood.engine.runner.cpu.program.tape import Program, Run, Tape

SIZE, FEW, MANY = 64, 2, 300  # a part has 128 rows of this size
LINES = [FEW, 0, FEW, MANY, -MANY, FEW, 0, FEW, FEW, MANY, MANY, 0, FEW, -MANY]  # fewer than none count as none
WEIGHT = np.ones(SIZE, np.float32)
WAIT_S = 60  # then a thread counts as hung


@cache
def step_kernel() -> StepKernel:
    return warm_up(16)


def adding_program(lines: list[int]) -> tuple[Program, np.ndarray]:
    """Return a program and its counts. Line i adds 1 to its first `lines[i]` rows, so computing it twice shows."""
    tape = Tape()
    scopes = [tape.scope() for _ in lines]
    most = max(lines)
    x, residual, out = (tape.buffer(scopes[0].tokens, SIZE) for _ in range(3))
    for scope in scopes:
        tape.emit(
            Operation.ADD_NORM, scope.tokens, x.first(scope.tokens), residual.first(scope.tokens), WEIGHT,
            out.first(scope.tokens), SIZE, number=1e-5,
        )  # fmt: skip
    capacity = (most,) * (NUM_KINDS * len(lines))
    program = tape.program(step_kernel(), capacity, inputs=[x, residual], outputs=[residual, out])
    counts = np.zeros(NUM_KINDS * len(lines), np.int64)
    counts[::NUM_KINDS] = lines
    return program, counts


def expected_sums(lines: list[int]) -> np.ndarray:
    return np.array([sum(row < num_rows for num_rows in lines) for row in range(max(lines))], np.float32)


@pytest.mark.parametrize("num_threads", [1, 2, 4])
def test_every_instruction_is_computed_once(num_threads: int) -> None:
    program, counts = adding_program(LINES)
    rng = random.Random(num_threads)

    def help_late(run: Run, delay_s: float) -> None:
        time.sleep(delay_s)
        run.help()

    with ThreadPoolExecutor(max(1, num_threads - 1)) as crew:
        for _ in range(300):
            program.inputs[0][:], program.inputs[1][:] = 1, 0
            run = program.start(counts, program.scopes.copy())
            helpers = [crew.submit(help_late, run, rng.choice([0, 1e-5, 1e-4])) for _ in range(num_threads - 1)]
            run.work()
            assert (program.outputs[0] == expected_sums(LINES)[:, None]).all()
            for helper in helpers:  # one that comes after the end finds nothing to do
                helper.result(WAIT_S)
            assert (program.outputs[0] == expected_sums(LINES)[:, None]).all()


def test_a_helper_that_follows_waits_for_the_next_run_but_not_for_ever() -> None:
    program, counts = adding_program([FEW])
    kernel = program.kernel
    first = program.start(counts, program.scopes.copy())
    first.work()
    num_begun = kernel.num_begun
    first.help(follows=True)  # there is no next run; it returns all the same
    assert kernel.num_begun == num_begun  # only the thread that makes runs counts them
    second = program.start(counts, program.scopes.copy())
    with ThreadPoolExecutor(1) as crew:
        helper = crew.submit(first.help, follows=True)
        second.work()
        helper.result(WAIT_S)
    assert kernel.num_begun == num_begun + 1
    kernel.pass_by()  # an empty step
    assert kernel.num_begun == num_begun + 2
