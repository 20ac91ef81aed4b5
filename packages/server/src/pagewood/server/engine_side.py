"""The engine's inbox and outbox over links, and its regular sign of life."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from pagewood.engine.api import Command, Delta
from pagewood.server import wire
from pagewood.server.links import Receiver, Sender

PULSE_BUSY_S = 0.05
PULSE_IDLE_S = 1.0


class Heartbeat:
    """Sends the `Pulse` of one engine: at most every `PULSE_BUSY_S` while it works, and before it waits.

    Invariant: while the engine waits, its last Pulse holds its present counters.
    """

    __slots__ = ("_clock", "_counters", "_incarnation", "_last", "_last_s", "_model", "_outbox")

    def __init__(
        self,
        outbox: Sender,
        *,
        incarnation: int,
        model: wire.Model,
        counters: Callable[[], dict[str, int]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._outbox = outbox
        self._incarnation = incarnation
        self._model = model
        self._counters = counters
        self._clock = clock
        self._last: dict[str, int] | None = None  # written by: _send
        self._last_s = float("-inf")  # written by: _send. When `_last` was sent

    def busy(self) -> None:
        """Send a pulse if the last one is old; called while the engine works."""
        if self._clock() - self._last_s >= PULSE_BUSY_S:
            self._send(self._counters())

    def idle(self) -> None:
        """Send a pulse if the counters have changed or the last one is old; called before the engine waits."""
        counters = self._counters()
        if counters != self._last or self._clock() - self._last_s >= PULSE_IDLE_S:
            self._send(counters)

    def _send(self, counters: dict[str, int]) -> None:
        self._last = counters
        self._last_s = self._clock()
        pulse = wire.Pulse(incarnation=self._incarnation, model=self._model, counters=counters)
        self._outbox.send(wire.encode(pulse))


class EngineInbox:
    """The commands of the tokenizers, as `pagewood.engine.api.Inbox`.

    The heartbeat needs the engine, and the engine is built with its inbox; so the heartbeat is attached later.
    """

    __slots__ = ("_heartbeat", "_receiver", "_stopped")

    def __init__(self, receiver: Receiver, *, stopped: Callable[[], bool]) -> None:
        self._receiver = receiver
        self._stopped = stopped
        self._heartbeat: Heartbeat | None = None  # written by: attach

    def attach(self, heartbeat: Heartbeat) -> None:
        """Send pulses from now on."""
        self._heartbeat = heartbeat

    def receive(self, *, timeout_s: float | None) -> Sequence[Command]:
        """Return the commands that arrived. A wait without limit ends when the engine must stop."""
        if timeout_s == 0:
            if self._heartbeat is not None:
                self._heartbeat.busy()
            return self._read(0)
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            if self._heartbeat is not None:
                self._heartbeat.idle()
            left_s = PULSE_IDLE_S if deadline_s is None else deadline_s - time.monotonic()
            commands = self._read(min(max(left_s, 0.0), PULSE_IDLE_S))
            if commands or self._stopped() or (deadline_s is not None and time.monotonic() >= deadline_s):
                return commands

    def _read(self, timeout_s: float) -> list[Command]:
        frames = self._receiver.receive(timeout_s=timeout_s)
        return [message.command for message in wire.read(wire.engine_commands, frames)]


class EngineOutbox:
    """The results of the engine, as `pagewood.engine.api.Outbox`: one message per step."""

    __slots__ = ("_incarnation", "_sender")

    def __init__(self, sender: Sender, *, incarnation: int = 0) -> None:
        self._sender = sender
        self._incarnation = incarnation

    def send(self, deltas: Sequence[Delta]) -> None:
        """Send the results of one step."""
        if deltas:
            self._sender.send(wire.encode(wire.Step(tuple(deltas), self._incarnation)))
