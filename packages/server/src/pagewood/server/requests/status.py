"""The state of the engine as the HTTP process knows it from the engine's messages; every query takes constant time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from pagewood.engine.weight_commands import SleepTag
from pagewood.server.messages import wire
from pagewood.server.messages.measurement import Measurement
from pagewood.server.messages.sleep_state import SleepState

SILENT_LIMIT_S = 60.0
"""The engine process counts as stuck after this time without a pulse; one of its threads sends one per second."""
STEP_LIMIT_S = 900.0
"""The engine counts as stuck if one step takes longer. Under heavy load a step may take minutes."""
FROZEN_LIMIT_S = 60.0
"""The engine counts as stuck if no waiting request is admitted for this long although nothing runs."""


class EngineState(Enum):
    """The `status` of `/ready`."""

    STARTING = "starting"
    READY = "ready"
    OUTDATED = "outdated"
    STALLED = "stalled"
    DOWN = "down"


@dataclass(slots=True, kw_only=True)
class EngineStatus:
    """The engine as the HTTP process sees it. Invariant: `model` is set from the first pulse of the first engine on.

    Args:
        clock: seconds.
        silent_limit_s: the engine is stalled if no pulse has come for this long.
        step_limit_s: the engine is stalled if one step takes this long.
        frozen_limit_s: the engine is stalled if admission is frozen for this long.
    """

    clock: Callable[[], float] = time.monotonic
    silent_limit_s: float = SILENT_LIMIT_S
    step_limit_s: float = STEP_LIMIT_S
    frozen_limit_s: float = FROZEN_LIMIT_S
    incarnation: int = 0  # written by: lost
    """The engine process that counts; messages of earlier ones are dropped."""
    model: wire.Model | None = None  # written by: take
    counters: dict[str, int] = field(default_factory=dict[str, int])  # written by: take, lost
    free_pages_by_rank: tuple[int, ...] = ()
    """Where ranks divide KV memory by request, the free pages of each."""  # written by: take, lost
    speculation: wire.Speculation | None = None  # written by: take, lost
    """Counts of speculation; None: the engine does not speculate, or has sent no pulse."""
    measurement: Measurement | None = None  # written by: take, lost
    """None: the engine does not measure, or has sent no pulse."""
    adapter_versions: dict[str, str] = field(default_factory=dict[str, str])
    """Versions of the loaded adapters, by name."""  # written by: take
    weight_version: str = ""  # written by: take
    """Name of the weights at the last pulse; empty: those that the engine began with."""
    weights_digest: str | None = None
    """What tells KV of these weights apart at the last pulse; None: it is of those that the engine began with."""
    # written by: take
    outdated: str = ""  # written by: FleetWeights, lost
    """Why it gets no requests, although it works: its weights are not those of other replicas. Empty: they are."""
    asleep: tuple[SleepTag, ...] = ()  # written by: take
    """What slept at the last pulse."""
    loading: wire.Loading | None = None  # written by: take, lost
    pulse_s: float | None = None  # written by: take, lost, relay_lost, start_again
    """When the last pulse of this incarnation came; None before the first."""
    step_s: float = 0.0  # written by: take, lost, start_again
    """How long the present step had taken at the last pulse, if it is a long one."""
    is_in_device: bool = False  # written by: take, lost
    """Whether the engine's thread was in the runner at that pulse, if the step is a long one."""
    frozen_s: float = 0.0  # written by: take, lost, start_again
    """How long admission had been frozen at the last pulse."""
    first_pulse_s: float | None = None  # written by: take, lost
    """When the first pulse of this engine process came; None before it."""
    relay: int = 0  # written by: relay_lost
    """Incarnation of the detokenizer process, which passes on what the engine sends."""
    sleep: SleepState = field(default_factory=SleepState)  # written by: common.service
    """What sleeps. The next engine process begins like that."""
    paused: Literal["no", "in_place", "retract"] = "no"  # written by: common.service
    """Whether `/pause` has paused the engine, and how. The next engine process begins like that."""
    is_cut_off: bool = False  # written by: take, relay_lost
    """Whether a detokenizer process died and its successor has not passed on any message of the engine yet."""

    def take(self, message: wire.Loading | wire.Pulse) -> None:
        """Note a message of the engine; messages of earlier engine or detokenizer processes are dropped."""
        if message.incarnation != self.incarnation or message.relay != self.relay:
            return
        self.is_cut_off = False
        match message:
            case wire.Loading():
                self.loading = message
            case wire.Pulse():
                self.loading = None
                self.model = message.model
                self.counters = message.counters
                self.free_pages_by_rank = message.free_pages_by_rank
                self.speculation = message.speculation
                self.measurement = message.measurement
                self.adapter_versions = message.adapter_versions
                self.weight_version, self.weights_digest = message.weight_version, message.weights_digest
                self.asleep = message.asleep
                self.pulse_s = self.clock()
                self.first_pulse_s = self.first_pulse_s or self.pulse_s
                self.step_s = message.step_s
                self.is_in_device = message.is_in_device
                self.frozen_s = message.frozen_s

    def lost(self, *, next_incarnation: int) -> None:
        """Note that the engine process died, and expect the next one."""
        self.incarnation = next_incarnation
        self.outdated = ""
        self.counters = {}
        self.free_pages_by_rank = ()
        self.speculation = None
        self.measurement = None
        self.loading = None
        self.pulse_s = None
        self.first_pulse_s = None
        self.step_s = 0.0
        self.is_in_device = False
        self.frozen_s = 0.0

    def relay_lost(self, *, next_incarnation: int) -> None:
        """Note that the detokenizer process died.

        What the engine sent may have died with it, until a message comes through the next one. So the engine is not
        ready until then, and no request begins whose answers could be lost without an error.
        """
        self.relay = next_incarnation
        self.is_cut_off = True
        self.pulse_s = None

    def is_current(self, message: wire.Snapshot) -> bool:
        """Return whether a message is of the engine process that counts."""
        return message.incarnation == self.incarnation

    def start_again(self) -> None:
        """Let the time until now not count: this process stood still, and the engine probably did, too."""
        if self.pulse_s is not None:
            self.pulse_s = self.clock()
        self.step_s = self.frozen_s = 0.0

    @property
    def seconds_since_pulse(self) -> float | None:
        """Time since the engine's last pulse; None before its first one."""
        return None if self.pulse_s is None else self.clock() - self.pulse_s

    @property
    def seconds_since_first_pulse(self) -> float:
        """How long this engine process has been able to serve; 0 before its first pulse."""
        return 0.0 if self.first_pulse_s is None else self.clock() - self.first_pulse_s

    @property
    def state(self) -> EngineState:
        """Whether the engine can serve."""
        silent_s = self.seconds_since_pulse
        if self.is_cut_off:
            return EngineState.DOWN
        if silent_s is None:
            return EngineState.DOWN if self.incarnation and self.loading is None else EngineState.STARTING
        is_stalled = (
            silent_s > self.silent_limit_s or self.step_s > self.step_limit_s or self.frozen_s > self.frozen_limit_s
        )
        if is_stalled:
            return EngineState.STALLED
        return EngineState.OUTDATED if self.outdated else EngineState.READY

    @property
    def detail(self) -> str:
        """What the engine is doing, in words."""
        match self.state:
            case EngineState.STARTING if self.loading is not None and self.loading.total > 1:
                return f"{self.loading.what} ({self.loading.done}/{self.loading.total})"
            case EngineState.STARTING if self.loading is not None:
                return self.loading.what
            case EngineState.STARTING:
                return "the engine process is starting"
            case EngineState.READY:
                return "serving"
            case EngineState.OUTDATED:
                return self.outdated
            case EngineState.STALLED if self.step_s > self.step_limit_s:
                return f"the engine has computed one step for {self.step_s:.0f} s"
            case EngineState.STALLED if self.frozen_s > self.frozen_limit_s:
                return f"the engine has admitted no waiting request for {self.frozen_s:.0f} s"
            case EngineState.STALLED:
                return f"the engine has been silent for {self.seconds_since_pulse:.0f} s"
            case EngineState.DOWN if self.is_cut_off:
                return "the detokenizer process died and is being restarted"
            case EngineState.DOWN:
                return "the engine process died and is being restarted"
