import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pagewood.kvpool import OutOfRows, TicketPool


def tickets(*values: int) -> NDArray[np.int64]:
    return np.array(values, dtype=np.int64)


def is_refused(pool: TicketPool, ticket: int) -> bool:
    for use in (pool.rows, pool.free):
        try:
            use(tickets(ticket))
        except ValueError as error:
            if str(ticket) not in str(error):
                raise
        else:
            return False
    return True


@given(st.integers(1, 6), st.data())
def test_a_ticket_is_valid_from_alloc_to_free_and_never_again(num_rows: int, data: st.DataObject):
    pool = TicketPool(num_rows)
    held: dict[int, int] = {}
    stale: list[int] = []
    for _ in range(data.draw(st.integers(0, 20))):
        if held and data.draw(st.booleans()):
            freed = data.draw(st.lists(st.sampled_from(sorted(held)), unique=True, min_size=1))
            pool.free(tickets(*freed))
            for ticket in freed:
                del held[ticket]
            stale += freed
        else:
            n = data.draw(st.integers(0, num_rows - len(held)))
            fresh = pool.alloc(n)
            assert fresh.dtype == np.int64
            assert len(fresh) == n
            assert not {*held, *stale} & set(fresh.tolist())
            held.update(zip(fresh.tolist(), pool.rows(fresh).tolist(), strict=True))
        assert pool.num_free == num_rows - len(held)
        assert len(set(held.values())) == len(held)
        assert set(held.values()) <= set(range(num_rows))
        assert pool.rows(tickets(*held)).tolist() == list(held.values())
        assert all(is_refused(pool, ticket) for ticket in stale)


def test_the_error_for_a_stale_ticket_says_that_it_is_stale():
    pool = TicketPool(2)
    old = pool.alloc(1)
    pool.free(old)
    with pytest.raises(ValueError, match="tickets must be valid, got 0, which is stale: row 0 has been freed since"):
        pool.rows(old)
    new = pool.alloc(1)
    assert pool.rows(new).tolist() == [0]
    with pytest.raises(ValueError, match="got 0, which is stale"):
        pool.free(old)


def test_the_next_ticket_of_a_free_row_is_not_valid_yet():
    pool = TicketPool(1)
    pool.free(pool.alloc(1))
    with pytest.raises(ValueError, match=f"got {2**32}, which was never handed out"):
        pool.rows(tickets(2**32))
    assert pool.alloc(1).tolist() == [2**32]


@pytest.mark.parametrize("wrong", [-1, 1, 2, 2**32, 2**62])
def test_a_number_that_is_not_a_ticket_is_refused(wrong: int):
    pool = TicketPool(2)
    pool.alloc(1)
    with pytest.raises(ValueError, match=f"tickets must be valid, got {wrong}, which was never handed out"):
        pool.rows(tickets(wrong))


def test_a_wrong_free_frees_nothing():
    pool = TicketPool(3)
    a, b = pool.alloc(2).tolist()
    with pytest.raises(ValueError, match="tickets must be distinct"):
        pool.free(tickets(a, b, a))
    with pytest.raises(ValueError, match="tickets must be valid"):
        pool.free(tickets(a, 2))
    with pytest.raises(ValueError, match="tickets must be a one-dimensional int64 array"):
        pool.free(np.array([a], dtype=np.int32))  # pyright: ignore[reportArgumentType]
    assert pool.num_free == 1
    assert pool.rows(tickets(a, b)).tolist() == [0, 1]


def test_out_of_rows_has_both_numbers():
    pool = TicketPool(3)
    pool.alloc(1)
    with pytest.raises(OutOfRows, match="requested 3 rows, 2 are free") as caught:
        pool.alloc(3)
    assert (caught.value.requested, caught.value.available) == (3, 2)
    assert pool.num_free == 2
    with pytest.raises(ValueError, match="n must be >= 0, got -1"):
        pool.alloc(-1)


@pytest.mark.parametrize("num_rows", [0, -1, 2**31])
def test_num_rows_is_checked(num_rows: int):
    with pytest.raises(ValueError, match=rf"num_rows must be in \[1, {2**31}\), got {num_rows}"):
        TicketPool(num_rows)
