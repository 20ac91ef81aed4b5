"""The engine's inbox and outbox over links, and its regular sign of life."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from pagewood.engine.api import Command, Delta
from pagewood.server import wire
from pagewood.server.links import Receiver, Sender

PULSE_BUSY_S = 0.05
PULSE_IDLE_S = 1.0


class SharedSender:
    """A sender for several threads. Invariant: at most one thread sends at any time."""

    __slots__ = ("_lock", "_sender")

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._lock = threading.Lock()

    def send(self, frame: bytes) -> None:
        """Send a frame when no other thread does."""
        with self._lock:
            self._sender.send(frame)


class Heartbeat:
    """Sends the `Pulse` of one engine: at most every `PULSE_BUSY_S` while it works, and before it waits.

    While a long step keeps the engine's thread from calling `busy` or `idle`, a second thread repeats the last pulse,
    with the time that the step has taken. So a long step looks different from a dead process.

    Invariant: when the engine waits, its last Pulse holds its present counters.

    Args:
        outbox: may be used by several threads.
        incarnation: number of engine processes of this server before this one.
        model: what the HTTP process has to know of the model.
        counters: returns the engine's counters; called in the engine's thread only.
        interval_s: longest time between two pulses.
        clock: seconds.
    """

    __slots__ = (
        *("_clock", "_counters", "_incarnation", "_interval_s", "_last", "_last_s", "_lock", "_model", "_outbox"),
        *("_seen_s", "_stopping", "_thread"),
    )

    def __init__(
        self,
        outbox: Sender,
        *,
        incarnation: int,
        model: wire.Model,
        counters: Callable[[], dict[str, int]],
        interval_s: float = PULSE_IDLE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._outbox = outbox
        self._incarnation = incarnation
        self._model = model
        self._counters = counters
        self._interval_s = interval_s
        self._clock = clock
        self._lock = threading.Lock()
        """Held while a pulse is sent: pulses keep their order."""
        self._last: dict[str, int] | None = None  # written by: _send
        self._last_s = float("-inf")  # written by: _send_pulse. When `_last` was last sent
        self._seen_s = clock()  # written by: busy, idle. When the engine's thread last looked for commands
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Start the thread that repeats pulses."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread; call it before the outbox is closed."""
        self._stopping.set()
        self._thread.join()

    def busy(self) -> None:
        """Send a pulse if the last one is old; the engine calls this between two steps."""
        self._seen_s = self._clock()
        if self._seen_s - self._last_s >= PULSE_BUSY_S:
            self._send(self._counters())

    def idle(self) -> None:
        """Send a pulse if the last one is old or its counters have changed; the engine calls this before it waits."""
        self._seen_s = self._clock()
        counters = self._counters()
        if counters != self._last or self._seen_s - self._last_s >= self._interval_s:
            self._send(counters)

    def repeat(self) -> None:
        """Send the last pulse again if it is old; called from the thread of the heartbeat."""
        with self._lock:
            now_s = self._clock()
            if self._last is not None and now_s - self._last_s >= self._interval_s:
                self._send_pulse(self._last, now_s, step_s=max(0.0, now_s - self._seen_s))

    def _run(self) -> None:
        while not self._stopping.wait(self._interval_s):
            self.repeat()

    def _send(self, counters: dict[str, int]) -> None:
        with self._lock:
            self._last = counters
            self._send_pulse(counters, self._clock(), step_s=0.0)

    def _send_pulse(self, counters: dict[str, int], now_s: float, *, step_s: float) -> None:
        self._last_s = now_s
        pulse = wire.Pulse(incarnation=self._incarnation, model=self._model, counters=counters, step_s=step_s)
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
