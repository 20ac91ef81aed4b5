"""Clients whose connection a chosen HTTP process of a server has."""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path

import httpx

from serving import LIMIT_S, Server, until


def entrances(server: Server) -> list[int]:
    """Return the process ids of the entrances that run."""
    found: list[int] = []
    for tasks in Path(f"/proc/{server.process.pid}/task").glob("*/children"):
        for pid in map(int, tasks.read_text().split()):
            if b"entrance_process" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return sorted(found)


@contextmanager
def client_of(server: Server, pid: int, *, headers: Mapping[str, str] | None = None) -> Generator[httpx.Client]:
    """Provide a client with one connection, which that process has; it fails if it must open another one."""
    found: list[httpx.Client] = []

    def is_there() -> bool:
        limits = httpx.Limits(max_connections=1, keepalive_expiry=LIMIT_S)
        client = httpx.Client(base_url=server.url, timeout=LIMIT_S, limits=limits, headers=headers)
        port = _port(client.get("/health"))
        if _owner(port, server_port=httpx.URL(server.url).port or 0) != pid:
            client.close()
            return False

        def check(response: httpx.Response) -> None:
            assert _port(response) == port, "the server has closed the connection"

        client.event_hooks = {"response": [check]}  # not ours
        found.append(client)
        return True

    until(is_there)
    with closing(found[0]) as client:
        yield client


def _port(response: httpx.Response) -> int:
    """Return the port of the client."""
    return response.extensions["network_stream"].get_extra_info("client_addr")[1]


def _owner(port: int, *, server_port: int) -> int | None:
    """Return the process that has a connection between two ports of this machine, at the server's end."""
    ends = f":{server_port:04X}", f":{port:04X}"
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    inodes = {line[9] for line in lines if line[1].endswith(ends[0]) and line[2].endswith(ends[1])}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            links = [os.readlink(link) for link in (process / "fd").iterdir()]
        except OSError:
            continue
        if inodes & {link.removeprefix("socket:[").removesuffix("]") for link in links}:
            return int(process.name)
    return None
