"""Durations of a runner's steps by their number of tokens, and of its drafts, for the choice of draft lengths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from time import perf_counter

import numpy as np

from pagewood.engine.api import SamplingParams
from pagewood.engine.core.loop import Runner
from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.core.messages.batch import Batch
from pagewood.engine.core.messages.sampling_table import SamplingArrays

_CONTEXT = 64  # tokens before the computed ones in each row
_NUM_REPEATS = 4  # the first one also allocates memory, so the least time counts
_SEVERAL = 8  # rows
_LIMIT_S = 2.0  # no further size is measured after this time; there are at least two if that many tokens fit
_NAMESPACE = -1  # no request: `BatchBuilder` hashes names


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """The measured durations of steps. Legend: N measured sizes."""

    sizes: tuple[int, ...]
    """[N] tokens of a step, ascending."""
    seconds: tuple[float, ...]
    """[N] seconds of a step."""


def measure_step_times(
    runner: Runner, *, num_rows: int, max_length: int, num_pages: int, page_size: int, has_states: bool = False
) -> StepTimes:
    """Compute steps of 1, 2, 4, ... tokens with logits for each token, and return their times.

    The rows share their pages, whose contents are overwritten, so nothing may be in use yet.

    Args:
        runner: to measure; no step is in flight.
        num_rows: its rows.
        max_length: longest sequence of a row.
        num_pages: pages of its KV memory.
        page_size: positions of a page.
        has_states: whether layers are recurrent; each row then has the place of a state.
    """
    start = min(_CONTEXT, max(max_length // 2 - 1, 0), num_pages * page_size // 2)
    most = min(max_length - start - 1, num_pages * page_size - start, 8)
    sizes: list[int] = []
    seconds: list[float] = []
    began = perf_counter()
    for size in _sizes(num_rows * max(most, 1)):
        rows = min(size, num_rows)
        if size % rows:
            continue
        batch = _batch(rows, size // rows, start=start, page_size=page_size, has_states=has_states)
        times: list[float] = []
        for _ in range(_NUM_REPEATS):
            launched = perf_counter()
            runner.launch(batch).wait()
            times.append(perf_counter() - launched)
        sizes.append(size)
        seconds.append(min(times))
        if perf_counter() - began > _LIMIT_S and len(sizes) > 1:
            break
    return StepTimes(sizes=tuple(sizes), seconds=without_disturbances(seconds))


def without_disturbances(seconds: Sequence[float]) -> tuple[float, ...]:
    """Return durations that do not fall with the size: each at most the duration of every larger size.

    Other work on the machine only adds time, so where a smaller step took longer than a larger one, it was disturbed.

    Args:
        seconds: by size, ascending.
    """
    return tuple(accumulate(reversed(seconds), min))[::-1]


def measure_draft_times(
    runner: Runner, *, num_rows: int, max_length: int, num_drafts: int, has_states: bool = False
) -> tuple[tuple[int, int, float], ...]:
    """Make the runner draft for one row and for several; return (drafts of a row, all drafts, seconds) for each case.

    Seconds are those that the runner reports, 0 if it drafted nothing. Pages of the rows must have been set by
    `measure_step_times`; only these and page 0 are written.

    Args:
        runner: to measure; no step is in flight.
        num_rows: its rows.
        max_length: longest sequence of a row.
        num_drafts: most draft tokens of a row.
        has_states: see `measure_step_times`.
    """
    cases: list[tuple[int, int, float]] = []
    for rows, drafts in dict.fromkeys(((1, 1), (1, num_drafts), (min(num_rows, _SEVERAL), num_drafts))):
        num_read = 2 + (_NUM_REPEATS + 1) * (1 + drafts)
        if num_read > max_length:
            continue
        # Stages have kept other tokens behind rejected drafts, so what they read has to be known.
        first = _batch(rows, 1, start=1, page_size=max_length, has_states=has_states, num_known=num_read)
        runner.launch(first).wait()
        batch = _drafting_batch(rows, drafts, start=1, has_states=has_states)
        results = [runner.launch(batch).wait() for _ in range(_NUM_REPEATS + 1)]
        seconds = [one.draft_s for one in results if one.num_drafted is not None and one.num_drafted.all()]
        cases.append((drafts, rows * drafts, min(seconds, default=0.0)))
    return tuple(cases)


def _drafting_batch(num_rows: int, num_drafts: int, *, start: int, has_states: bool) -> Batch:
    """Return a step in which each row continues from position `start`, or from its last token, with drafts."""
    rows, empty = np.arange(num_rows, dtype=np.int32), np.empty(0, np.int32)
    size = np.full(num_rows, 1 + num_drafts, np.int32)
    return Batch(
        page_rows=empty,
        page_columns=empty,
        page_ids=empty,
        token_rows=empty,
        token_positions=empty,
        token_ids=empty,
        rows=rows,
        starts=np.full(num_rows, start + _NUM_REPEATS * (1 + num_drafts), np.int32),
        counts=size,
        sampled=rows,
        num_promised=size,
        states=_states(num_rows, 0, has_states=has_states),
        sampling=SamplingArrays.of([SamplingParams(temperature=0.0)] * num_rows, [0] * num_rows),
    )


def _sizes(most: int) -> Iterator[int]:
    """Yield 1, 2, 3, 4, 6, 8, 12, ... up to `most`."""
    size = 1
    while size <= most:
        yield size
        if size > 1 and size + size // 2 <= most:
            yield size + size // 2
        size *= 2


def _states(num_rows: int, distance: int, *, has_states: bool) -> Int32:
    """Return `Batch.states` of rows that each have a place of their own, and read one at a distance before it."""
    places = np.arange(num_rows if has_states else 0, dtype=np.int32)
    return np.column_stack([places - np.int32(distance), places])


def _batch(
    num_rows: int, count: int, *, start: int, page_size: int, has_states: bool, num_known: int | None = None
) -> Batch:
    """Return a step in which each row computes `count` positions from `start` on and yields one token.

    It says `num_known` tokens of each row; None: those up to the last computed position.
    """
    rows = np.arange(num_rows, dtype=np.int32)
    num_pages, num_tokens = -(-(start + count) // page_size), num_known or start + count
    return Batch(
        page_rows=np.repeat(rows, num_pages),
        page_columns=np.tile(np.arange(num_pages, dtype=np.int32), num_rows),
        page_ids=np.tile(np.arange(num_pages, dtype=np.int32), num_rows),
        token_rows=np.repeat(rows, num_tokens),
        token_positions=np.tile(np.arange(num_tokens, dtype=np.int32), num_rows),
        token_ids=np.zeros(num_rows * num_tokens, np.int32),
        admitted=rows,
        namespaces=np.full(num_rows, _NAMESPACE, np.int64),
        rows=rows,
        starts=np.full(num_rows, start, np.int32),
        counts=np.full(num_rows, count, np.int32),
        sampled=rows,
        num_promised=np.ones(num_rows, np.int32),
        states=_states(num_rows, 1, has_states=has_states),
        sampling=SamplingArrays.of([SamplingParams(temperature=0.0)] * num_rows, [0] * num_rows),
    )
