"""The store on a server of the Redis protocol: one of the tests' own, which may lie, and the real one if installed."""

import itertools
import time
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
from hypothesis import settings

from pagewood.kvpool.tiers import Breaker, RedisPlace, RedisStore
from pagewood.kvpool.tiers.pages.arrays import Bytes
from pagewood.kvpool.tiers.testing import store_conformance
from resp_server import RespServer, place, redis_binary, redis_process

PAGE = 100
needs_redis = pytest.mark.skipif(redis_binary() is None, reason="redis-server is not installed")


def key(index: int) -> bytes:
    return bytes([index]) * 32


def page(index: int, page_bytes: int = PAGE) -> Bytes:
    return np.random.default_rng(index).integers(0, 256, page_bytes, np.uint8)


def pages(*indices: int) -> tuple[list[bytes], list[Bytes]]:
    return [key(index) for index in indices], [page(index) for index in indices]


def rows(n: int, page_bytes: int = PAGE) -> list[Bytes]:
    return list(np.zeros((n, page_bytes), np.uint8))


@pytest.fixture
def server() -> Generator[RespServer]:
    server = RespServer()
    thread = Thread(target=server.run)
    thread.start()
    yield server
    server.close()
    thread.join()


def opened(server: RespServer, *, timeout_s: float = 5.0, fingerprint: bytes = b"x", **options: int) -> RedisStore:
    where = place(server.port, timeout_s=timeout_s)
    store = RedisStore(where, page_bytes=options.pop("page_bytes", PAGE), fingerprint=fingerprint, **options)
    server.users.append(store)
    return store


def test_conformance(server: RespServer) -> None:
    numbers = itertools.count()

    def make(page_bytes: int) -> RedisStore:
        return opened(server, page_bytes=page_bytes, fingerprint=b"%d" % next(numbers))

    machine = store_conformance(make)
    machine.TestCase.settings = settings(max_examples=15, stateful_step_count=20, deadline=None)
    machine.TestCase().runTest()


@needs_redis
def test_conformance_with_a_real_server() -> None:
    numbers = itertools.count()
    with redis_process() as (port, _):

        def make(page_bytes: int) -> RedisStore:
            return RedisStore(place(port), page_bytes=page_bytes, fingerprint=b"%d" % next(numbers))

        machine = store_conformance(make)
        machine.TestCase.settings = settings(max_examples=15, stateful_step_count=20, deadline=None)
        machine.TestCase().runTest()


def test_large_batches_are_sent_in_parts(server: RespServer) -> None:
    size, n = 3_000_000, 5
    store = opened(server, page_bytes=size)
    given = [page(index, size) for index in range(n)]
    store.put([key(index) for index in range(n)], given)
    found = rows(n + 1, size)
    assert store.get([key(index) for index in range(n + 1)], found) == [True] * n + [False]
    assert all(map(np.array_equal, found, given))
    assert store.exists([key(index) for index in range(n + 1)] * 300) == ([True] * n + [False]) * 300
    store.put([key(index) for index in range(n)], given)
    assert server.commands.count(b"SET") == n  # stored pages cost no copy
    store.close()


@pytest.mark.parametrize("damage", ["flip", "flipped sum", "cut", "longer", "empty", "page of another key"])
def test_a_damaged_value_is_a_miss(server: RespServer, damage: str) -> None:
    store = opened(server)
    store.put(*pages(1, 2))
    names = [name for name in server.values if name.endswith(key(1))]
    assert len(names) == 1
    value, other = server.values[names[0]], next(value for name, value in server.values.items() if name != names[0])
    server.values[names[0]] = {
        "flip": value[:7] + bytes([value[7] ^ 4]) + value[8:],
        "flipped sum": value[:-1] + bytes([value[-1] ^ 1]),
        "cut": value[:-1],
        "longer": value + bytes(200_000),
        "empty": b"",
        "page of another key": other,
    }[damage]
    found = rows(2)
    assert store.get([key(1), key(2)], found) == [False, True]
    assert np.array_equal(found[1], page(2))


