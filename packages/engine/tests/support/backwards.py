"""A sum over ranks that is added in another order, as one rank of a seeded fault does."""

# pyright: basic
# numba's kernels have no types.

from __future__ import annotations

from typing import Any

import pytest

from pagewood.engine.runner.cpu.compiled import exchange
from pagewood.engine.runner.cpu.compiled.exchange import NUM_LANES, PIECE, _add, _meet, lanes, place_of
from pagewood.engine.runner.cpu.compiled.instruction import NumRows, Part, Unit, instruction
from pagewood.engine.runner.cpu.compiled.machine.kernel import inlined
from pagewood.engine.runner.cpu.program import ops
from pagewood.engine.runner.cpu.program.exchange import Exchange
from seeded_faults import seed_fault


@instruction(lanes)
@inlined
def sum_backwards(
    x_at: Any, size: Any, rank: Any, count: Any, places_at: Any, arrivals_at: Any, ended_at: Any,
    num_rows: NumRows, part: Part,
) -> None:  # fmt: skip
    """Like `sum_ranks`, but the last rank is the first one that is added."""
    start, end = part * PIECE, num_rows * size
    while start < end:
        num, own_at = min(PIECE, end - start), x_at + 4 * start
        number = _meet(own_at, num, rank, count, places_at, arrivals_at, ended_at, part)
        if number < 0:
            break
        last = count - 1
        _add(place_of(places_at, last, part, number), place_of(places_at, last - 1, part, number), own_at, num)
        for other in range(last - 2, -1, -1):
            _add(own_at, place_of(places_at, other, part, number), own_at, num)
        start += NUM_LANES * PIECE


BACKWARDS = Unit("backwards", sum_backwards)


def seed_backwards(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let one rank of each stage, of three ranks at least, add backwards."""
    monkeypatch.setattr(exchange, "sum_backwards", sum_backwards, raising=False)  # for the code of the fault
    monkeypatch.setattr(ops, "BACKWARDS", BACKWARDS, raising=False)
    chosen = f"exchange.sum_backwards if self.rank == {rank} else exchange.sum_ranks, x.rows"
    seed_fault(
        [
            (Exchange, "sum_ranks", "exchange.sum_ranks, x.rows", chosen),
            (ops.CPUOps, "__init__", "{EXCHANGE: None}", "{EXCHANGE: None, BACKWARDS: None}"),
        ],
        monkeypatch,
    )
