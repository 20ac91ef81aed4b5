import logging
from collections.abc import Sequence

import numpy as np
import pytest

from pagewood.kvpool.tiers import Breaker, PageStore
from pagewood.kvpool.tiers.pages.arrays import Bytes

KEYS = [bytes([number]) * 32 for number in range(3)]
PAGES = [np.zeros(8, np.uint8) for _ in KEYS]


class Flaky:
    """A store that has every page, if it works."""

    def __init__(self) -> None:
        self.reads = self.writes = True
        self.num_calls = 0

    def put(self, keys: Sequence[bytes], pages: Sequence[Bytes]) -> None:
        self.num_calls += 1
        if not self.writes:
            raise OSError("disk full")

    def get(self, keys: Sequence[bytes], pages: Sequence[Bytes]) -> list[bool]:
        self.num_calls += 1
        if not self.reads:
            raise OSError("no connection")
        return [True] * len(keys)

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        return self.get(keys, [])

    def close(self) -> None: ...


def test_a_dead_store_is_called_and_logged_ever_less_often(caplog: pytest.LogCaptureFixture) -> None:
    now_s, flaky = [0.0], Flaky()
    store: PageStore = Breaker(flaky, name="the disk", clock=lambda: now_s[0])
    flaky.reads = False
    for _ in range(10_000):
        now_s[0] += 0.1
        try:
            found = store.get(KEYS, PAGES)
        except OSError:
            continue
        assert found == [False] * 3
    # 3 calls, then one after 1, 2, 4, ... 32 s and one each minute of 1,000 s.
    assert 15 < flaky.num_calls < 30
    assert len(caplog.records) == flaky.num_calls
    assert "reading from the disk has failed 3 times, and is not called for 1 s: no connection" in caplog.messages[2]
    assert store.exists(KEYS) == [False] * 3
    store.put(KEYS, PAGES)  # writes are counted apart


def test_one_success_ends_the_pause(caplog: pytest.LogCaptureFixture) -> None:
    now_s, flaky = [0.0], Flaky()
    store = Breaker(flaky, name="the disk", clock=lambda: now_s[0])
    flaky.writes = False
    for _ in range(3):
        with pytest.raises(OSError, match="disk full"):
            store.put(KEYS, PAGES)
    flaky.writes = True
    num_calls = flaky.num_calls
    with pytest.raises(OSError, match="left alone for a while"):
        store.put(KEYS, PAGES)
    assert flaky.num_calls == num_calls
    now_s[0] = 1.5
    store.put(KEYS, PAGES)
    assert caplog.messages[-1] == "writing to the disk works again, after 3 failures"
    flaky.writes = False
    for _ in range(2):  # counted from the start again
        with pytest.raises(OSError, match="disk full"):
            store.put(KEYS, PAGES)
    assert [record.levelno for record in caplog.records[-2:]] == [logging.WARNING] * 2
    assert store.get(KEYS, PAGES) == [True] * 3
    store.close()
