"""What HTTP knows of the engine, from what the engine last said; every question costs constant time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from pagewood.server import wire

STALLED_AFTER_S = 60.0


class EngineState(Enum):
    """The words of `/ready`."""

    STARTING = "starting"
    READY = "ready"
    STALLED = "stalled"
    DOWN = "down"


@dataclass(slots=True, kw_only=True)
class EngineStatus:
    """The engine as HTTP sees it. Invariant: `model` is set from the first pulse of the first engine on."""

    clock: Callable[[], float] = time.monotonic
    incarnation: int = 0  # written by: lost
    """Which engine process counts; what an earlier one said is void."""
    model: wire.Model | None = None  # written by: take
    counters: dict[str, int] = field(default_factory=dict[str, int])  # written by: take, lost
    loading: wire.Loading | None = None  # written by: take, lost
    pulse_s: float | None = None  # written by: take, lost, relay_lost
    """When the last pulse of this incarnation came; None before the first."""
    relay: int = 0  # written by: relay_lost
    """Incarnation of the detokenizer process, which passes on what the engine sends."""
    is_cut_off: bool = False  # written by: take, relay_lost
    """Whether nothing of the engine has come through the present detokenizer process yet, and one died before it."""

    def take(self, message: wire.Loading | wire.Pulse) -> None:
        """Note what the engine says of itself."""
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
                self.pulse_s = self.clock()

    def lost(self, *, next_incarnation: int) -> None:
        """The engine process died; wait for the next."""
        self.incarnation = next_incarnation
        self.counters = {}
        self.loading = None
        self.pulse_s = None

    def relay_lost(self, *, next_incarnation: int) -> None:
        """Note that the detokenizer process died.

        What the engine sent may have died with it, until a message comes through the next one. So the engine is not
        ready until then, and no request begins whose answers could be lost without an error.
        """
        self.relay = next_incarnation
        self.is_cut_off = True
        self.pulse_s = None

    @property
    def seconds_since_pulse(self) -> float | None:
        """How long the engine has been silent; None before its first pulse."""
        return None if self.pulse_s is None else self.clock() - self.pulse_s

    @property
    def state(self) -> EngineState:
        """Whether the engine can serve."""
        silent_s = self.seconds_since_pulse
        if self.is_cut_off:
            return EngineState.DOWN
        if silent_s is None:
            return EngineState.DOWN if self.incarnation and self.loading is None else EngineState.STARTING
        return EngineState.STALLED if silent_s > STALLED_AFTER_S else EngineState.READY

    @property
    def detail(self) -> str:
        """What the engine is doing, for a person."""
        match self.state:
            case EngineState.STARTING if self.loading is not None and self.loading.total > 1:
                return f"{self.loading.what} ({self.loading.done}/{self.loading.total})"
            case EngineState.STARTING if self.loading is not None:
                return self.loading.what
            case EngineState.STARTING:
                return "the engine process is starting"
            case EngineState.READY:
                return "serving"
            case EngineState.STALLED:
                return f"the engine has been silent for {self.seconds_since_pulse:.0f} s"
            case EngineState.DOWN if self.is_cut_off:
                return "the detokenizer process died and is being restarted"
            case EngineState.DOWN:
                return "the engine process died and is started again"
