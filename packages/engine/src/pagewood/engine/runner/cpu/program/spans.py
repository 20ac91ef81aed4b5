"""What a profile records of a CPU runner: its steps, and every instruction of its programs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from pagewood.engine.observe.profiling import MAX_SPANS, Span
from pagewood.engine.runner.cpu.program.tape import MeasuredRun, Program

Int64 = NDArray[np.int64]


class RunnerSpans:
    """Spans of one profile. Invariant: the worker writes them, one run after the other.

    Instructions without rows are left out: they do nothing.
    """

    __slots__ = ("_num_dropped", "_spans")

    def __init__(self) -> None:
        self._spans: list[Span] = []  # written by: _note
        self._num_dropped = 0  # written by: _note

    def begin(self, program: Program, counts: Int64, scopes: Int64, *, first: int, last: int | None) -> MeasuredRun:
        """Return a run of instructions [first, last) that keeps its times here."""
        places = range(*slice(first, last).indices(len(program.instructions)))
        runs = [program.start(counts, scopes, first=place, last=place + 1) for place in places]
        return MeasuredRun(runs, partial(self._note, program, counts, places))

    def taken(self) -> tuple[list[Span], int]:
        """Return the spans, and how many there was no room for."""
        return self._spans[:], self._num_dropped

    def _note(self, program: Program, counts: Int64, places: Sequence[int], times: Sequence[float]) -> None:
        found = [
            Span(name, start_s, end_s, details)
            for place, (start_s, end_s) in zip(places, pairwise(times), strict=True)
            for name, details in [program.described(place, counts)]
            if details["rows"]
        ]
        found.insert(0, Span("step", times[0], times[-1], {"instructions": len(found)}))
        room = MAX_SPANS - len(self._spans)
        self._spans += found[:room]
        self._num_dropped += max(0, len(found) - room)
