"""A store that is opened later holds nothing until then, and an error costs the store only."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from threading import Event

import numpy as np
import pytest

from pagewood.engine.assembly.tiers.late_store import LateStore
from pagewood.kvpool.tiers import DiskTier

KEYS = [bytes([number]) * 32 for number in (1, 2)]


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def disk(folder: Path, fingerprint: bytes = b"a") -> DiskTier:
    return DiskTier(folder / "pages", page_bytes=64, num_bytes=640, fingerprint=fingerprint)


def test_it_is_empty_until_it_is_open(tmp_path: Path) -> None:
    may_open = Event()

    def make() -> DiskTier:
        may_open.wait()
        return disk(tmp_path)

    store = LateStore(make, name="the store")
    pages = [np.full(64, number, np.uint8) for number in (1, 2)]
    store.put(KEYS[:1], pages[:1])
    assert store.exists(KEYS) == store.get(KEYS, [np.zeros(64, np.uint8) for _ in KEYS]) == [False, False]
    assert not (tmp_path / "pages").exists()
    may_open.set()
    until(lambda: store.put(KEYS[1:], pages[1:]) or store.exists(KEYS) == [False, True])
    found = [np.zeros(64, np.uint8) for _ in KEYS]
    assert store.get(KEYS, found) == [False, True]
    assert np.array_equal(found[1], pages[1])
    store.close()
    disk(tmp_path).close()  # it is not locked any more


def test_a_store_that_is_closed_before_it_is_open_does_not_stay_open(tmp_path: Path) -> None:
    may_open, opened = Event(), Event()

    def make() -> DiskTier:
        may_open.wait()
        made = disk(tmp_path)
        opened.set()
        return made

    store = LateStore(make, name="the store")
    store.close()
    may_open.set()
    opened.wait()

    def can_be_opened() -> bool:
        try:
            disk(tmp_path).close()
        except ValueError:
            return False
        return True

    until(can_be_opened)
    assert store.exists(KEYS) == [False, False]


def test_an_error_leaves_it_empty(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    disk(tmp_path, b"of another model").close()
    store = LateStore(lambda: disk(tmp_path), name="the disk cache")
    until(lambda: "the disk cache is not used: path must hold pages of the same model and layout" in caplog.text)
    store.put(KEYS, [np.zeros(64, np.uint8) for _ in KEYS])
    assert store.exists(KEYS) == [False, False]
    store.close()


def test_without_a_digest_it_stays_empty() -> None:
    store = LateStore(lambda: None, name="the store")
    store.put(KEYS, [np.zeros(64, np.uint8) for _ in KEYS])
    assert store.exists(KEYS) == [False, False]
    store.close()
