"""SignalHold: handlers wait for safe points."""

# ruff: noqa: PT012  # the tests check what happens inside the blocks

import signal
import threading
from collections.abc import Iterator
from types import FrameType

import pytest

from pagewood.engine.offline.signals import SignalHold

seen: list[int] = []


def note(signum: int, frame: FrameType | None) -> None:
    seen.append(signum)


def fail(signum: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"signal {signum}")


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    seen.clear()
    previous = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGALRM, signal.SIGTERM)}
    yield
    for signum, handler in previous.items():
        signal.signal(signum, handler)


def test_a_handler_runs_at_the_next_safe_point() -> None:
    signal.signal(signal.SIGINT, note)
    with SignalHold() as hold:
        signal.raise_signal(signal.SIGINT)
        assert seen == []
        hold.check()
        assert seen == [signal.SIGINT]
        hold.check()
        signal.raise_signal(signal.SIGINT)
        assert len(seen) == 1
    assert len(seen) == 2
    assert signal.getsignal(signal.SIGINT) is note


def test_an_exception_of_a_handler_is_raised_at_the_safe_point() -> None:
    signal.signal(signal.SIGALRM, fail)
    with pytest.raises(KeyboardInterrupt), SignalHold() as hold:
        signal.raise_signal(signal.SIGINT)
        hold.check()
        raise AssertionError("not reached")
    finished = False
    with pytest.raises(TimeoutError), SignalHold():
        signal.raise_signal(signal.SIGALRM)
        finished = True
    assert finished
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGALRM) is fail


def test_a_second_signal_before_a_safe_point_is_handled_at_once() -> None:
    with pytest.raises(KeyboardInterrupt), SignalHold():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("not reached")


def test_a_signal_long_after_the_last_safe_point_is_handled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagewood.engine.offline.signals._PATIENCE_S", -1.0)
    with pytest.raises(KeyboardInterrupt), SignalHold():
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("not reached")


def test_signals_without_a_python_handler_are_left_alone() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with SignalHold():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_another_thread_leaves_the_handlers_alone() -> None:
    found: list[object] = []

    def target() -> None:
        with SignalHold() as hold:
            hold.check()
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
    assert found == [signal.default_int_handler]
