"""Programs: operands have names, and threads that share a run compute each instruction once, also if they join late."""

# pyright: basic
# numba's kernels have no types.

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import pytest

from pagewood.engine.runner.cpu.compiled.attention.heads import store
from pagewood.engine.runner.cpu.compiled.instruction import Count, NumRows, Real, Unit, instruction, one_part
from pagewood.engine.runner.cpu.compiled.layout import NUM_KINDS
from pagewood.engine.runner.cpu.compiled.machine.kernel import inlined
from pagewood.engine.runner.cpu.compiled.machine.memory import floats, integers, longs
from pagewood.engine.runner.cpu.compiled.rows import add_norm, norm, put, take
from pagewood.engine.runner.cpu.compiled.step import StepKernel
from pagewood.engine.runner.cpu.compiled.units import COMMON
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
        tape.write(
            add_norm, scope.tokens, x=x.first(scope.tokens), residual=residual.first(scope.tokens), weight=WEIGHT,
            out=out.first(scope.tokens), size=SIZE, epsilon=1e-5,
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


# --- operands ---


def test_an_operand_that_is_missing_unknown_or_of_another_type_is_named() -> None:
    tape = Tape()
    scope = tape.scope()
    x, out = tape.buffer(scope.tokens, SIZE), tape.buffer(scope.tokens, SIZE)
    right: dict[str, Any] = {"x": x, "weight": WEIGHT, "out": out, "size": SIZE, "epsilon": 1e-5}
    without, other = {**right}, {**right, "weights": right["weight"]}
    del without["out"], other["weight"]
    with pytest.raises(ValueError, match="norm must have the operands x, weight, out, size, epsilon; missing: out;"):
        tape.write(norm, scope.tokens, **without)
    with pytest.raises(ValueError, match="missing: weight; unknown: weights"):
        tape.write(norm, scope.tokens, **other)
    with pytest.raises(TypeError, match="multiple values for keyword argument 'size'"):
        tape.write(norm, scope.tokens, size=SIZE, **right)
    for name, operand, types in (("x", 1.5, "Buffer or ndarray or int or NoneType"), ("epsilon", x, "float or int")):
        with pytest.raises(ValueError, match=f"{name} of norm must be {types}, got "):
            tape.write(norm, scope.tokens, **{**right, name: operand})
    with pytest.raises(ValueError, match="scope of store must be Scope, got 0"):
        tape.write(store, scope.tokens, **{**dict.fromkeys(store.operands, 1), "scope": 0})
    assert tape.num_lines == 0
    tape.write(norm, scope.tokens, **dict(reversed(right.items())))
    assert tape.num_lines == 1


def test_operands_are_found_by_name() -> None:
    """Whatever their order is where the instruction is written."""
    tape = Tape()
    scope = tape.scope()
    x, out = tape.buffer(scope.tokens, 2), tape.buffer(scope.tokens, 5)
    tape.write(put, scope.tokens, column=3, out_size=5, size=2, out=out, x=x)
    program = tape.program(step_kernel(), (FEW,) * NUM_KINDS, inputs=[x, out], outputs=[out])
    program.inputs[0][:], program.inputs[1][:] = [[1, 2], [3, 4]], 0
    program.start(np.full(NUM_KINDS, FEW, np.int64), program.scopes.copy()).work()
    assert program.outputs[0].tolist() == [[0, 0, 0, 1, 2], [0, 0, 0, 3, 4]]


# --- rows that an instruction counts ---


@instruction(one_part)
@inlined
def route(x_at: Any, places_at: Any, count_at: Count, size: Any, expert: Real, num_rows: NumRows) -> None:
    """Write which rows of `x` `[T, size]` begin with the number of an expert, and how many."""
    x, places, count = floats(x_at, num_rows, size), integers(places_at, num_rows), longs(count_at, 1)
    count[0] = 0
    for row in range(num_rows):
        if x[row, 0] == expert:
            places[count[0]] = row
            count[0] += 1


NUM_EXPERTS = 3
ROUTING = Unit("routing", route)


@cache
def routing_kernel() -> StepKernel:
    ROUTING.kernel.compile()
    step_kernel()
    return StepKernel([*COMMON, ROUTING])


def routed_program() -> Program:
    """Return a program that adds 1 to a sum of every row, by the expert of the row; see `route`."""
    tape = Tape()
    scope = tape.scope()
    x = tape.buffer(scope.tokens, SIZE)
    sums, inputs = [], []
    for expert in range(NUM_EXPERTS):
        rows, places = tape.counted(scope.tokens), tape.buffer(scope.tokens, 1)
        tape.write(
            route, scope.tokens, x=x, places=places, count=rows, size=SIZE, expert=float(expert)
        )  # fmt: skip
        own, ones, out = (tape.buffer(rows, SIZE) for _ in range(3))
        tape.write(take, rows, x=x, places=places, out=own, size=SIZE)
        tape.write(add_norm, rows, x=ones, residual=own, weight=WEIGHT, out=out, size=SIZE, epsilon=1e-5)
        sums.append(own)
        inputs.append(ones)
    return tape.program(routing_kernel(), (MANY,) * NUM_KINDS, inputs=[x, *inputs], outputs=sums)


@pytest.mark.parametrize("num_threads", [1, 2, 4])
def test_an_instruction_counts_the_rows_of_those_behind_it(num_threads: int) -> None:
    """With helpers that join a run when the next one, which has other numbers of rows, has begun."""
    program, rng = routed_program(), np.random.default_rng(num_threads)
    delays = random.Random(num_threads)

    def help_late(run: Run, delay_s: float) -> None:
        time.sleep(delay_s)
        run.help()

    helpers = []
    with ThreadPoolExecutor(max(1, num_threads - 1)) as crew:
        for number in range(200):
            num_rows = int(rng.choice([0, 1, 5, MANY]))
            experts = rng.integers(0, 1 if number % 5 == 0 else NUM_EXPERTS, num_rows)
            program.inputs[0][:num_rows] = np.arange(num_rows)[:, None]
            program.inputs[0][:num_rows, 0] = experts
            for ones in program.inputs[1:]:
                ones[:] = 1
            counts = np.zeros(len(program.capacity), np.int64)
            counts[0] = num_rows
            run = program.start(counts, program.scopes.copy())
            helpers += [crew.submit(help_late, run, delays.choice([0, 1e-5, 1e-3])) for _ in range(num_threads - 1)]
            run.work()
            assert sorted(counts[NUM_KINDS:]) == sorted(np.bincount(experts, minlength=NUM_EXPERTS))
            for expert, found in enumerate(program.outputs):
                (rows,) = np.nonzero(experts == expert)
                assert (found[: len(rows), 1:] == rows[:, None] + 1).all()
                assert (found[: len(rows), 0] == expert + 1).all()
        for helper in helpers:
            helper.result(WAIT_S)
