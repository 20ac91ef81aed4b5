"""Nodes meet: those that belong together, of one generation, and nobody else."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from node_threads import free_port
from pagewood.engine.node_address import Address
from pagewood.engine.runner.ranks.hosts import meeting as meetings
from pagewood.engine.runner.ranks.hosts.door import dial
from pagewood.engine.runner.ranks.hosts.identity import Identity
from pagewood.engine.runner.ranks.hosts.meeting import Meeting, RefusedError, gather, join
from pagewood.engine.runner.ranks.hosts.messages import MOST_BYTES, Hello, Refused, decode
from pagewood.engine.runner.ranks.hosts.secret import WrongSecretError, prove, read_secret
from pagewood.engine.runner.ranks.link import Link, WrongMessageError

SECRET = b"a secret of some length"


def identity(node: int, num_nodes: int = 2, **others: Any) -> Identity:
    whole: dict[str, Any] = {
        "node": node,
        "num_nodes": num_nodes,
        "address": Address("127.0.0.1", 1),
        "secret": SECRET,
        "version": "1.0",
        "model": "ab" * 32,
        "config": {"page_size": "16"},
        **others,
    }
    return Identity(**whole)


class Gathering:
    """Node 0 that waits on a thread, and other nodes that join on threads."""

    def __init__(self, num_nodes: int = 2) -> None:
        self.address = Address("127.0.0.1", free_port())
        self.num_nodes = num_nodes
        self.is_over = threading.Event()
        self.missing: list[str] = []
        self._threads = ThreadPoolExecutor(8)
        self.found: Future[Meeting] = self._threads.submit(
            gather, identity(0, num_nodes, address=self.address), self._progress
        )
        self.others: list[Future[Meeting | None]] = []

    def join(self, one: Identity) -> Future[Meeting | None]:
        found = self._threads.submit(join, replace(one, address=self.address), self.is_over.is_set)
        self.others.append(found)
        return found

    def dial(self, hello: Hello, secret: bytes = SECRET) -> Link:
        return Link(dial(self.address.host, self.address.port, secret, hello), most_bytes=MOST_BYTES)

    def connect(self) -> socket.socket:
        while True:
            try:
                return socket.create_connection((self.address.host, self.address.port), timeout=20)
            except ConnectionRefusedError:
                continue

    def close(self) -> None:
        self.is_over.set()
        for one in (self.found, *self.others):
            if one.exception(60) is None and (meeting := one.result()) is not None:
                meeting.close()
        self._threads.shutdown()

    def _progress(self, what: str, done: int, total: int) -> None:
        assert 0 <= done <= total == self.num_nodes - 1
        self.missing.append(what)
        if self.is_over.is_set():
            raise SystemExit


@pytest.fixture
def gathering() -> Generator[Callable[..., Gathering]]:
    made: list[Gathering] = []

    def start(num_nodes: int = 2) -> Gathering:
        made.append(Gathering(num_nodes))
        return made[-1]

    yield start
    for one in made:
        one.close()


@pytest.mark.parametrize("num_nodes", [2, 4])
def test_all_nodes_are_connected_with_each_other(num_nodes: int, gathering: Callable[..., Gathering]) -> None:
    group = gathering(num_nodes)
    for node in reversed(range(1, num_nodes)):
        group.join(identity(node, num_nodes))
    found = [group.found.result(20), *reversed([one.result(20) for one in group.others])]
    nodes = [one for one in found if one is not None]
    assert len({one.generation for one in nodes}) == 1
    for node, one in enumerate(nodes):
        assert set(one.streams) == set(one.hosts) == set(range(num_nodes)) - {node}
        assert set(one.links) == ({0} if node else set(range(1, num_nodes)))
        for other, stream in one.streams.items():
            stream.sendall(bytes([16 * node + other]))
    for node, one in enumerate(nodes):
        for other, stream in one.streams.items():
            assert stream.recv(2) == bytes([16 * other + node])
    assert group.missing[0] == f"waiting for node {', node '.join(map(str, range(1, num_nodes)))}"


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"version": "1.1"}, "pagewood-engine must be 1.0 on all nodes, got 1.1 on node 1"),
        ({"model": "cd" * 32}, "model must have the same files on all nodes, got cdcdcdcdcdcd on node 1, not abab"),
        ({"config": {"page_size": "8"}}, "page_size must be 16 as on node 0, got 8 on node 1"),
        ({"config": {"page_size": "16", "new": "1"}}, "new must be None as on node 0, got 1 on node 1"),
        ({"num_nodes": 3, "node": 2}, "nnodes must be 2 on all nodes, got 3 on node 2"),
        ({"node": 0}, "node_rank must be another one than 0, below 2, got 0"),
        ({"node": 7}, "node_rank must be another one than 0, below 2, got 7"),
    ],
)
def test_a_node_that_differs_is_refused(
    others: dict[str, Any], message: str, gathering: Callable[..., Gathering]
) -> None:
    group = gathering()
    link = dialled(group, identity(**{"node": 1, **others}).hello(generation=None))
    answer = decode(link.receive())
    assert isinstance(answer, Refused)
    assert answer.reason.startswith(message)
    assert answer.is_final
    link.close()
    group.join(identity(1))  # node 0 waits on
    assert group.found.result(20).links


def dialled(group: Gathering, hello: Hello, secret: bytes = SECRET) -> Link:
    """Dial node 0 as soon as it listens."""
    while True:
        try:
            return group.dial(hello, secret)
        except ConnectionRefusedError:
            continue


def test_a_refused_node_gives_up(gathering: Callable[..., Gathering]) -> None:
    group = gathering()
    with pytest.raises(RefusedError, match="page_size must be 16"):
        group.join(identity(1, config={"page_size": "8"})).result(20)
    with pytest.raises(WrongSecretError, match="node_secret_file must hold the same on all nodes"):
        group.join(identity(1, secret=b"another secret")).result(20)
    with pytest.raises(WrongSecretError, match="node_secret_file must hold the same on all nodes"):
        group.join(identity(1, secret=b"")).result(20)
    assert not group.found.done()
    group.join(identity(1))
    assert group.found.result(20).links


def test_connections_of_another_generation_are_refused(
    gathering: Callable[..., Gathering], monkeypatch: pytest.MonkeyPatch
) -> None:
    group = gathering()
    link = dialled(group, identity(1).hello(generation=5))
    answer = decode(link.receive())
    assert answer == Refused(reason="its group has ended", is_final=False)
    link.close()
    old: list[object] = []
    take = meetings._take_streams  # pyright: ignore[reportPrivateUsage]

    def take_after_an_old_one(door: Any, nodes: range, generation: int, *others: Any) -> None:
        if 1 in nodes and not old:
            link = group.dial(identity(1).hello(generation=generation - 1))
            old.append(link)
        take(door, nodes, generation, *others)

    monkeypatch.setattr(meetings, "_take_streams", take_after_an_old_one)
    group.join(identity(1))
    found = group.found.result(20)
    (link,) = old
    assert isinstance(link, Link)
    assert decode(link.receive()) == Refused(reason="another group begins", is_final=False)
    link.close()
    other = group.others[0].result(20)
    assert other is not None
    found.streams[1].sendall(b"x")  # the right one was taken
    assert other.streams[0].recv(1) == b"x"


def test_a_node_that_goes_again_does_not_count(gathering: Callable[..., Gathering]) -> None:
    group = gathering(3)
    link = dialled(group, identity(1, 3).hello(generation=None))
    link.receive()
    link.close()
    link = dialled(group, identity(1, 3).hello(generation=None))
    link.receive()
    group.join(identity(1, 3))  # comes in its place
    while not isinstance(answer := decode(link.receive()), Refused):
        pass
    assert answer == Refused(reason="it has come again", is_final=False)
    link.close()
    group.join(identity(2, 3))
    assert set(group.found.result(20).streams) == {1, 2}


HOSTILE: dict[str, bytes] = {
    "nothing": b"",
    "a request over HTTP": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "another version": b"pagewood-nodes-9" + bytes(100),
    "a wrong proof": b"pagewood-nodes-1" + bytes(64),
    "very much": os.urandom(1 << 20),
    "half of a beginning": b"pagewood",
}


def test_hostile_bytes_do_no_harm(gathering: Callable[..., Gathering], caplog: pytest.LogCaptureFixture) -> None:
    group = gathering()
    open_ones = [group.connect() for _ in range(3)]  # that never say anything
    with caplog.at_level(logging.WARNING):
        for data in HOSTILE.values():
            with group.connect() as one, suppress(OSError):
                one.sendall(data)
                one.shutdown(socket.SHUT_WR)
                while one.recv(1000):
                    pass
        with group.connect() as one:  # knows the secret, and sends no message
            prove(one, SECRET, listens=False, limit_s=20)
            one.sendall(b"\xff" * 100)
            with suppress(ConnectionResetError):
                assert not one.recv(1)
    assert not group.found.done()
    assert "another secret" in caplog.text
    assert "is no node" in caplog.text
    group.join(identity(1))
    assert group.found.result(20).links
    for one in open_ones:
        one.close()


@pytest.mark.parametrize("listens", [True, False])
def test_what_comes_back_to_an_end_proves_nothing(listens: bool) -> None:
    own, other = socket.socketpair()

    def reflect() -> None:
        with suppress(OSError):
            while data := other.recv(1000):
                other.sendall(data)

    thread = threading.Thread(target=reflect, daemon=True)
    thread.start()
    with pytest.raises((WrongSecretError, OSError)):
        prove(own, SECRET, listens=listens, limit_s=0.5)
    own.close()
    thread.join()
    other.close()


def test_an_end_that_sends_a_byte_at_a_time_is_given_up() -> None:
    own, other = socket.socketpair()
    is_over = threading.Event()

    def drip() -> None:
        while not is_over.wait(0.05):
            other.send(b"p")

    thread = threading.Thread(target=drip, daemon=True)
    thread.start()
    with pytest.raises((OSError, WrongMessageError)):
        prove(own, SECRET, listens=True, limit_s=0.3)
    is_over.set()
    thread.join()
    own.close()
    other.close()


def test_long_messages_are_refused_before_they_are_read() -> None:
    own, other = socket.socketpair()
    other.sendall((1 << 40).to_bytes(8, "little"))
    with pytest.raises(WrongMessageError, match="a message must have at most 1000 bytes, got 1099511627776"):
        Link(own, most_bytes=1000).receive()
    own.close()
    other.close()


def test_secrets_are_read_from_files_that_only_the_user_can_read(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    with pytest.raises(ValueError, match="node_secret_file cannot be read"):
        read_secret(str(file))
    file.write_bytes(b" " + SECRET + b"\n")
    file.chmod(0o640)
    with pytest.raises(ValueError, match=r"node_secret_file must be closed to other users .*, got mode 640"):
        read_secret(str(file))
    file.chmod(0o600)
    assert read_secret(str(file)) == SECRET
    assert read_secret(None) == b""
    file.write_bytes(b"short")
    with pytest.raises(ValueError, match="node_secret_file must hold at least 16 bytes, got 5"):
        read_secret(str(file))


@pytest.mark.parametrize("text", ["", "host", "host:", ":5", "host:0", "host:65536", "host:x", "a:b:5", "[]:5"])
def test_wrong_addresses(text: str) -> None:
    with pytest.raises(ValueError, match=r"master_addr must be like 10\.0\.0\.1:29500"):
        Address.parsed(text)


def test_addresses() -> None:
    assert Address.parsed("10.0.0.1:29500") == Address("10.0.0.1", 29500)
    assert Address.parsed("[fd00::1]:5") == Address("fd00::1", 5)
    assert Address.parsed("[::1]:5").is_loopback
    assert Address.parsed("localhost:5").is_loopback
    assert not Address.parsed("example.org:5").is_loopback
