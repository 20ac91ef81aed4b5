"""One-way links that carry frames (bytes) between two stages: ZMQ between processes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import zmq


class Sender(Protocol):
    """The sending end of a link. One thread at a time sends."""

    def send(self, frame: bytes) -> None:
        """Send a frame, in order, without waiting for the receiver."""
        ...


class Receiver(Protocol):
    """The receiving end of a link. One thread receives."""

    def receive(self, *, timeout_s: float | None) -> Sequence[bytes]:
        """Return the frames that arrived; wait up to `timeout_s` for the first (0: do not wait, None: no limit).

        Returns an empty list after the timeout, and as soon as the stage must stop.
        """
        ...


class Stopping(Protocol):
    """Whether a stage must stop, and a file descriptor that becomes readable when it must."""

    def __call__(self) -> bool:
        """Return whether to stop."""
        ...

    def fileno(self) -> int:
        """Return the descriptor."""
        ...


def address(folder: Path, name: str) -> str:
    """Return the ZMQ address of the stage `name` among the sockets in `folder`.

    Raises:
        ValueError: the path is too long for a Unix socket.
    """
    path = folder / f"{name}.sock"
    if len(str(path).encode()) > zmq.IPC_PATH_MAX_LEN:
        raise ValueError(f"socket path must be <= {zmq.IPC_PATH_MAX_LEN} bytes, got {path}")
    return f"ipc://{path}"


# The number of requests is limited on arrival (live.py), which limits every queue after it. So the queues need no
# high-water mark, at which a send would wait.
NO_MARK = 0
RECONNECT_MS = 20


class ZmqSender:
    """Sends to the stage that listens on `address`. It may start later, and may be restarted."""

    __slots__ = ("_address", "_context", "_socket")

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self._context = context
        self._address = address  # written by: reconnect
        self._socket = self._connected()  # written by: reconnect

    def reconnect(self, address: str | None = None) -> None:
        """Drop the queued frames and connect again, so that no later frame goes to a receiver that died.

        Args:
            address: of another receiver; None: the same.
        """
        self._address = address or self._address
        self._socket.close()
        self._socket = self._connected()

    def send(self, frame: bytes) -> None:
        """Queue a frame."""
        self._socket.send(frame, copy=len(frame) < 65536)

    def close(self) -> None:
        """Drop the queued frames."""
        self._socket.close()

    def _connected(self) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.PUSH)
        socket.setsockopt(zmq.SNDHWM, NO_MARK)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        socket.connect(self._address)
        return socket


class ZmqReceiver:
    """Listens on `address`; `stopping` ends a wait."""

    __slots__ = ("_poller", "_socket", "_stopping")

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, *, stopping: Stopping) -> None:
        self._socket = context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, NO_MARK)
        self._socket.bind(address)
        self._stopping = stopping
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(stopping.fileno(), zmq.POLLIN)

    def receive(self, *, timeout_s: float | None) -> Sequence[bytes]:
        """Return all frames that have arrived."""
        frames = self._drain()
        if not frames and timeout_s != 0 and not self._stopping():
            self._poller.poll(None if timeout_s is None else math.ceil(timeout_s * 1000))
            frames = self._drain()
        return frames

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when frames arrive after `receive` has returned all."""
        return self._socket.fileno()

    def close(self) -> None:
        """Stop listening."""
        self._socket.close(linger=0)

    def _drain(self) -> list[bytes]:
        frames: list[bytes] = []
        try:
            while True:
                frames.append(self._socket.recv(zmq.NOBLOCK))
        except zmq.Again:
            return frames
