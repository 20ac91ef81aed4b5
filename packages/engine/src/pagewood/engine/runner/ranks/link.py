"""A connection of two processes that has no name, and carries messages of bytes, each behind its length."""

from __future__ import annotations

import socket
import struct

_LENGTH = struct.Struct("<Q")


class Link:
    """One end of a connection. At any time one thread may send, and one may receive.

    Args:
        connection: a connected stream, which this object closes.
    """

    __slots__ = ("_connection",)

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

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
        self._connection.sendall(_LENGTH.pack(len(message)) + message)

    def receive(self) -> bytearray:
        """Wait for a message.

        Raises:
            EOFError: the other process has ended.
            OSError: likewise.
        """
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        return self._read(length)

    def close(self) -> None:
        """Close it."""
        self._connection.close()

    def _read(self, length: int) -> bytearray:
        found = bytearray(length)
        rest = memoryview(found)
        while rest:
            num_read = self._connection.recv_into(rest)
            if not num_read:
                raise EOFError
            rest = rest[num_read:]
        return found
