# pyright: basic
"""Pages that two processes read from each other over NIXL: real agents over TCP, and a real directory."""

import itertools
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from pagewood.kvpool.tiers import RedisPlace
from pagewood.kvpool.tiers.testing import store_conformance

pytest.importorskip("nixl_cu12._api", exc_type=ImportError)
from pagewood.kvpool.integrations.nixl import NixlStore
from peer_process import peer_process
from resp_server import redis_binary, redis_process

if redis_binary() is None:
    pytest.skip("redis-server is not installed", allow_module_level=True)

PAGE = 4096
PATIENT_S = 60.0
os.environ["UCX_TLS"] = "tcp,self"  # memory of another process is otherwise read without its help


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with redis_process() as (port, _):
        yield port


def opened(port: int, *, timeout_s: float = PATIENT_S, num_pages: int = 200, **options) -> NixlStore:
    where = RedisPlace(host="127.0.0.1", port=port, timeout_s=timeout_s)
    size = options.pop("page_bytes", PAGE)
    return NixlStore(where, **{"page_bytes": size, "num_bytes": num_pages * size, "fingerprint": b"x", **options})


def pages(number: int, seed: int = 0) -> list[np.ndarray]:
    return list(np.random.default_rng(seed).integers(0, 256, (number, PAGE), np.uint8))


def keys(number: int, first: int = 0) -> list[bytes]:
    return [index.to_bytes(32, "big") for index in range(first, first + number)]


def rows(number: int) -> np.ndarray:
    return np.zeros((number, PAGE), np.uint8)


def owner(port: int, number: int, fingerprint: str) -> AbstractContextManager[subprocess.Popen[str]]:
    """A process that has put pages; their bytes are `pages(number)`."""
    where = f"RedisPlace(host='127.0.0.1', port={port}, timeout_s={PATIENT_S})"
    options = f"page_bytes={PAGE}, num_bytes={number * PAGE}, fingerprint={fingerprint.encode()!r}"
    return peer_process(f"NixlStore({where}, {options})", num_pages=number, page_bytes=PAGE)


def test_conformance(port: int) -> None:
    numbers = itertools.count()

    def make(page_bytes: int) -> NixlStore:
        return opened(port, page_bytes=page_bytes, num_pages=64, fingerprint=b"%d" % next(numbers))

    machine = store_conformance(make)
    machine.TestCase.settings = settings(
        max_examples=4,
        stateful_step_count=15,
        deadline=None,
        suppress_health_check=(HealthCheck.too_slow, HealthCheck.filter_too_much),
    )
    machine.TestCase().runTest()


def test_a_process_reads_what_another_has_put(port: int) -> None:
    """More pages than one transfer has room for, and some of its own between them."""
    number = 2500
    given = pages(number)
    with owner(port, number, "two") as process:
        store = opened(port, fingerprint=b"two")
        assert len(store._landing) < number
        mine = pages(2, 1)
        store.put(keys(2, number), mine)
        store.put(keys(3), given[:3])
        assert len(store._slots) == 2  # what another has is not copied
        found = rows(number + 4)
        asked = [*keys(number + 3), keys(1)[0]]
        assert store.get(asked, list(found)) == [True] * (number + 2) + [False, True]
        assert np.array_equal(found[: number + 2], np.stack([*given, *mine]))
        assert np.array_equal(found[-1], given[0])
        assert store.exists(keys(number + 3)) == [True] * (number + 2) + [False]
        other = opened(port, fingerprint=b"other")
        assert other.exists(keys(3)) == [False] * 3
        other.close()
        process.communicate(timeout=60)  # it leaves
        assert store.exists(keys(3)) == [False] * 3
        store.close()


def test_pages_of_an_owner_that_is_killed_are_missing_and_can_be_put_again(port: int) -> None:
    with owner(port, 8, "killed") as process:
        store = opened(port, fingerprint=b"killed")
        found = rows(8)
        assert all(store.get(keys(8), list(found)))
        process.kill()
        process.wait()
    assert store.get(keys(4), list(found)[:4]) == [False] * 4
    assert store.exists(keys(8)) == [False] * 8  # also of those that were not asked for
    third = opened(port, fingerprint=b"killed")
    third.put(keys(8), pages(8))
    found = rows(8)
    assert store.get(keys(8), list(found)) == [True] * 8
    assert np.array_equal(found, np.stack(pages(8)))
    third.close()
    store.close()


