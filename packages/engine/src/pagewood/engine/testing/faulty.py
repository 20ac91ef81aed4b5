"""An echo runner with random faults: steps that fail or are interrupted, and rows without a token."""

from __future__ import annotations

import enum
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pagewood.engine.core.arrays import Int32
from pagewood.engine.core.batch import Batch
from pagewood.engine.core.request import Request
from pagewood.engine.core.result import StepResult
from pagewood.engine.testing.echo import EchoRunner, EchoStep

_BROKEN = np.uint64(0xBAD0BAD0BAD0BAD0)


class Fault(enum.Enum):
    """What goes wrong with one launch."""

    LAUNCH = enum.auto()
    """`launch` raises, and nothing is computed."""
    INTERRUPTED_LAUNCH = enum.auto()
    """`launch` raises a KeyboardInterrupt, and nothing is computed."""
    WAIT = enum.auto()
    """`wait` raises; the KV of the step is wrong."""
    INTERRUPTED_WAIT = enum.auto()
    """`wait` raises a KeyboardInterrupt when it is first called."""
    NO_TOKEN = enum.auto()
    """Some rows yield no token, and their KV is wrong."""


def random_faults(rng: random.Random) -> dict[int, Fault]:
    """Draw faults for some launches, by the number of the launch."""
    return {launch: rng.choice(list(Fault)) for launch in rng.sample(range(60), rng.choice((1, 2, 10)))}


@dataclass(slots=True, kw_only=True, eq=False)
class _Trouble:
    """A faulty step."""

    fault: Fault
    requests: list[Request]
    """Of its grants, in order."""
    grants: list[int]
    """Grants whose KV is wrong."""
    is_raised: bool = field(default=False)
    """Whether `wait` has raised."""  # written by: faulty


class FaultyRunner(EchoRunner):
    """An echo runner in which some launches have a fault.

    Args:
        faults: by number of the launch, starting at 0.
        requests: returns the requests that hold a row.
        failed: gets the id of each request that must end with an error because of a fault.
        limits: see `EchoRunner`.
    """

    def __init__(
        self,
        *,
        faults: Mapping[int, Fault],
        requests: Callable[[], Iterable[Request]],
        failed: Callable[[str], object],
        num_rows: int,
        max_length: int,
        num_pages: int,
        page_size: int,
        vocab_size: int,
        held_pages: Callable[[], Int32],
        memory: NDArray[np.uint64],
    ) -> None:
        super().__init__(
            num_rows=num_rows,
            max_length=max_length,
            num_pages=num_pages,
            page_size=page_size,
            vocab_size=vocab_size,
            held_pages=held_pages,
            memory=memory,
        )
        self._faults = faults
        self._requests = requests
        self._failed = failed
        self._num_calls = 0  # written by: faulty
        self._troubles: dict[int, _Trouble] = {}
        """By `id` of a batch in flight."""  # written by: faulty

    def launch(self, batch: Batch) -> EchoStep:
        """Queue a step, or raise if the fault says so."""
        fault = self._faults.get(self._num_calls)
        self._num_calls += 1
        by_row = {request.row: request for request in self._requests()}
        requests = [by_row[row] for row in batch.rows.tolist()]
        if fault in (Fault.LAUNCH, Fault.INTERRUPTED_LAUNCH):
            self._fail(requests)
            raise KeyboardInterrupt if fault is Fault.INTERRUPTED_LAUNCH else RuntimeError("launch failed")
        if fault is not None:
            grants = {
                Fault.WAIT: range(len(requests)),
                Fault.NO_TOKEN: batch.sampled[self._num_calls % 2 :: 2].tolist(),
                Fault.INTERRUPTED_WAIT: (),
            }[fault]
            self._troubles[id(batch)] = _Trouble(fault=fault, requests=requests, grants=list(grants))
        return super().launch(batch)

    def finish(self, step: EchoStep) -> StepResult:
        """Return the result of a step, or raise if its fault says so."""
        trouble = self._troubles.get(id(step.batch))
        if trouble is not None and trouble.fault is Fault.INTERRUPTED_WAIT and not trouble.is_raised:
            trouble.is_raised = True
            raise KeyboardInterrupt
        result = super().finish(step)
        if trouble is not None:
            del self._troubles[id(step.batch)]
            self._fail([trouble.requests[grant] for grant in trouble.grants])
            if trouble.fault is Fault.WAIT:
                raise RuntimeError("step failed")
        return result

    def _compute(self, batch: Batch) -> Int32:
        tokens = super()._compute(batch)
        trouble = self._troubles.get(id(batch))
        for grant in [] if trouble is None else trouble.grants:
            row, start, count = int(batch.rows[grant]), int(batch.starts[grant]), int(batch.counts[grant])
            self._kv[self._slots(row, start, start + count)] = _BROKEN
            for index in np.flatnonzero(batch.sampled == grant).tolist():
                tokens[index] = -1
                self._tokens[row, start + count] = 0  # the next step may have been launched already, and reads it
        return tokens

    def _fail(self, requests: Iterable[Request]) -> None:
        for request in requests:
            if request.finish is None:
                self._failed(request.request_id)
