"""The state of the engine in /ready and in the terminal, from its start over its death to the next engine."""

from __future__ import annotations

import msgspec
import pytest

from pagewood.server.messages import wire
from pagewood.server.observe.console import Console
from pagewood.server.requests.status import SILENT_LIMIT_S, STEP_LIMIT_S, EngineState, EngineStatus
from recorded import Clock

MODEL = wire.Model(max_length=10, vocab_size=5)


SPECULATION = wire.Speculation(
    num_drafted=3,
    num_accepted=1,
    drafted_by_position=(2, 1),
    accepted_by_position=(1, 0),
    draft_s=0.5,
    verify_s=1.5,
    num_rebuilt=12,
    num_postponed=3,
    num_short=1,
    reason="few requests",
)


def pulse(incarnation: int, *, relay: int = 0, step_s: float = 0.0) -> wire.Pulse:
    return wire.Pulse(incarnation=incarnation, model=MODEL, counters={"num_steps": 1}, relay=relay, step_s=step_s)


def test_states_of_an_engine() -> None:
    clock = Clock()
    status = EngineStatus(clock=clock)
    assert (status.state, status.detail) == (EngineState.STARTING, "the engine process is starting")
    status.take(wire.Loading(incarnation=0, what="reading weights", done=3, total=9))
    assert (status.state, status.detail) == (EngineState.STARTING, "reading weights (3/9)")
    assert status.model is None
    status.take(pulse(0))
    assert (status.state, status.model, status.counters) == (EngineState.READY, MODEL, {"num_steps": 1})
    clock.now_s += SILENT_LIMIT_S + 1
    assert (status.state, status.detail) == (EngineState.STALLED, "the engine has been silent for 61 s")
    status.take(pulse(0))
    assert status.state is EngineState.READY
    for step_s in (SILENT_LIMIT_S + 1, STEP_LIMIT_S):  # a long step is not a dead engine
        status.take(pulse(0, step_s=step_s))
        assert status.state is EngineState.READY
    status.take(pulse(0, step_s=STEP_LIMIT_S + 1))
    assert (status.state, status.detail) == (EngineState.STALLED, "the engine has computed one step for 901 s")
    status.lost(next_incarnation=1)
    assert (status.state, status.counters) == (EngineState.DOWN, {})
    status.take(pulse(0))  # a late message of the dead engine
    assert status.state is EngineState.DOWN
    status.take(wire.Loading(incarnation=1, what="importing torch", done=0, total=1))
    assert (status.state, status.detail) == (EngineState.STARTING, "importing torch")
    status.take(pulse(1))
    assert status.state is EngineState.READY


def test_counts_of_speculation_are_those_of_the_last_pulse() -> None:
    status = EngineStatus()
    assert status.speculation is None
    status.take(msgspec.structs.replace(pulse(0), speculation=SPECULATION))
    assert status.speculation == SPECULATION
    status.lost(next_incarnation=1)
    assert status.speculation is None
    status.take(pulse(1))
    assert status.speculation is None


def test_the_engine_is_not_ready_until_it_is_heard_through_the_new_detokenizer() -> None:
    status = EngineStatus()
    status.take(pulse(0))
    status.relay_lost(next_incarnation=1)
    assert (status.state, status.detail) == (EngineState.DOWN, "the detokenizer process died and is being restarted")
    status.take(pulse(0))  # passed on by the process that died
    assert status.state is EngineState.DOWN
    status.relay_lost(next_incarnation=2)  # the second one dies before its first message
    status.take(pulse(0, relay=1))
    assert status.state is EngineState.DOWN
    status.take(pulse(0, relay=2))
    assert status.state is EngineState.READY
    status.relay_lost(next_incarnation=3)
    status.lost(next_incarnation=1)
    status.take(wire.Loading(incarnation=1, what="importing torch", done=0, total=1, relay=3))
    assert (status.state, status.detail) == (EngineState.STARTING, "importing torch")
    status.take(pulse(1, relay=3))
    assert status.state is EngineState.READY


def test_the_terminal_shows_each_message_once(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    status = EngineStatus(clock=clock)
    console = Console(url="http://127.0.0.1:1", model_names=("m",), clock=clock)
    for done in range(50):  # at most one line per second
        status.take(wire.Loading(incarnation=0, what="compiling", done=done, total=50))
        console.show(status)
        clock.now_s += 0.125
    out, err = capsys.readouterr()
    assert err.splitlines() == [f"pagewood: compiling ({done}/50)" for done in (0, 8, 16, 24, 32, 40, 48)]
    assert out == ""
    for _ in range(2):
        status.take(pulse(0))
        console.show(status)
    out, err = capsys.readouterr()
    assert out.count("Pagewood serves m at http://127.0.0.1:1 (ready after 6.2 s)") == 1
    assert '-d \'{"model": "m", "messages": [{"role": "user", "content": "Hello!"}]}\'' in out
    assert err == ""
