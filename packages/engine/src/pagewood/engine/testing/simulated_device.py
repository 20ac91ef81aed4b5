"""A device that takes a modelled time for each step, computes its tokens on a thread of its own, and counts idle time.

It makes the work of the host measurable without a GPU: work during a step costs nothing, and work between two steps is
idle time of the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Protocol

import numpy as np

from pagewood.engine.core.loop import ConstrainedHandle, Runner, StepHandle
from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.core.messages.batch import Batch
from pagewood.engine.core.messages.result import StepResult
from pagewood.schedpolicy import StepModel

_SPIN_S = 0.0002
"""A thread that sleeps may wake up this much late, so the last part of a wait asks the clock again and again."""

StepSeconds = Callable[[Batch], float]
"""How long a device computes a batch."""


class DeviceClock(Protocol):
    """The clock of a simulated device."""

    def now(self) -> float:
        """Return seconds since any moment."""
        ...

    def wait_until(self, end_s: float) -> None:
        """Wait until `now` is at least `end_s`."""
        ...


class WallClock:
    """Real time: a wait lasts as long as it says."""

    now = staticmethod(time.perf_counter)

    def wait_until(self, end_s: float) -> None:
        """Sleep until shortly before the end, then ask the clock until it is there."""
        rest_s = end_s - time.perf_counter() - _SPIN_S
        if rest_s > 0:
            time.sleep(rest_s)
        while time.perf_counter() < end_s:
            time.sleep(0)  # other threads may run


class VirtualClock:
    """Time that passes only while something waits, so a run is exact and repeatable. Invariant: it never goes back."""

    def __init__(self) -> None:
        self._now_s = 0.0  # written by: wait_until

    def now(self) -> float:
        """Return the seconds that were waited for."""
        return self._now_s

    def wait_until(self, end_s: float) -> None:
        """Let the time pass at once."""
        self._now_s = max(self._now_s, end_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTimes:
    """The times of a simulated device since its first launch, or since `SimulatedDevice.forget_times`."""

    num_steps: int
    busy_s: float
    """Seconds in which it computed."""
    idle_s: float
    """Seconds between steps in which nothing was launched."""
    masked_s: float
    """Seconds in which it waited for the masks of a step that was computed otherwise."""

    @property
    def idle_share(self) -> float:
        """The part of all time in which it did not compute, in [0, 1]."""
        idle_s = self.idle_s + self.masked_s
        return idle_s / (self.busy_s + idle_s) if idle_s else 0.0


class SimulatedDevice:
    """Computes the steps of another runner in launch order, one at a time, each for a given time; a `core.loop.Runner`.

    A step begins when it is launched, or when the step before it ends if that is later. The draws of a step with
    grammars wait for their masks. These times are computed, so they do not depend on when a thread of this process
    wakes up; a result is not available before its step ends.

    Args:
        runner: computes tokens, in the thread of this device, when its handles are waited for: an `EchoRunner` or
            `MadeUpTokens`. It must not read what the engine's thread writes (`held_pages`).
        step_s: seconds of each step, or how long a batch takes.
        clock: real or virtual time.

    Raises:
        ValueError: `step_s` is negative.
    """

    def __init__(self, runner: Runner, *, step_s: float | StepSeconds, clock: DeviceClock | None = None) -> None:
        if not callable(step_s) and not step_s >= 0:  # true of NaN
            raise ValueError(f"step_s must be >= 0, got {step_s}")
        self.clock = clock or WallClock()
        self._runner = runner
        self._step_s = step_s
        self._steps: SimpleQueue[SimulatedStep | None] = SimpleQueue()
        self._free_s: float | None = None
        """When the latest step ended; None: there was none since times were forgotten."""
        # written by: simulated_device
        self._num_steps = 0  # written by: simulated_device
        self._busy_s = self._idle_s = self._masked_s = 0.0  # written by: simulated_device
        self._thread = Thread(target=self._run, name="simulated device", daemon=True)
        self._thread.start()

    def launch(self, batch: Batch) -> SimulatedStep:
        """Queue a step."""
        duration_s = self._step_s(batch) if callable(self._step_s) else self._step_s
        step = SimulatedStep(
            self._runner.launch(batch), self.clock, duration_s=duration_s, is_masked=bool(len(batch.constrained))
        )
        self._steps.put(step)
        return step

    def times(self) -> DeviceTimes:
        """Return its times; call it when all launched steps have been waited for."""
        return DeviceTimes(num_steps=self._num_steps, busy_s=self._busy_s, idle_s=self._idle_s, masked_s=self._masked_s)

    def forget_times(self) -> None:
        """Restart the times with the next launch; call it when all launched steps have been waited for."""
        self._free_s = None
        self._num_steps = 0
        self._busy_s = self._idle_s = self._masked_s = 0.0

    def close(self) -> None:
        """Compute the launched steps, and end the thread; a second call does nothing."""
        self._steps.put(None)
        self._thread.join()
        self._runner.close()

    def _run(self) -> None:
        while (step := self._steps.get()) is not None:
            begin_s = step.launched_s if self._free_s is None else max(step.launched_s, self._free_s)
            computed_s = begin_s + step.duration_s
            end_s = max(computed_s, step.wait_for_masks())
            self._num_steps += 1
            self._busy_s += step.duration_s
            self._idle_s += 0.0 if self._free_s is None else begin_s - self._free_s
            self._masked_s += end_s - computed_s
            self._free_s = end_s
            step.compute(end_s)


class SimulatedStep:
    """A launched step of a simulated device; a `core.loop.ConstrainedHandle`."""

    def __init__(self, step: StepHandle, clock: DeviceClock, *, duration_s: float, is_masked: bool) -> None:
        """Wrap a launched step of the runner that computes tokens.

        Args:
            step: of that runner.
            clock: of the device.
            duration_s: how long the device computes it, without a wait for masks.
            is_masked: whether `constrain` will be called.
        """
        self._step = step
        self._clock = clock
        self.duration_s = duration_s
        self.launched_s = clock.now()
        self._masked_s = 0.0
        """When its masks came, if it needs any."""  # written by: constrain
        self._needs_masks = _gate() if is_masked else None
        self._is_computed = _gate()
        self._end_s = 0.0  # written by: compute
        self._result: StepResult | None = None  # written by: compute
        self._error: BaseException | None = None  # written by: compute

    def drafts(self) -> Sequence[Sequence[int]]:
        """Return the drafts of the constrained grants."""
        assert isinstance(self._step, ConstrainedHandle)
        return self._step.drafts()

    def constrain(self, masks: Int32) -> None:
        """Let the constrained tokens be drawn."""
        assert isinstance(self._step, ConstrainedHandle)
        assert self._needs_masks is not None
        self._step.constrain(masks)
        self._masked_s = self._clock.now()
        self._needs_masks.release()

    def wait(self) -> StepResult:
        """Wait until the device has computed it, and return the result.

        Raises:
            Exception: of the runner that computes tokens.
        """
        with self._is_computed:
            pass
        self._clock.wait_until(self._end_s)
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def wait_for_masks(self) -> float:
        """Wait for the masks if it needs any, and return when they came; called by the device."""
        if self._needs_masks is not None:
            with self._needs_masks:
                pass
        return self._masked_s

    def compute(self, end_s: float) -> None:
        """Compute the tokens, which will be there at `end_s`; called by the device."""
        self._end_s = end_s
        try:
            self._result = self._step.wait()
        except BaseException as error:  # `wait` raises it again
            self._error = error
        self._is_computed.release()


def seconds_by(model: StepModel) -> StepSeconds:
    """Return how long batches take by a model of steps.

    A grant counts as a decode, which reads the KV of all tokens up to its own, if it computes one token of a request
    that was admitted earlier, and draws the next.
    """

    def step_s(batch: Batch) -> float:
        is_decode = np.zeros(len(batch.counts), np.bool_)
        is_decode[batch.sampled] = batch.counts[batch.sampled] == 1
        is_decode[batch.admitted] = False
        num_decode = int(is_decode.sum())
        num_kv = int((batch.starts[is_decode] + 1).sum())
        starts, counts = batch.starts[~is_decode].astype(np.int64), batch.counts[~is_decode].astype(np.int64)
        num_pairs = int((counts * starts + counts * (counts + 1) // 2).sum())
        return model.step_s(
            num_prefill=batch.num_tokens - num_decode, num_decode=num_decode, num_kv=num_kv, num_pairs=num_pairs
        )

    return step_s


def _gate() -> Lock:
    """Return a lock that is held until the event that it stands for has happened."""
    lock = Lock()
    lock.acquire()
    return lock
