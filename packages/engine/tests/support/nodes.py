"""A node as a process, and a proxy that can stop to forward."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec

from pagewood.engine.api import EngineConfig

PROGRAM = Path(__file__).parent / "following_node.py"


class NodeProcess:
    """A node other than 0, as a program of its own.

    Args:
        config: of the node.
        log: file for what it logs.
    """

    def __init__(self, config: EngineConfig, log: Path) -> None:
        self._log = log
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(PROGRAM.parent), *sys.path])}
        with log.open("a") as file:
            self.process = subprocess.Popen(
                [sys.executable, str(PROGRAM), msgspec.json.encode(config).decode()],
                stderr=file,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=environment,
            )

    @property
    def log(self) -> str:
        """What it has logged."""
        return self._log.read_text()

    def ranks(self) -> list[int]:
        """Return the process ids of its ranks."""
        found: list[int] = []
        for task in Path(f"/proc/{self.process.pid}/task").glob("*/children"):
            found += map(int, task.read_text().split())
        return sorted(found)

    def close(self) -> None:
        """End it, whatever its state is."""
        self.process.send_signal(signal.SIGCONT)
        self.process.terminate()
        try:
            self.process.wait(30)
        finally:
            self.process.kill()
            self.process.wait()


class Proxy:
    """Forwards connections to a port, until it is told to stop; then it keeps them open, and forwards nothing."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listening.getsockname()[1])
        self.is_silent = threading.Event()
        self._is_over = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_over = True
        self._thread.join()

    def _run(self) -> None:
        other: dict[socket.socket, socket.socket] = {}
        with selectors.DefaultSelector() as ready, self._listening:
            ready.register(self._listening, selectors.EVENT_READ)
            while not self._is_over:
                for key, _ in [] if self.is_silent.is_set() else ready.select(0.05):
                    if key.fileobj is self._listening:
                        ends = self._listening.accept()[0], socket.socket()
                        try:
                            ends[1].connect(("127.0.0.1", self._port))
                        except ConnectionRefusedError:
                            for one in ends:
                                one.close()
                            continue
                        for one, two in (ends, ends[::-1]):
                            other[one] = two
                            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                            ready.register(one, selectors.EVENT_READ)
                        continue
                    one = key.fileobj
                    assert isinstance(one, socket.socket)
                    if not self._forward(one, other[one]):
                        for end in (one, other[one]):
                            ready.unregister(end)
                            del other[end]
                            end.close()
                        break  # what else was ready may be closed
                if self.is_silent.is_set():
                    time.sleep(0.05)
        for one in other:
            one.close()

    @staticmethod
    def _forward(one: socket.socket, two: socket.socket) -> bool:
        try:
            data = one.recv(1 << 16)
            two.sendall(data)
        except OSError:
            return False
        return bool(data)