def test_pages_of_other_models_layouts_and_namespaces_are_not_found(server: RespServer) -> None:
    opened(server, fingerprint=b"x").put(*pages(1))
    assert opened(server, fingerprint=b"y").get([key(1)], rows(1)) == [False]
    assert opened(server, page_bytes=PAGE + 1).get([key(1)], rows(1, PAGE + 1)) == [False]
    assert opened(server, fingerprint=b"x").get([key(1)], rows(1)) == [True]


@pytest.mark.parametrize(
    "answer",
    [
        b"-ERR no\r\n", b":1\r\n", b"$999999999999\r\n", b"$-7\r\n", b"$x\r\n", b"\r\n", b"x" * 100_000,
        b"$116\r\nHANG UP", b"$116\r\n" + bytes(118) + b"\r\n", b"HANG UP",
    ],
)  # fmt: skip
def test_an_answer_that_breaks_the_protocol_is_a_failure(server: RespServer, answer: bytes) -> None:
    store = opened(server)
    store.put(*pages(1))
    server.answer = lambda command: answer
    with pytest.raises(OSError, match="the server"):
        store.get([key(1)], rows(1))
    server.answer = server.usual
    assert store.get([key(1)], rows(1)) == [True]  # on a new connection
    store.close()


def test_a_server_that_says_nothing_costs_the_time_limit(server: RespServer) -> None:
    store = opened(server, timeout_s=0.05)
    server.answer = lambda command: None
    calls = (
        lambda: store.exists([key(1)]), lambda: store.get([key(1)], rows(1)), lambda: store.put(*pages(1)),
    )  # fmt: skip
    for call in calls:
        with pytest.raises(OSError, match=r"timed out|in time"):
            call()
    server.answer = server.usual
    for _ in range(100):  # its answer may be late, too, while the machine is busy
        with suppress(OSError):
            store.put(*pages(1))
            if store.get([key(1)], rows(1)) == [True]:
                return
    raise AssertionError("no page has come back")


def test_a_server_that_drips_costs_the_time_limit(server: RespServer) -> None:
    """Each byte comes in time, but not all of them."""
    store = opened(server)
    store.put(*pages(1))
    store.close()
    begun_s = time.monotonic()

    def drip(command: Sequence[bytes]) -> bytes:
        time.sleep(0.05)
        return b"+"

    server.answer = drip
    slow = opened(server, timeout_s=0.2)
    with pytest.raises(OSError, match=r"timed out|in time"):
        slow.get([key(1)] * 50, rows(50))
    assert time.monotonic() - begun_s < 30  # fifty answers alone would take longer than the limit of one batch


def test_connections_are_bounded(server: RespServer) -> None:
    store = opened(server, max_connections=2)
    store.put(*pages(*range(20)))

    def get(index: int) -> list[bool]:
        return store.get([key(index)], rows(1))

    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(get, list(range(20)) * 10))
    assert answers == [[True]] * 200
    assert server.most_connections <= 2
    server.answer = lambda command: None
    slow = opened(server, max_connections=1, timeout_s=0.3)
    with ThreadPoolExecutor(3) as threads:
        calls = [threads.submit(slow.exists, [key(1)]) for _ in range(3)]
    assert all(isinstance(call.exception(), OSError) for call in calls)


def test_a_connection_that_the_server_has_closed_is_not_used(server: RespServer) -> None:
    store = opened(server, max_connections=1)
    store.put(*pages(1))
    server.answer = lambda command: b":1\r\nHANG UP"  # behind an answer that is right
    assert store.exists([key(1)]) == [True]
    server.answer = server.usual
    assert store.get([key(1)], rows(1)) == [True]


def test_a_full_server_leaves_pages_out(server: RespServer) -> None:
    store = opened(server)

    def full(command: Sequence[bytes]) -> bytes:
        return b"-OOM command not allowed\r\n" if command[0] == b"SET" else server.usual(command)

    server.answer = full
    store.put(*pages(1, 2))
    assert store.exists([key(1), key(2)]) == [False, False]


