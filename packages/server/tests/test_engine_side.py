"""Pulses are rare while the engine works, and sent before it waits; its inbox ends a wait when it must stop."""

from __future__ import annotations

import threading

import msgspec

from memory_link import MemoryLink
from pagewood.engine.api import Abort, Delta, Pause
from pagewood.server.messages import wire
from pagewood.server.processes.engine_side import PULSE_BUSY_S, PULSE_IDLE_S, EngineInbox, EngineOutbox, Heartbeat

MODEL = wire.Model(max_length=10, vocab_size=5)


class Recorder:
    """A sender that records the messages."""

    def __init__(self) -> None:
        self.messages: list[wire.FromEngine] = []

    def send(self, frame: bytes) -> None:
        self.messages.append(wire.from_engine.decode(frame))


def test_pulses() -> None:
    sent = Recorder()
    now_s = 0.0
    counters = {"num_running": 1}
    heartbeat = Heartbeat(
        sent,
        pulse=lambda: wire.Pulse(incarnation=3, model=MODEL, counters=dict(counters)),
        clock=lambda: now_s,
    )
    heartbeat.busy()
    heartbeat.busy()
    assert sent.messages == [wire.Pulse(incarnation=3, model=MODEL, counters={"num_running": 1})]
    now_s += PULSE_BUSY_S
    heartbeat.busy()
    assert len(sent.messages) == 2
    heartbeat.idle()  # nothing has changed
    assert len(sent.messages) == 2
    counters["num_running"] = 0
    heartbeat.idle()  # the counters changed before it waits
    assert len(sent.messages) == 3
    now_s += PULSE_IDLE_S
    heartbeat.idle()  # a sign of life
    assert len(sent.messages) == 4


def test_a_long_step_repeats_the_last_pulse_with_its_length() -> None:
    sent = Recorder()
    now_s = 100.0
    pulse = wire.Pulse(incarnation=0, model=MODEL, counters={"num_steps": 7})
    heartbeat = Heartbeat(sent, pulse=lambda: pulse, clock=lambda: now_s)
    heartbeat.repeat()  # nothing was sent yet
    assert sent.messages == []
    heartbeat.busy()
    heartbeat.repeat()  # the last pulse is new
    for _ in range(3):  # the engine's thread computes a step
        now_s += 40.0
        heartbeat.repeat()
    heartbeat.busy()
    first, *repeated = sent.messages
    lengths = [message.step_s for message in sent.messages if isinstance(message, wire.Pulse)]
    assert lengths == [0.0, 40.0, 80.0, 120.0]
    assert isinstance(first, wire.Pulse)
    assert [msgspec.structs.replace(message, step_s=0.0) for message in repeated] == [first] * 3
    now_s += 1.0
    heartbeat.idle()
    last = sent.messages[-1]
    assert isinstance(last, wire.Pulse)
    assert last.step_s == 0.0


def test_a_pulse_of_a_long_step_is_corrected_as_soon_as_the_engine_waits() -> None:
    sent = Recorder()
    now_s = 100.0
    heartbeat = Heartbeat(sent, pulse=lambda: wire.Pulse(incarnation=0, model=MODEL, counters={}), clock=lambda: now_s)
    heartbeat.idle()
    now_s += 5.0
    heartbeat.repeat()
    heartbeat.idle()
    assert [message.step_s for message in sent.messages if isinstance(message, wire.Pulse)] == [0.0, 5.0, 0.0]
    now_s += 33.0  # the process stood still
    heartbeat.start_again()
    heartbeat.repeat()
    now_s += 2.0
    heartbeat.repeat()
    assert [message.step_s for message in sent.messages[3:] if isinstance(message, wire.Pulse)] == [0.0, 2.0]


def test_commands_and_steps() -> None:
    link = MemoryLink(stopping=lambda: False)
    inbox = EngineInbox(link, stopped=lambda: False)
    abort = Abort(request_id="a")
    link.send(b"rubbish")
    link.send(wire.encode(abort))
    assert inbox.receive(timeout_s=None) == [abort]
    assert inbox.receive(timeout_s=0) == []
    assert inbox.receive(timeout_s=0.01) == []
    sent = Recorder()
    outbox = EngineOutbox(sent)
    outbox.send([])
    outbox.send([Delta(request_id="a"), Delta(request_id="b")])
    assert sent.messages == [wire.Step((Delta(request_id="a"), Delta(request_id="b")))]


def test_an_engine_that_begins_paused_is_paused_before_it_gets_what_has_arrived() -> None:
    link = MemoryLink(stopping=lambda: False)
    pause, abort = Pause(request_id="pause", retract=True), Abort(request_id="a")
    inbox = EngineInbox(link, stopped=lambda: False, first=[pause])
    link.send(wire.encode(abort))
    assert inbox.receive(timeout_s=0) == [pause, abort]
    assert inbox.receive(timeout_s=0) == []


def test_a_wait_without_limit_ends_when_the_engine_must_stop() -> None:
    stopped = threading.Event()
    link = MemoryLink(stopping=stopped.is_set)
    inbox = EngineInbox(link, stopped=stopped.is_set)
    thread = threading.Thread(target=lambda: inbox.receive(timeout_s=None))
    thread.start()
    stopped.set()
    link.wake()
    thread.join(10)
    assert not thread.is_alive()
