"""Links keep the order of frames, respect the timeout, and end a wait when their stage must stop."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import pytest
import zmq

from memory_link import MemoryLink
from pagewood.server.messages.links import Receiver, Sender, ZmqReceiver, ZmqSender, address


class Stop:
    """A stop signal under the control of the test."""

    def __init__(self) -> None:
        self._read_end, self._write_end = os.pipe()
        self._stopped = False

    def __call__(self) -> bool:
        return self._stopped

    def fileno(self) -> int:
        return self._read_end

    def give(self) -> None:
        self._stopped = True
        os.write(self._write_end, b"x")

    def close(self) -> None:
        os.close(self._read_end)
        os.close(self._write_end)


@dataclass
class Link:
    sender: Sender
    receiver: Receiver
    stop: Stop


@pytest.fixture(params=["zmq", "memory"])
def link(request: pytest.FixtureRequest, tmp_path: Path) -> Generator[Link]:
    stop = Stop()
    if request.param == "memory":
        memory = MemoryLink(stopping=stop)
        yield Link(memory, memory, stop)
        stop.close()
        return
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sender = ZmqSender(context, address(tmp_path, "stage"))  # before the receiver exists
    receiver = ZmqReceiver(context, address(tmp_path, "stage"), stopping=stop)
    yield Link(sender, receiver, stop)
    sender.close()
    receiver.close()
    context.term()
    stop.close()


def test_frames_arrive_in_order(link: Link) -> None:
    sent = [b"%d" % n + b"x" * (n * n) for n in range(500)]
    for frame in sent:
        link.sender.send(frame)
    received: list[bytes] = []
    while len(received) < len(sent):
        received += link.receiver.receive(timeout_s=10)
    assert received == sent


def test_an_empty_link_returns_after_its_timeout(link: Link) -> None:
    assert link.receiver.receive(timeout_s=0) == []
    before_s = time.monotonic()
    assert link.receiver.receive(timeout_s=0.05) == []
    assert time.monotonic() - before_s >= 0.04


def test_a_wait_ends_with_a_frame(link: Link) -> None:
    received: list[bytes] = []
    thread = threading.Thread(target=lambda: received.extend(link.receiver.receive(timeout_s=None)))
    thread.start()
    link.sender.send(b"x")
    thread.join(10)
    assert received == [b"x"]


def test_a_wait_ends_when_the_stage_must_stop(link: Link) -> None:
    thread = threading.Thread(target=lambda: link.receiver.receive(timeout_s=None))
    thread.start()
    link.stop.give()
    if isinstance(link.receiver, MemoryLink):
        link.receiver.wake()
    thread.join(10)
    assert not thread.is_alive()
    assert link.receiver.receive(timeout_s=None) == []


def test_a_sender_outlives_its_receiver(tmp_path: Path) -> None:
    stop = Stop()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sender = ZmqSender(context, address(tmp_path, "stage"))
    for incarnation in range(3):
        receiver = ZmqReceiver(context, address(tmp_path, "stage"), stopping=stop)
        sent = b"%d" % incarnation
        while True:  # a frame on its way to a receiver that closes is lost; later frames are not
            sender.send(sent)
            if sent in receiver.receive(timeout_s=0.02):
                break
        receiver.close()
    sender.close()
    context.term()
    stop.close()


def test_a_path_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="socket path must be <= 107 bytes"):
        address(tmp_path / ("x" * 100), "stage")
