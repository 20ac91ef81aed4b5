"""One connection to a server that speaks the Redis protocol (RESP 2). Every call ends by a given time."""

import socket
import time
from collections.abc import Sequence

_BUFFER_BYTES = 64 * 1024
_MAX_BUFFERS = 512
"""Largest number of buffers in one system call."""
_MAX_LINE = 4096
"""Longest line of an answer that is not the contents of a value, in bytes."""


class RespConnection:
    """Sends commands and reads answers, in the same order.

    Invariant: after an OSError it must be closed, because the rest of an answer may still be on its way. Times are
    those of `time.monotonic`, in seconds. Not thread-safe.

    Several commands may be sent before the first answer is read; the server reads on while it answers.
    """

    __slots__ = ("_buffer", "_end", "_socket", "_start")

    def __init__(self, host: str, port: int, *, until_s: float) -> None:
        """Connect.

        Raises:
            OSError: The server does not answer.
        """
        self._socket = socket.create_connection((host, port), timeout=_left(until_s))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = bytearray(_BUFFER_BYTES)
        self._start = self._end = 0  # of the unread bytes in the buffer; written by: _fill, _line, read_into

    @property
    def is_stale(self) -> bool:
        """Whether the server has closed the connection, or sends what was not asked for. No answer may be due."""
        if self._start < self._end:
            return True
        self._socket.setblocking(False)
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def send(self, commands: Sequence[Sequence[bytes | memoryview]], *, until_s: float) -> None:
        """Send commands, each a sequence of arguments.

        Raises:
            OSError: The server has not taken them in time.
        """
        buffers: list[bytes | memoryview] = []
        for command in commands:
            head = b"*%d\r\n" % len(command)
            for argument in command:
                buffers += (head + b"$%d\r\n" % len(argument), argument)
                head = b"\r\n"
            buffers.append(b"\r\n")
        first = 0
        while first < len(buffers):
            self._socket.settimeout(_left(until_s))
            n = self._socket.sendmsg(buffers[first : first + _MAX_BUFFERS])
            while first < len(buffers) and n >= len(buffers[first]):
                n -= len(buffers[first])
                first += 1
            if n:
                buffers[first] = memoryview(buffers[first])[n:]

    def line(self, *, until_s: float) -> bytes:
        """Return the next line: a kind of answer (`+`, `-`, `:`, `$`, `*`), and its text.

        Raises:
            OSError: It has not come in time, or is too long.
        """
        while (end := self._buffer.find(b"\r\n", self._start, self._end)) < 0:
            if self._end - self._start > _MAX_LINE:
                raise OSError("the server sent a line that is too long")
            self._fill(until_s)
        line = bytes(self._buffer[self._start : end])
        self._start = end + 2
        return line

    def read_into(self, memory: memoryview, *, until_s: float) -> None:
        """Read the next bytes of a value; `memory` has the type uint8.

        Raises:
            OSError: They have not come in time.
        """
        n = min(len(memory), self._end - self._start)
        memory[:n] = self._buffer[self._start : self._start + n]
        self._start += n
        while n < len(memory):
            self._socket.settimeout(_left(until_s))
            num_read = self._socket.recv_into(memory[n:])
            if not num_read:
                raise OSError("the server has closed the connection")
            n += num_read

    def skip(self, num_bytes: int, *, until_s: float) -> None:
        """Read the next bytes of a value, and forget them.

        Raises:
            OSError: They have not come in time.
        """
        scratch = memoryview(bytearray(min(num_bytes, _BUFFER_BYTES)))
        while num_bytes:
            part = scratch[: min(num_bytes, len(scratch))]
            self.read_into(part, until_s=until_s)
            num_bytes -= len(part)

    def close(self) -> None:
        """Disconnect."""
        self._socket.close()

    def _fill(self, until_s: float) -> None:
        """Read what has come into the buffer, at least one byte."""
        if self._start:
            unread = self._buffer[self._start : self._end]
            self._buffer[: len(unread)] = unread
            self._start, self._end = 0, len(unread)
        self._socket.settimeout(_left(until_s))
        n = self._socket.recv_into(memoryview(self._buffer)[self._end :])
        if not n:
            raise OSError("the server has closed the connection")
        self._end += n


def _left(until_s: float) -> float:
    """Return the seconds that are left.

    Raises:
        TimeoutError: The time is over.
    """
    left_s = until_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("the server has not answered in time")
    return left_s
