"""A connection of two processes that carries messages of bytes, each behind its length."""

from __future__ import annotations

import socket
import struct
import threading
import time

_LENGTH = struct.Struct("<Q")


class WrongMessageError(ValueError):
    """A message that the other end of a connection would not send if it were what it should be."""


class Link:
    """One end of a connection. Any thread may send, and one at a time may receive.

    Args:
        connection: a connected stream, which this object closes.
        most_bytes: of a message that is received; None: the other end is a process of this host that is trusted.
    """

    __slots__ = ("_connection", "_most_bytes", "_turn")

    def __init__(self, connection: socket.socket, *, most_bytes: int | None = None) -> None:
        self._connection = connection
        self._most_bytes = most_bytes
        self._turn = threading.RLock()
        """Held while a message is sent; a finalizer that logs may send behind it."""

    @classmethod
    def pair(cls) -> tuple[Link, socket.socket]:
        """Return one end, and the stream of the other for the process that will use it."""
        own, other = socket.socketpair()
        return cls(own), other

    def fileno(self) -> int:
        """Return its descriptor."""
        return self._connection.fileno()

    def send(self, message: bytes) -> None:
        """Send a message.

        Raises:
            OSError: the other process has ended.
        """
        with self._turn:
            self._connection.sendall(_LENGTH.pack(len(message)) + message)

    def receive(self) -> bytearray:
        """Wait for a message.

        Raises:
            EOFError: the other process has ended.
            OSError: likewise.
            WrongMessageError: the message is too long.
        """
        (length,) = _LENGTH.unpack(read_exactly(self._connection, _LENGTH.size))
        if self._most_bytes is not None and length > self._most_bytes:
            raise WrongMessageError(f"a message must have at most {self._most_bytes} bytes, got {length}")
        return read_exactly(self._connection, length)

    def shut(self) -> None:
        """End what waits for the connection, on both sides; it must be closed afterwards."""
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:  # the other process has ended
            return

    def close(self) -> None:
        """Close it."""
        self._connection.close()


def read_exactly(connection: socket.socket, length: int, *, ends_s: float | None = None) -> bytearray:
    """Wait for a number of bytes.

    Args:
        connection: a connected stream.
        length: number of bytes.
        ends_s: on the monotonic clock, after which none is waited for, however often some come; None: there is no end.

    Raises:
        EOFError: the other end has been closed.
        OSError: likewise, or the time is up.
    """
    found = bytearray(length)
    rest = memoryview(found)
    while rest:
        if ends_s is not None:
            connection.settimeout(max(0.001, ends_s - time.monotonic()))
        num_read = connection.recv_into(rest)
        if not num_read:
            raise EOFError
        rest = rest[num_read:]
    return found
