"""The engine's inbox and outbox over links, and its regular sign of life."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from pagewood.engine.api import Command, Delta, EngineConfig
from pagewood.server.dashboard.snapshots import INTERVAL_S, Snapshots
from pagewood.server.messages import wire
from pagewood.server.messages.links import Receiver, Sender
from pagewood.server.messages.measurement import Measurement
from pagewood.server.processes.cache_reports import CacheReports
from pagewood.server.processes.engine_profiles import Profiles
from pagewood.server.processes.kv_events import EventPump
from pagewood.server.processes.standstill import stood_still

if TYPE_CHECKING:
    from pagewood.engine.core.loop import Engine

PULSE_BUSY_S = 0.05
PULSE_IDLE_S = 1.0

_LOOP = "pagewood.engine.core.loop"
_DEVICE_CALLS = {("_finish", "wait"), ("_launch_plan", "launch"), ("_constrain", "drafts")}
"""Functions of the engine's loop, and the runner's functions that they call."""

_NOT_COUNTS = ("speculation", "free_pages_by_rank")
"""Fields of the engine's counters that are no numbers; messages have fields of their own for them."""

_log = logging.getLogger(__name__)


def pulse_of(engine: Engine, *, incarnation: int = 0, replica: int = 0) -> wire.Pulse:
    """Return the pulse of an engine at this moment; call it in the engine's thread."""
    info, counters = engine.info, engine.counters()
    counts, found, weights = counters.speculation, engine.measurement(), engine.weights
    return wire.Pulse(
        incarnation=incarnation,
        replica=replica,
        model=wire.Model(
            max_length=info.max_length,
            vocab_size=info.vocab_size,
            eos_token_ids=info.eos_token_ids,
            generates=info.generates,
            takes_images=info.takes_images,
            num_pages=info.num_pages,
            page_size=info.page_size,
            page_bytes=info.page_bytes,
            rank_places=info.rank_places,
            config=shown_config(engine.config),
        ),
        frozen_s=engine.frozen_s,
        adapter_versions=engine.adapter_versions(),
        weight_version=weights[0],
        weights_digest=weights[1],
        asleep=tuple(sorted(engine.asleep)),
        counters={one.name: getattr(counters, one.name) for one in fields(counters) if one.name not in _NOT_COUNTS},
        free_pages_by_rank=counters.free_pages_by_rank,
        speculation=None if counts is None else msgspec.convert(counts, wire.Speculation, from_attributes=True),
        measurement=None if found is None else msgspec.convert(found, Measurement, from_attributes=True),
    )


def shown_config(config: EngineConfig) -> dict[str, Any]:
    """Return a configuration as JSON values: folders by their last name only, logits processors by their names."""
    found = {one.name: getattr(config, one.name) for one in fields(config)}
    for name in ("model", "disk_cache_path", "speculative_model", "decision_log", "expert_map", "node_secret_file"):
        found[name] = None if found[name] is None else Path(found[name]).name
    found["adapters"] = [name for name, _ in config.adapters]
    found["logits_processors"] = [name for name, _ in config.logits_processors]
    return found


def log_speculation(counts: wire.Speculation | None) -> None:
    """Log the counts of drafts in one line; log nothing if the engine does not speculate."""
    if counts is None:
        return
    positions = zip(counts.accepted_by_position, counts.drafted_by_position, strict=True)
    shares = [f"{num_accepted / num:.0%}" for num_accepted, num in positions if num]
    _log.info(
        "speculation: %d draft tokens, %d accepted%s; %.2f s for drafts, %.2f s for the rest of the steps; "
        "draft lengths: %s",
        counts.num_drafted,
        counts.num_accepted,
        f" (by position: {' '.join(shares)})" if shares else "",
        counts.draft_s,
        counts.verify_s,
        counts.reason or "no reason given",
    )


