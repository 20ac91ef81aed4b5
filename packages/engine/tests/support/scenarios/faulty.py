"""An echo runner with random faults: steps that fail or are interrupted, and rows without a token."""

from __future__ import annotations

import enum
import random
from collections.abc import Callable, Iterable, Mapping, Sequence

from pagewood.engine.core.loop import StepHandle
from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.core.messages.batch import Batch
from pagewood.engine.core.messages.result import StepResult
from pagewood.engine.core.request import Request
from pagewood.engine.testing.echo import EchoRunner, EchoStep


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
    """Some rows yield no token, or no states that are numbers, and their KV is wrong."""


def random_faults(rng: random.Random) -> dict[int, Fault]:
    """Draw faults for some launches, by the number of the launch."""
    return {launch: rng.choice(list(Fault)) for launch in rng.sample(range(60), rng.choice((1, 2, 10)))}


class FaultyRunner:
    """An echo runner in which some launches have a fault; satisfies `scenarios.running.WatchedRunner`.

    Args:
        make_echo: makes the echo runner, given a function for its argument `broken`.
        faults: by number of the launch, starting at 0.
        requests: returns the requests that hold a row.
        failed: gets the id of each request that must end with an error because of a fault.
    """

    def __init__(
        self,
        make_echo: Callable[[Callable[[Batch], Sequence[int]]], EchoRunner],
        *,
        faults: Mapping[int, Fault],
        requests: Callable[[], Iterable[Request]],
        failed: Callable[[str], object],
    ) -> None:
        self._faults = faults
        self._requests = requests
        self._failed = failed
        self._num_calls = 0  # written by: faulty
        self._broken: dict[int, list[int]] = {}
        """Grants whose KV is to be wrong, by `id` of a batch in flight."""  # written by: faulty
        self.echo = make_echo(lambda batch: self._broken.get(id(batch), ()))
        self.catch_up, self.close = self.echo.catch_up, self.echo.close

    @property
    def num_in_flight(self) -> int:
        """Launched steps that no caller has waited for."""
        return self.echo.num_in_flight

    @property
    def num_launched_ahead(self) -> int:
        """Steps launched while another was in flight."""
        return self.echo.num_launched_ahead

    def launch(self, batch: Batch) -> StepHandle:
        """Queue a step, or raise if the fault says so."""
        fault = self._faults.get(self._num_calls)
        self._num_calls += 1
        if fault is None:
            return self.echo.launch(batch)
        by_row = {request.row: request for request in self._requests()}
        requests = [by_row[row] for row in batch.rows.tolist()]
        if fault in (Fault.LAUNCH, Fault.INTERRUPTED_LAUNCH):
            self._fail(requests)
            raise KeyboardInterrupt if fault is Fault.INTERRUPTED_LAUNCH else RuntimeError("launch failed")
        grants: list[int] = {
            Fault.WAIT: list(range(len(requests))),
            Fault.NO_TOKEN: sorted([*batch.sampled.tolist(), *batch.pooled[:, 0].tolist()])[self._num_calls % 2 :: 2],
            Fault.INTERRUPTED_WAIT: [],
        }[fault]
        self._broken[id(batch)] = grants

        def end() -> None:
            del self._broken[id(batch)]
            self._fail(requests[grant] for grant in grants)

        return _FaultyStep(self.echo.launch(batch), fault, end)

    def _fail(self, requests: Iterable[Request]) -> None:
        for request in requests:
            if request.finish is None:
                self._failed(request.request_id)


class _FaultyStep:
    """A launched step with a fault. Calls `end` when it has been computed."""

    def __init__(self, step: EchoStep, fault: Fault, end: Callable[[], None]) -> None:
        self._step = step
        self._fault = fault
        self._end = end
        self._is_raised = False  # written by: faulty

    def drafts(self) -> Sequence[Sequence[int]]:
        """Return the drafts of the constrained grants."""
        return self._step.drafts()

    def constrain(self, masks: Int32) -> None:
        """Pass on the masks."""
        self._step.constrain(masks)

    def wait(self) -> StepResult:
        """Return the result of the step, or raise if the fault says so."""
        if self._fault is Fault.INTERRUPTED_WAIT and not self._is_raised:
            self._is_raised = True
            raise KeyboardInterrupt
        result = self._step.wait()
        self._end()
        if self._fault is Fault.WAIT:
            raise RuntimeError("step failed")
        return result