def test_an_owner_that_was_never_asked_and_is_killed_is_a_miss(port: int) -> None:
    with owner(port, 2, "unasked") as process:
        process.kill()
        process.wait()
        store = opened(port, fingerprint=b"unasked")
        assert store.get(keys(2), list(rows(2))) == [False] * 2
        store.close()


def test_an_owner_that_stops_costs_the_time_limit(port: int) -> None:
    with owner(port, 8, "stopped") as process:
        store = opened(port, fingerprint=b"stopped")
        found = rows(8)
        assert all(store.get(keys(8), list(found)))
        store._timeout_s = 0.3
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(TimeoutError, match=r"did not send them within 0.3 s"):
            store.get(keys(8), list(found))
        process.send_signal(signal.SIGCONT)
        store._timeout_s = PATIENT_S
        found[:] = 0
        assert store.get(keys(8), list(found)) == [True] * 8
        assert np.array_equal(found, np.stack(pages(8)))
        store.close()


def test_the_oldest_pages_are_overwritten(port: int) -> None:
    store, reader = opened(port, num_pages=4, fingerprint=b"ring"), opened(port, fingerprint=b"ring")
    given = pages(10)
    store.put(keys(6), given[:6])  # more than there is room for
    store.put(keys(2, 6), given[6:8])
    assert reader.exists(keys(8)) == [False] * 4 + [True] * 4
    store.put(keys(1, 1), given[1:2])  # in the place of the fifth, not in its old one
    found = rows(8)
    are_there = [False, True, False, False, False, True, True, True]
    assert reader.get(keys(8), list(found)) == are_there
    assert np.array_equal(found[are_there], np.stack(given[:8])[are_there])
    store.close()
    reader.close()


@pytest.mark.parametrize("offset", [0, PAGE])
def test_a_page_that_changes_while_it_is_read_is_missing(port: int, offset: int) -> None:
    """And may be announced again by an owner that has it."""
    name = b"torn %d" % offset
    store, reader = opened(port, fingerprint=name), opened(port, fingerprint=name)
    given = pages(2)
    store.put(keys(2), given)
    store._arena[store._slots[keys(2)[0]], offset] ^= 1
    found = rows(2)
    assert reader.get(keys(2), list(found)) == [False, True]
    assert np.array_equal(found[1], given[1])
    store.put(keys(2), given)
    assert reader.get(keys(2), list(found)) == [True, True]
    assert np.array_equal(found, np.stack(given))
    store.close()
    reader.close()


def test_a_directory_that_has_forgotten_learns_again() -> None:
    with redis_process() as (port, process):
        store = opened(port)
        store.put(keys(4), pages(4))
        process.kill()
        process.wait()
        for call in (lambda: store.exists(keys(1)), lambda: store.get(keys(1), list(rows(1)))):
            with pytest.raises(OSError, match=r".+"):
                call()
        with pytest.raises(OSError, match=r".+"):
            store.put(keys(2, 4), pages(2, 1))
    with redis_process(port=port):
        deadline_s = time.monotonic() + 60
        reader, found = opened(port), rows(4)
        while not all(reader.get(keys(4), list(found))):
            assert time.monotonic() < deadline_s
            store.put(keys(4), pages(4))
        assert np.array_equal(found, np.stack(pages(4)))
        assert len(store._slots) == 4  # the ring has had them
        reader.close()
        store.close()


def test_bad_arguments_are_errors(port: int) -> None:
    with pytest.raises(ValueError, match="page_bytes must be >= 1, got 0"):
        opened(port, page_bytes=0)
    with pytest.raises(ValueError, match="num_bytes must be at least page_bytes, 4096, got 4095"):
        opened(port, num_bytes=4095)
