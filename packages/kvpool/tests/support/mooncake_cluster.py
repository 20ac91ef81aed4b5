"""A `mooncake_master` in a process of its own."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

MASTER = shutil.which("mooncake_master") or str(Path(sys.executable).parent / "mooncake_master")


def free_port() -> int:
    """Return a port of the loopback that nothing uses now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextmanager
def master_process(port: int | None = None) -> Generator[tuple[int, subprocess.Popen[bytes]]]:
    """Run a master on this machine's loopback, which waits long for clients; yield its port and its process."""
    port = free_port() if port is None else port
    limits = ("--rpc_address", "127.0.0.1", "--metrics_host", "127.0.0.1", "--enable_metric_reporting=false")
    patience = ("--client_ttl", "600")
    with subprocess.Popen(
        [MASTER, "--rpc_port", str(port), "--metrics_port", str(free_port()), *limits, *patience],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            deadline_s = time.monotonic() + 60
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port), 1).close()
                    break
                except OSError:
                    assert process.poll() is None, "the master has ended"
                    assert time.monotonic() < deadline_s
                    time.sleep(0.02)
            yield port, process
        finally:
            process.kill()
