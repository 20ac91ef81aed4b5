import re
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from numpy.typing import NDArray

from pagewood.kvpool import OutOfRows, RowPool


def int32(*values: int) -> NDArray[np.int32]:
    return np.array(values, dtype=np.int32)


def int64(*values: int) -> NDArray[np.int64]:
    return np.array(values, dtype=np.int64)


class RowMachine(RuleBasedStateMachine):
    """Compares a pool of rows with a dict of lists."""

    @initialize(num_rows=st.integers(1, 5), max_pages=st.integers(1, 6))
    def make(self, num_rows: int, max_pages: int) -> None:
        self.pool = RowPool(num_rows, max_pages)
        self.rows: dict[int, list[int]] = {}
        self.stale: list[int] = []

    @rule(n=st.integers(0, 6))
    def alloc(self, n: int) -> None:
        num_free = self.pool.num_rows - len(self.rows)
        if n > num_free:
            with pytest.raises(OutOfRows, match=f"requested {n} rows, {num_free} are free"):
                self.pool.alloc(n)
        else:
            self.rows.update((ticket, []) for ticket in self.pool.alloc(n).tolist())

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        tickets = data.draw(st.lists(st.sampled_from(sorted(self.rows)), unique=True))
        self.pool.free(int64(*tickets))
        for ticket in tickets:
            del self.rows[ticket]
        self.stale += tickets

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def append(self, data: st.DataObject) -> None:
        tickets = data.draw(st.lists(st.sampled_from(sorted(self.rows)), unique=True))
        shares = [data.draw(st.lists(st.integers(0, 99), max_size=4)) for _ in tickets]
        pages, counts = int32(*(page for share in shares for page in share)), int32(*map(len, shares))
        if any(
            len(self.rows[ticket]) + len(share) > self.pool.max_pages
            for ticket, share in zip(tickets, shares, strict=True)
        ):
            with pytest.raises(ValueError, match="a row must have <= "):
                self.pool.append(int64(*tickets), pages, counts)
        else:
            self.pool.append(int64(*tickets), pages, counts)
            for ticket, share in zip(tickets, shares, strict=True):
                self.rows[ticket] += share

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.rows)))
        num_pages = data.draw(st.integers(0, len(self.rows[ticket])))
        assert self.pool.truncate(ticket, num_pages).tolist() == self.rows[ticket][num_pages:]
        del self.rows[ticket][num_pages:]

    @invariant()
    def rows_agree(self) -> None:
        if not hasattr(self, "pool"):
            return
        assert self.pool.num_free == self.pool.num_rows - len(self.rows)
        tickets = int64(*self.rows)
        assert self.pool.num_pages(tickets).tolist() == [len(pages) for pages in self.rows.values()]
        for (ticket, pages), row in zip(self.rows.items(), self.pool.rows(tickets), strict=True):
            assert self.pool.pages(ticket).tolist() == pages
            assert self.pool.table[row, : len(pages)].tolist() == pages
        for ticket in self.stale:
            with pytest.raises(ValueError, match="which is stale"):
                self.pool.append(int64(ticket), int32(), int32(0))


TestRows = RowMachine.TestCase
TestRows.settings = settings(max_examples=50)


def test_a_stale_row_is_an_error():
    pool = RowPool(2, 4)
    old = pool.alloc(1)
    pool.append(old, int32(7), int32(1))
    pool.free(old)
    new = pool.alloc(1)
    assert pool.rows(new).tolist() == [0]
    assert pool.pages(new[0]).tolist() == []
    for use in (pool.rows, pool.num_pages, pool.free):
        with pytest.raises(ValueError, match="got 0, which is stale: row 0 has been freed since"):
            use(old)
    with pytest.raises(ValueError, match="which is stale"):
        pool.pages(old[0])
    with pytest.raises(ValueError, match="which is stale"):
        pool.truncate(old[0], 0)


def test_a_wrong_append_changes_nothing():
    pool = RowPool(2, 3)
    tickets = pool.alloc(2)
    for counts in (int32(1), int32(1, 1), int32(4, -1)):
        with pytest.raises(ValueError, match=re.escape("counts must be 2 numbers >= 0 that sum to 3, got")):
            pool.append(tickets, int32(1, 2, 3), counts)
    with pytest.raises(ValueError, match=re.escape("a row must have <= 3 pages (max_pages), got 4")):
        pool.append(tickets, int32(1, 2, 3, 4, 5), int32(1, 4))
    with pytest.raises(ValueError, match="tickets must be distinct"):
        pool.append(tickets[[0, 0]], int32(1, 2), int32(1, 1))
    with pytest.raises(ValueError, match=re.escape("num_pages must be in [0, 0], got 1")):
        pool.truncate(tickets[0], 1)
    assert pool.num_pages(tickets).tolist() == [0, 0]


def test_the_table_is_read_only():
    with pytest.raises(ValueError, match="read-only"):
        RowPool(1, 1).table[0, 0] = 1


@pytest.mark.parametrize(("num_rows", "max_pages", "name"), [(0, 1, "num_rows"), (1, 0, "max_pages")])
def test_sizes_must_be_at_least_one(num_rows: int, max_pages: int, name: str):
    with pytest.raises(ValueError, match=f"{name} must be >= 1, got 0"):
        RowPool(num_rows, max_pages)


@pytest.mark.parametrize("dtype", [np.int64, np.float32, np.uint32, np.bool_])
def test_only_int32_is_appended(dtype: Any) -> None:
    pool = RowPool(2, 4)
    tickets = pool.alloc(1)
    one, counts = np.array([1], np.int32), np.array([1], np.int32)
    with pytest.raises(ValueError, match="pages must be a one-dimensional int32 array"):
        pool.append(tickets, one.astype(dtype), counts)
    with pytest.raises(ValueError, match="counts must be a one-dimensional int32 array"):
        pool.append(tickets, one, counts.astype(dtype))
    assert pool.num_pages(tickets).tolist() == [0]
