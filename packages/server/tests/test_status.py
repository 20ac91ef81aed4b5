"""What /ready and the terminal say of an engine, from its birth through its death to the next one."""

from __future__ import annotations

import pytest

from pagewood.server import wire
from pagewood.server.console import Console
from pagewood.server.status import STALLED_AFTER_S, EngineState, EngineStatus

MODEL = wire.Model(max_length=10, vocab_size=5)


class Clock:
    """Time that the test decides."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def pulse(incarnation: int, *, relay: int = 0) -> wire.Pulse:
    return wire.Pulse(incarnation=incarnation, model=MODEL, counters={"num_steps": 1}, relay=relay)


def test_the_life_of_an_engine() -> None:
    clock = Clock()
    status = EngineStatus(clock=clock)
    assert (status.state, status.detail) == (EngineState.STARTING, "the engine process is starting")
    status.take(wire.Loading(incarnation=0, what="reading weights", done=3, total=9))
    assert (status.state, status.detail) == (EngineState.STARTING, "reading weights (3/9)")
    assert status.model is None
    status.take(pulse(0))
    assert (status.state, status.model, status.counters) == (EngineState.READY, MODEL, {"num_steps": 1})
    clock.now_s += STALLED_AFTER_S + 1
    assert (status.state, status.detail) == (EngineState.STALLED, "the engine has been silent for 61 s")
    status.take(pulse(0))
    assert status.state is EngineState.READY
    status.lost(next_incarnation=1)
    assert (status.state, status.counters) == (EngineState.DOWN, {})
    status.take(pulse(0))  # late words of the dead
    assert status.state is EngineState.DOWN
    status.take(wire.Loading(incarnation=1, what="importing torch", done=0, total=1))
    assert (status.state, status.detail) == (EngineState.STARTING, "importing torch")
    status.take(pulse(1))
    assert status.state is EngineState.READY


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


def test_the_terminal_hears_each_thing_once(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    status = EngineStatus(clock=clock)
    console = Console(url="http://127.0.0.1:1", model_name="m", clock=clock)
    for done in range(50):  # of what changes fast, a line a second
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
