"""A whole step in one compiled function: threads go through a list of instructions and share the parts of each.

The code of an instruction is in the function of its `instruction.Unit`, which is called by address.

Each thread that calls it claims parts of an instruction until none is left, waits until all of them are done, and goes
on to the next instruction. So threads synchronise without system calls, a delayed thread delays the others by two parts
at most, and the result does not depend on how many threads there are and when they arrive. Two threads take longer to
meet than most instructions with a single part take. So the thread that claims such an instruction also computes
those behind it, without claims, up to the next one with several parts.
"""

# pyright: basic
# numba has no types.

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from pagewood.engine.runner.cpu.compiled.instruction import (
    BLOCKS,
    FUNCTION,
    IS_AHEAD,
    PART_ROWS,
    ROWS,
    RULE,
    SINGLE,
    Instruction,
    Unit,
    blocks_of_rows,
    single_rows,
)
from pagewood.engine.runner.cpu.compiled.machine.kernel import kernel
from pagewood.engine.runner.cpu.compiled.machine.memory import call_part, fetch_add, wait_a_moment, wait_for

COUNTER_STRIDE = 8
"""int64 of a cache line: each instruction's counters have a line of their own."""


@kernel("void(i8[:,::1], i8[::1], i8[::1], i8[:,::1], i8[::1], i8)", is_long=True)
def step(instructions: Any, counts: Any, counters: Any, scopes: Any, runs: Any, awaited: Any) -> None:
    """Run a program; see `Program.start` for the first arguments.

    Args:
        instructions: of the program.
        counts: of the run; instructions may write some.
        counters: of the run.
        scopes: of the run.
        runs: `[>= 1]`, how many runs the thread that makes them has begun.
        awaited: 0: this is that thread, and the run is its next one; > 0: this thread helps, and then waits for a
            moment until this number of runs has begun; < 0: it helps and does not wait.
    """
    if awaited == 0:
        fetch_add(runs, 0, 1)
    counts_at, scopes_at = counts.ctypes.data, scopes.ctypes.data
    i, alone = 0, -1  # the instruction, and the first of those that this thread computes alone; -1: it does not
    while i < instructions.shape[0]:
        function, is_ahead = instructions[i, FUNCTION], instructions[i, IS_AHEAD] != 0
        one_at = instructions.ctypes.data + 8 * instructions.shape[1] * i
        num_rows, rule = counts[instructions[i, ROWS]], instructions[i, RULE]
        if rule == BLOCKS:
            num_parts = blocks_of_rows(num_rows, instructions[i, PART_ROWS])
        elif rule == SINGLE:
            num_parts = single_rows(num_rows)
        else:
            num_parts = call_part(function, one_at, counts_at, scopes_at, -1, -1)
        if num_parts < 1:  # not even claimed
            i += 1
            continue
        if num_parts > 1 and alone >= 0:
            fetch_add(counters, alone * COUNTER_STRIDE + 1, i - alone)
            alone = -1
        part = 0 if alone >= 0 else fetch_add(counters, i * COUNTER_STRIDE, 1)
        num_done = 0
        while part < num_parts:
            num_done += 1
            following = part
            if num_parts > 1 and is_ahead:  # claimed one ahead, so that its operands can be prefetched
                following = fetch_add(counters, i * COUNTER_STRIDE, 1)
            call_part(function, one_at, counts_at, scopes_at, part, following)
            if num_parts == 1:
                break
            part = following if is_ahead else fetch_add(counters, i * COUNTER_STRIDE, 1)
        if num_parts > 1:
            if num_done > 0:
                fetch_add(counters, i * COUNTER_STRIDE + 1, num_done)
            wait_for(counters, i * COUNTER_STRIDE + 1, num_parts)
            i += 1
        elif num_done > 0:
            alone = i if alone < 0 else alone
            i += 1
        else:
            wait_for(counters, i * COUNTER_STRIDE + 1, 1)
            i += fetch_add(counters, i * COUNTER_STRIDE + 1, 0)
    if alone >= 0:
        fetch_add(counters, alone * COUNTER_STRIDE + 1, i - alone)
    if awaited > 0:
        wait_a_moment(runs, 0, awaited)


class StepKernel:
    """Runs programs: `step`, and the units whose instructions they have. All are compiled."""

    __slots__ = ("_places", "_runs")

    def __init__(self, units: Iterable[Unit]) -> None:
        """Take the units that programs may use."""
        self._places = {
            one: (unit.kernel.address, number) for unit in units for number, one in enumerate(unit.instructions)
        }
        self._runs: Any = np.zeros(COUNTER_STRIDE, np.int64)
        """[0]: how many runs have begun."""  # written by: step, pass_by

    def place(self, instruction: Instruction) -> tuple[int, int]:
        """Return the address of the unit that has an instruction, and its number there.

        Raises:
            ValueError: it was not compiled.
        """
        if instruction not in self._places:
            raise ValueError(f"{instruction.name} must be in one of the units that were compiled, see `warm_up`")
        return self._places[instruction]

    @property
    def num_begun(self) -> int:
        """How many runs have begun."""
        return int(self._runs[0])

    def run(self, *args: Any) -> None:
        """Run a program without the interpreter's lock, on the thread that makes all runs; see `Program.start`."""
        step(*args, self._runs, 0)

    def help(self, *args: Any, num_begun: int = 0) -> None:
        """Help to run it, on any other thread, and then wait for a moment until `num_begun` runs have begun."""
        step(*args, self._runs, num_begun or -1)

    def pass_by(self) -> None:
        """Count a run that is not made, on the thread that makes all runs.

        This thread keeps the interpreter's lock meanwhile. So it completes the empty step before a thread that waits
        for the run goes on; otherwise the next step would begin only when that thread gives the lock away.
        """
        self._runs[0] += 1
