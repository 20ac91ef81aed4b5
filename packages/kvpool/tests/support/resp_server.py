"""A small server of the Redis protocol in a thread, and the real one in a process if it is installed."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from io import BufferedIOBase
from socketserver import StreamRequestHandler, ThreadingTCPServer
from threading import Event

from pagewood.kvpool.tiers import RedisPlace, RedisStore

Answer = Callable[[Sequence[bytes]], bytes | None]
"""Returns the answer to a command as it is sent, or None if there is none and the connection stays open."""


class RespServer:
    """Knows AUTH, SELECT, SET, GET and EXISTS; a test may change what it holds, and how it answers."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.password: bytes | None = None
        self.answer: Answer = self.usual
        self.num_connections = self.most_connections = 0
        self.commands: list[bytes] = []
        self.users: list[RedisStore] = []
        self.ends = Event()
        server = self

        class Handler(StreamRequestHandler):
            disable_nagle_algorithm = True

            def handle(self) -> None:
                server.serve(self.connection, self.rfile)

        class Server(ThreadingTCPServer):
            daemon_threads = True
            block_on_close = False
            allow_reuse_address = True

        self._server = Server(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]

    def serve(self, connection: socket.socket, file: BufferedIOBase) -> None:
        self.num_connections += 1
        self.most_connections = max(self.most_connections, self.num_connections)
        try:
            while (head := file.readline())[:1] == b"*":
                command: list[bytes] = []
                for _ in range(int(head[1:])):
                    size = int(file.readline()[1:])
                    command.append(file.read(size))
                    file.read(2)
                self.commands.append(command[0])
                answer = self.answer(command)
                if answer is None:
                    self.ends.wait(60)
                    return
                connection.sendall(answer)
                if answer.endswith(b"HANG UP"):
                    return
        except OSError:
            return
        finally:
            self.num_connections -= 1

    def usual(self, command: Sequence[bytes]) -> bytes:
        match command:
            case [b"AUTH", *_, password] if password == self.password:
                return b"+OK\r\n"
            case [b"SELECT", _]:
                return b"+OK\r\n"
            case [b"SET", key, value]:
                self.values[key] = value
                return b"+OK\r\n"
            case [b"GET", key]:
                value = self.values.get(key)
                return b"$-1\r\n" if value is None else b"$%d\r\n%b\r\n" % (len(value), value)
            case [b"EXISTS", key]:
                return b":%d\r\n" % (key in self.values)
            case _:
                return b"-ERR wrong\r\n"

    def run(self) -> None:
        self._server.serve_forever(0.02)

    def close(self) -> None:
        for user in self.users:
            user.close()
        self.ends.set()
        self._server.shutdown()
        self._server.server_close()


def place(port: int, *, timeout_s: float = 5.0) -> RedisPlace:
    return RedisPlace(host="127.0.0.1", port=port, timeout_s=timeout_s)


def redis_binary() -> str | None:
    """Return the path of a server that is installed."""
    return shutil.which("redis-server") or shutil.which("valkey-server")


@contextmanager
def redis_process(*options: str, port: int | None = None) -> Generator[tuple[int, subprocess.Popen[bytes]]]:
    """Run a real server on this machine's loopback, without files; yield its port and its process."""
    binary = redis_binary()
    assert binary is not None
    if port is None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = int(free.getsockname()[1])
    limits = ("--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", "/", "--loglevel", "warning")
    with subprocess.Popen(
        [binary, "--port", str(port), *limits, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            deadline_s = time.monotonic() + 30
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port), 1).close()
                    break
                except OSError:
                    assert process.poll() is None, "the server has ended"
                    assert time.monotonic() < deadline_s
                    time.sleep(0.02)
            yield port, process
        finally:
            process.kill()
