"""`pagewood serve` on two hosts, which are two process groups here: one serves, and the other one computes with it."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lost_requests import SHORT, text_of
from profiles import recorded
from serving import LIMIT_S, Server, children, command, is_alive, until

SECRET = "a secret of some length"


class Node:
    """`pagewood serve --node-rank 1` as a process."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self._stderr = (folder / "node-stderr").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pagewood.server", "serve", *arguments, "--node-rank", "1"],
            stdin=subprocess.DEVNULL,
            stderr=self._stderr,
            start_new_session=True,
        )

    def ranks(self) -> list[int]:
        return list(children(self.process.pid).values())

    def stderr(self) -> str:
        self._stderr.seek(0)
        return self._stderr.read()

    def close(self) -> int:
        self.process.terminate()
        code = self.process.wait(LIMIT_S)
        self._stderr.close()
        return code


@pytest.fixture(params=["--tensor-parallel-size", "--pipeline-parallel-size"])
def options(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[str, ...]:
    with socket.create_server(("127.0.0.1", 0)) as one:
        address = f"127.0.0.1:{one.getsockname()[1]}"
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    secret.chmod(0o600)
    return (
        *(request.param, "2", "--nnodes", "2", "--master-addr", address, "--node-secret-file", str(secret)),
        *("--threads", "1", "--max-running-requests", "4", "--max-total-tokens", "1024"),
        *("--host-cache-gb", "0.02", "--disk-cache-path", str(tmp_path / "kv"), "--disk-cache-gb", "0.05"),
    )


@pytest.fixture
def node(tmp_path: Path, options: tuple[str, ...]) -> Generator[Node]:
    node = Node(tmp_path, *options)
    yield node
    if node.process.poll() is None:
        node.close()


def num_loaded(server: Server) -> float:
    """Return the tokens that came back from the host cache."""
    found = re.search(r'tier_tokens_total\{[^}]*event="loaded"[^}]*\} (\S+)', server.http.get("/metrics").text)
    return 0.0 if found is None else float(found[1])


@pytest.mark.slow
def test_two_hosts_serve_one_model(tmp_path: Path, options: tuple[str, ...], node: Node) -> None:
    """A rank is lost while pages come back from the host caches; the next group goes on with the requests."""
    bodies = [{**SHORT, "prompt": [100 + (i * step) % 300 for i in range(500)]} for step in (1, 7, 11)]

    def answers() -> list[str]:
        return [text_of(server.http.post("/v1/completions", json=body).text) for body in bodies]

    server = Server(tmp_path, *options)
    try:
        until(lambda: server.ready()["status"] == "ready")
        expected = answers()
        metrics = server.http.get("/metrics").text
        assert 'node="node 0",rank="0"} 1' in metrics
        assert 'node="node 1 (127.0.0.1)",rank="1"} 1' in metrics
        assert "nodes have met: node 1 at 127.0.0.1" in server.stderr()
        assert "follows 127.0.0.1:" in node.stderr()
        assert "node 1 of 2 has no HTTP" in node.stderr()
        spans = recorded(server)
        assert "step" in spans["device"]
        assert {"draw", "step"} <= spans["device, rank 1"]
        (rank,) = node.ranks()
        is_lost, found = threading.Event(), list[list[str]]()

        def ask() -> None:
            while not is_lost.is_set():
                found.append(answers())

        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(ask)
            try:
                until(lambda: num_loaded(server) > 0)
                os.kill(rank, signal.SIGKILL)
                until(lambda: server.ready()["incidents"]["restarts"] > 0)
            finally:
                is_lost.set()
            asked.result()
        assert all(one == expected for one in found)
        until(lambda: server.ready()["status"] == "ready")
        assert node.ranks() not in ([], [rank])
        assert server.ready()["status"] == "ready"
        until(lambda: num_loaded(server) > 0)
        lost = r"the process of rank 1( \(stage 1\))? has ended with code -9 \[rank 1 on node 1 \(127\.0\.0\.1\)\]"
        assert re.search(lost, server.stderr())
        (rank,) = node.ranks()
    finally:
        server.close()
    until(lambda: not is_alive(rank))
    assert node.process.poll() is None  # it waits for the next group
    until(lambda: "the group is closed" in node.stderr())
    assert SECRET not in server_log(tmp_path) + node.stderr()
    assert node.close() == 0


def server_log(folder: Path) -> str:
    return (folder / "stderr").read_text()


def test_options_of_hosts_are_refused_by_name() -> None:
    found = command("serve", "--nnodes", "2", "--tensor-parallel-size", "2", "--master-addr", "10.0.0.1:5")
    assert found.returncode == 2
    assert "node_secret_file must be given unless master_addr is a loopback address, got 10.0.0.1:5" in found.stderr


@pytest.mark.slow
def test_a_node_that_cannot_begin_says_why(tmp_path: Path, options: tuple[str, ...]) -> None:
    node = Node(tmp_path, *options, "--node-secret-file", "/nowhere")
    assert node.process.wait(LIMIT_S) == 1
    assert "error: node_secret_file cannot be read" in node.stderr()
    assert node.close() == 1