def is_in_runner(thread: int | None) -> bool:
    """Return whether a thread is in a call of a runner at this moment, from its stack, which costs that thread nothing.

    Args:
        thread: its identifier; None: of no thread.
    """
    frame = None if thread is None else sys._current_frames().get(thread)  # pyright: ignore[reportPrivateUsage]
    called = ""
    while frame is not None:
        caller = frame.f_code.co_name
        if frame.f_globals.get("__name__") == _LOOP and (caller, called) in _DEVICE_CALLS:
            return True
        called, frame = caller, frame.f_back
    return False


class SharedSender:
    """A sender for several threads. Invariant: at most one thread sends at any time."""

    __slots__ = ("_lock", "_sender")

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._lock = threading.Lock()

    def send(self, frame: bytes) -> None:
        """Send a frame as soon as no other thread is sending."""
        with self._lock:
            self._sender.send(frame)


class Heartbeat:
    """Sends the `Pulse` of one engine: at most every `PULSE_BUSY_S` while it works, and before it waits.

    While a long step keeps the engine's thread from calling `busy` or `idle`, a second thread repeats the last pulse,
    with the time that the step has taken. So a long step looks different from a dead process.

    Invariant: when the engine waits, its last Pulse holds its present counters.

    Args:
        outbox: may be used by several threads.
        pulse: returns the engine's pulse of this moment; called in the engine's thread only.
        interval_s: longest time between two pulses.
        clock: seconds.
    """

    __slots__ = (
        *("_clock", "_engine_thread", "_interval_s", "_last", "_last_s", "_lock", "_outbox", "_pulse", "_seen_s"),
        *("_stopping", "_thread"),
    )

    def __init__(
        self,
        outbox: Sender,
        *,
        pulse: Callable[[], wire.Pulse],
        interval_s: float = PULSE_IDLE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._outbox = outbox
        self._pulse = pulse
        self._interval_s = interval_s
        self._clock = clock
        self._lock = threading.Lock()
        """Held while a pulse is sent: pulses keep their order."""
        self._last: wire.Pulse | None = None  # written by: _send, repeat
        self._last_s = float("-inf")  # written by: _send_pulse. When `_last` was last sent
        self._seen_s = clock()  # written by: busy, idle, start_again. When the engine's thread last looked for commands
        self._engine_thread: int | None = None  # written by: busy, idle
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
            self._engine_thread = threading.get_ident()
            self._send(self._pulse())

    def idle(self) -> None:
        """Send a pulse if the last one is old or its counters have changed; the engine calls this before it waits."""
        self._seen_s = self._clock()
        self._engine_thread = threading.get_ident()
        pulse = self._pulse()
        if pulse != self._last or self._seen_s - self._last_s >= self._interval_s:
            self._send(pulse)

    def repeat(self) -> None:
        """Send the last pulse again if it is old; called from the thread of the heartbeat."""
        with self._lock:
            now_s = self._clock()
            if self._last is not None and now_s - self._last_s >= self._interval_s:
                step_s = max(0.0, now_s - self._seen_s)
                is_in_device = is_in_runner(self._engine_thread)
                again = msgspec.structs.replace(self._last, step_s=step_s, is_in_device=is_in_device)
                self._last = again  # `idle` sends the corrected pulse
                self._send_pulse(again, now_s)

    def start_again(self) -> None:
        """Start the time of the step again; called from the thread of the heartbeat."""
        self._seen_s = self._clock()

    def _run(self) -> None:
        began_s = self._clock()
        while not self._stopping.wait(self._interval_s):
            if stood_still(self._clock() - began_s, wanted_s=self._interval_s):
                self.start_again()
            self.repeat()
            began_s = self._clock()

    def _send(self, pulse: wire.Pulse) -> None:
        with self._lock:
            self._last = pulse
            self._send_pulse(pulse, self._clock())

    def _send_pulse(self, pulse: wire.Pulse, now_s: float) -> None:
        self._last_s = now_s
        self._outbox.send(wire.encode(pulse))


class EngineInbox:
    """The commands of the tokenizers, as `pagewood.engine.api.Inbox`.

    The heartbeat needs the engine, and the engine is built with its inbox; so the heartbeat is attached later. The same
    holds for the publisher of cache changes.

    Args:
        receiver: gets the messages of the tokenizers.
        stopped: whether the engine must stop.
        first: commands that the engine gets before any from the tokenizers.
    """

    __slots__ = (
        *("_cache_reports", "_events", "_first", "_heartbeat", "_profiles", "_receiver", "_snapshots", "_stopped"),
    )

    def __init__(self, receiver: Receiver, *, stopped: Callable[[], bool], first: Sequence[Command] = ()) -> None:
        self._receiver = receiver
        self._first = first  # written by: _read
        self._stopped = stopped
        self._heartbeat: Heartbeat | None = None  # written by: attach
        self._events: EventPump | None = None  # written by: attach
        self._profiles: Profiles | None = None  # written by: attach
        self._snapshots: Snapshots | None = None  # written by: attach
        self._cache_reports: CacheReports | None = None  # written by: attach

    def attach(
        self,
        heartbeat: Heartbeat,
        events: EventPump | None = None,
        *,
        profiles: Profiles | None = None,
        snapshots: Snapshots | None = None,
        cache_reports: CacheReports | None = None,
    ) -> None:
        """From now on, send pulses, publish the changes of the cache, take profiles, and send snapshots and reports."""
        self._heartbeat = heartbeat
        self._events = events
        self._profiles = profiles
        self._snapshots = snapshots
        self._cache_reports = cache_reports

    def receive(self, *, timeout_s: float | None) -> Sequence[Command]:
        """Return the commands that arrived. A wait without limit ends when the engine must stop."""
        if self._events is not None:
            self._events.turn()
        if self._cache_reports is not None:
            self._cache_reports.turn()
        if self._profiles is not None:
            self._profiles.turn()
        if timeout_s == 0:
            if self._heartbeat is not None:
                self._heartbeat.busy()
            if self._snapshots is not None and self._snapshots.is_watched:
                self._snapshots.turn()
            return self._read(0)
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            if self._heartbeat is not None:
                self._heartbeat.idle()
            longest_s = PULSE_IDLE_S
            if self._snapshots is not None and self._snapshots.is_watched:
                self._snapshots.turn()
                longest_s = INTERVAL_S
            left_s = longest_s if deadline_s is None else deadline_s - time.monotonic()
            if self._profiles is not None:
                self._profiles.turn()
                left_s = min(left_s, self._profiles.left_s)
            commands = self._read(min(max(left_s, 0.0), longest_s))
            if commands or self._stopped() or (deadline_s is not None and time.monotonic() >= deadline_s):
                return commands

    def _read(self, timeout_s: float) -> list[Command]:
        frames = self._receiver.receive(timeout_s=timeout_s)
        found: list[Command] = [*self._first]
        self._first = ()
        for message in wire.read(wire.engine_commands, frames):
            match message:
                case wire.Profile():
                    if self._profiles is not None:
                        self._profiles.begin(message)
                case wire.Watch():
                    if self._snapshots is not None:
                        self._snapshots.watch(message)
                case wire.ShowCache():
                    if self._cache_reports is not None:
                        self._cache_reports.begin_anew()
                case _:
                    found.append(message)
        return found


class EngineOutbox:
    """The results of the engine, as `pagewood.engine.api.Outbox`: one message per step."""

    __slots__ = ("_incarnation", "_replica", "_sender")

    def __init__(self, sender: Sender, *, incarnation: int = 0, replica: int = 0) -> None:
        self._sender = sender
        self._incarnation = incarnation
        self._replica = replica

    def send(self, deltas: Sequence[Delta]) -> None:
        """Send the results of one step."""
        if deltas:
            self._sender.send(wire.encode(wire.Step(tuple(deltas), self._incarnation, self._replica)))
