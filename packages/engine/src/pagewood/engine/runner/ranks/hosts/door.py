"""Where a node listens for others: connections of those who know the secret, and nothing of anybody else."""

from __future__ import annotations

import logging
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from pagewood.engine.runner.ranks.hosts.messages import MOST_BYTES, MOST_HELLO_BYTES, Hello, Refused, decode, encode
from pagewood.engine.runner.ranks.hosts.secret import WrongSecretError, prove
from pagewood.engine.runner.ranks.link import Link, WrongMessageError

_log = logging.getLogger(__name__)

MEET_S = 5.0
"""How long the end of a connection may take to prove the secret and say who it is."""
_PAUSE_S = 0.01
_MOST_AT_ONCE = 16
"""Connections that have not proved the secret; further ones are closed at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Guest:
    """A connection whose other end has proved the secret."""

    connection: socket.socket
    host: str
    """Address of the other end."""
    hello: Hello

    def link(self) -> Link:
        """Return the connection as one for messages."""
        return Link(self.connection, most_bytes=MOST_BYTES)

    def refuse(self, reason: str, *, is_final: bool) -> None:
        """Tell the other end why it is not welcome, and close the connection."""
        _log.warning("node %d at %s is refused: %s", self.hello.node, self.host, reason)
        with suppress(OSError):
            self.link().send(encode(Refused(reason=reason, is_final=is_final)))
        self.connection.close()


class Door:
    """Listens as long as it is entered. Each connection has a thread until it has said who it is, or too long.

    Args:
        host: address on which it listens.
        port: 0: any.
        secret: of all nodes.

    Raises:
        OSError: the port cannot be had.
    """

    __slots__ = ("_guests", "_is_closing", "_listening", "_places", "_secret", "_thread")

    def __init__(self, host: str, port: int, secret: bytes) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listening = socket.create_server((host, port), family=family, backlog=64)
        self._secret = secret
        self._guests: SimpleQueue[Guest] = SimpleQueue()
        self._is_closing = threading.Event()
        self._places = threading.BoundedSemaphore(_MOST_AT_ONCE)
        self._thread = threading.Thread(target=self._listen, name="door", daemon=True)
        self._thread.start()

    def __enter__(self) -> Door:
        return self

    def __exit__(self, *error: object) -> None:
        self._is_closing.set()
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._listening.close()
        self._thread.join()
        while (guest := self.next(timeout_s=0.0)) is not None:
            guest.connection.close()

    @property
    def port(self) -> int:
        """On which it listens."""
        return int(self._listening.getsockname()[1])

    def next(self, *, timeout_s: float) -> Guest | None:
        """Return the next host that has come in, or None if no further host has."""
        try:
            return self._guests.get(timeout=timeout_s) if timeout_s else self._guests.get_nowait()
        except Empty:
            return None

    def _listen(self) -> None:
        while True:
            try:
                connection, address = self._listening.accept()
            except OSError:  # the door is closed, or the other end has gone again
                if self._is_closing.wait(_PAUSE_S):
                    return
                continue
            if not self._places.acquire(blocking=False):
                connection.close()
                continue
            arguments = (connection, str(address[0]))
            threading.Thread(target=self._meet, args=arguments, name="door-guest", daemon=True).start()

    def _meet(self, connection: socket.socket, host: str) -> None:
        try:
            prove(connection, self._secret, listens=True, limit_s=MEET_S)
            connection.settimeout(MEET_S)
            hello = decode(Link(connection, most_bytes=MOST_HELLO_BYTES).receive())
            if not isinstance(hello, Hello):
                raise WrongMessageError(f"a node must say hello, got {type(hello).__name__}")
            self._guests.put(Guest(connection=connection, host=host, hello=hello))
        except WrongSecretError:
            _log.warning("%s has another secret, and was turned away", host)
            connection.close()
        except (WrongMessageError, EOFError, OSError) as error:
            _log.warning("%s is no node, and was turned away: %s", host, error or type(error).__name__)
            connection.close()
        finally:
            self._places.release()


def dial(host: str, port: int, secret: bytes, hello: Hello) -> socket.socket:
    """Connect to the door of another node, and say hello; sending and receiving have a limit of `MEET_S`.

    Raises:
        WrongSecretError: the other node has another secret.
        WrongMessageError: it is none.
        OSError: nobody listens, or the connection is lost.
        EOFError: likewise.
    """
    connection = socket.create_connection((host, port), timeout=MEET_S)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        prove(connection, secret, listens=False, limit_s=MEET_S)
        connection.settimeout(MEET_S)
        Link(connection).send(encode(hello))
    except BaseException:
        connection.close()
        raise
    return connection
