"""The devices of a model that is cut into stages, each of which takes a modelled time for each step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pagewood.engine.core.loop import Runner, StepHandle
from pagewood.engine.core.messages.batch import Batch
from pagewood.engine.core.messages.result import StepResult
from pagewood.engine.testing.simulated_device import DeviceTimes, VirtualClock


class SimulatedStages:
    """Computes the steps of another runner in launch order, stage by stage; a `core.loop.Runner`.

    A stage begins a step when the stage before has ended it, and it has ended the step before. The host takes no time
    unless `host_s` says so, so idle time is what the order of launches and waits costs.

    Args:
        runner: computes tokens, when its handles are waited for.
        stage_s: seconds that a stage takes for a batch, by stage.
        clock: passes while a step is waited for.
        host_s: seconds that pass before a launch.
    """

    def __init__(
        self, runner: Runner, *, stage_s: Sequence[Callable[[Batch], float]], clock: VirtualClock, host_s: float = 0.0
    ) -> None:
        self._host_s = host_s
        self.clock = clock
        self._runner = runner
        self._stage_s = stage_s
        self._free_s: list[float | None] = [None] * len(stage_s)
        """When each stage has ended its latest step; None: there was none."""  # written by: simulated_stages
        self._num_steps = 0  # written by: simulated_stages
        self._busy_s = [0.0] * len(stage_s)  # written by: simulated_stages
        self._idle_s = [0.0] * len(stage_s)  # written by: simulated_stages

    def launch(self, batch: Batch) -> StepHandle:
        """Queue a step."""
        self.clock.wait_until(self.clock.now() + self._host_s)
        there_s = self.clock.now()
        for stage, step_s in enumerate(self._stage_s):
            free_s, duration_s = self._free_s[stage], step_s(batch)
            begin_s = there_s if free_s is None else max(there_s, free_s)
            self._idle_s[stage] += 0.0 if free_s is None else begin_s - free_s
            self._busy_s[stage] += duration_s
            self._free_s[stage] = there_s = begin_s + duration_s
        self._num_steps += 1
        return _SimulatedStep(self._runner.launch(batch), self.clock, there_s)

    def times(self) -> list[DeviceTimes]:
        """Return the times of each stage since its first step, or since `forget_times`."""
        return [
            DeviceTimes(num_steps=self._num_steps, busy_s=busy_s, idle_s=idle_s, masked_s=0.0)
            for busy_s, idle_s in zip(self._busy_s, self._idle_s, strict=True)
        ]

    def forget_times(self) -> None:
        """Restart the times with the next launch."""
        self._num_steps = 0
        self._busy_s = [0.0] * len(self._stage_s)
        self._idle_s = [0.0] * len(self._stage_s)

    def close(self) -> None:
        """Close the runner."""
        self._runner.close()


class _SimulatedStep:
    """A launched step."""

    def __init__(self, step: StepHandle, clock: VirtualClock, end_s: float) -> None:
        self._step = step
        self._clock = clock
        self._end_s = end_s

    def wait(self) -> StepResult:
        """Wait until the last stage has ended it, and return the result."""
        self._clock.wait_until(self._end_s)
        return self._step.wait()