def test_the_breaker_leaves_a_dead_server_alone_and_comes_back(server: RespServer) -> None:
    now_s = [0.0]
    store = Breaker(opened(server), name="redis", clock=lambda: now_s[0])
    store.put(*pages(1))
    server.answer = lambda command: b"HANG UP"
    for _ in range(3):
        with pytest.raises(OSError, match="closed"):
            store.get([key(1)], rows(1))
    num_commands = len(server.commands)
    for _ in range(100):
        assert store.get([key(1)], rows(1)) == store.exists([key(1)]) == [False]
    assert len(server.commands) == num_commands
    server.answer = server.usual
    now_s[0] = 100.0
    assert store.get([key(1)], rows(1)) == [True]
    assert store.exists([key(1)]) == [True]


def test_a_password_comes_from_a_file_and_is_not_shown(server: RespServer, tmp_path: Path) -> None:
    server.password = b"secret words"

    def guarded(command: Sequence[bytes]) -> bytes:
        if command[0] == b"AUTH" or b"AUTH" in server.commands:
            return server.usual(command)
        return b"-NOAUTH Authentication required.\r\n"

    server.answer = guarded
    with pytest.raises(OSError, match="NOAUTH"):
        opened(server).exists([key(1)])
    file = tmp_path / "password"
    file.write_text("secret words\n")
    where = RedisPlace.parse(f"redis://127.0.0.1:{server.port}/3?user=me&password_file={file}&timeout_s=7.5")
    assert (where.database, where.user, where.timeout_s) == (3, "me", 7.5)
    assert "secret" not in f"{where} {where!r}"
    store = RedisStore(where, page_bytes=PAGE)
    server.users.append(store)
    store.put(*pages(1))
    assert store.get([key(1)], rows(1)) == [True]
    assert b"SELECT" in server.commands


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("redis://", "must be redis://HOST:PORT/DATABASE"),
        ("redis://h:x", "must be redis://HOST:PORT/DATABASE"),
        ("redis://h/one", "must be redis://HOST:PORT/DATABASE"),
        ("rediss://h", "must be redis://HOST:PORT/DATABASE"),
        ("redis://:secret@h", "must have no password"),
        ("redis://h?tls=1", "may have each of password_file, timeout_s, user once"),
        ("redis://h?timeout_s=1&timeout_s=2", "may have each of"),
        ("redis://h?timeout_s=0", "timeout_s of a redis URL must be > 0 and finite, got '0'"),
        ("redis://h?timeout_s=nan", "timeout_s of a redis URL must be > 0 and finite"),
        ("redis://h?user=me", "must come with password_file"),
        ("redis://h?password_file=/nowhere", "password_file of a redis URL must be a text file"),
    ],
)
def test_a_wrong_url_is_an_error(url: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        RedisPlace.parse(url)
    assert "secret" not in str(caught.value)


def test_bad_arguments_are_errors(server: RespServer) -> None:
    with pytest.raises(ValueError, match="page_bytes must be >= 1, got 0"):
        opened(server, page_bytes=0)
    with pytest.raises(ValueError, match="page_bytes must be at most"):
        opened(server, page_bytes=2**29)
    with pytest.raises(ValueError, match="max_connections must be >= 1, got 0"):
        opened(server, max_connections=0)
    with pytest.raises(ValueError, match="keys must have 32 bytes, got 1"):
        opened(server).put([b"x"], [page(1)])


@needs_redis
def test_a_real_server_forgets_by_last_use_and_may_be_killed() -> None:
    with redis_process("--maxmemory", "8mb", "--maxmemory-policy", "allkeys-lru") as (port, process):
        store = RedisStore(place(port, timeout_s=2.0), page_bytes=100_000)
        for index in range(200):
            store.put([key(index % 256)], [page(index, 100_000)])
        found = rows(200, 100_000)
        there = store.get([key(index) for index in range(200)], found)
        assert 0 < sum(there) < 80
        assert all(np.array_equal(found[i], page(i, 100_000)) for i in range(200) if there[i])
        process.kill()
        process.wait()
        with pytest.raises(OSError, match=r".+"):
            store.get([key(199)], rows(1, 100_000))
        with pytest.raises(OSError, match=r".+"):
            store.put([key(199)], [page(199, 100_000)])
        store.close()
