# pyright: basic
# torch is optional here, so it comes from importorskip, which has no types.
import pytest

from pagewood.kvpool import OutOfRows, PageArray, StateLayout

torch = pytest.importorskip("torch")

from pagewood.kvpool.states import StatePool  # noqa: E402

LAYOUT = StateLayout(
    num_layers=2,
    arrays=(
        PageArray(name="conv", dtype="bfloat16", shape=(4, 3)),
        PageArray(name="ssm", dtype="float32", shape=(2, 5)),
    ),
)


def test_a_state_starts_as_zeros_after_another_holder():
    pool = StatePool(LAYOUT, 3)
    first = pool.alloc(2)
    for layer in range(2):
        for name in ("conv", "ssm"):
            pool.array(layer, name)[pool.rows(first)] = 1
    kept = pool.checksum(first[1])
    pool.free(first[:1])
    second = pool.alloc(1)
    assert pool.rows(second).tolist() == [0]
    assert not any(pool.array(layer, name)[0].any() for layer in range(2) for name in ("conv", "ssm"))
    assert pool.checksum(first[1]) == kept != pool.checksum(second[0])


def test_arrays_have_the_shapes_of_the_layout():
    pool = StatePool(LAYOUT, 3)
    assert (pool.num_rows, pool.num_free) == (3, 3)
    assert pool.array(1, "conv").shape == (3, 4, 3)
    assert pool.array(1, "conv").dtype == torch.bfloat16
    assert pool.array(0, "ssm").shape == (3, 2, 5)


def test_a_state_can_be_copied_and_restored():
    pool = StatePool(LAYOUT, 3)
    running, snapshot = pool.alloc(1), pool.alloc(1)
    ssm = pool.array(1, "ssm")
    ssm[pool.rows(running)] = 5
    pool.copy(running, snapshot)
    expected = pool.checksum(running[0])
    ssm[pool.rows(running)] += 1
    assert pool.checksum(running[0]) != expected
    pool.copy(snapshot, running)
    assert pool.checksum(running[0]) == pool.checksum(snapshot[0]) == expected


def test_a_stale_ticket_is_an_error_everywhere():
    pool = StatePool(LAYOUT, 2)
    old = pool.alloc(1)
    pool.free(old)
    new = pool.alloc(1)
    for use in (pool.rows, pool.free, lambda t: pool.copy(t, new), lambda t: pool.copy(new, t)):
        with pytest.raises(ValueError, match="got 0, which is stale"):
            use(old)
    with pytest.raises(ValueError, match="got 0, which is stale"):
        pool.checksum(old[0])


def test_a_full_pool_and_bad_sizes_are_errors():
    pool = StatePool(LAYOUT, 2)
    with pytest.raises(OutOfRows, match="requested 3 rows, 2 are free"):
        pool.alloc(3)
    with pytest.raises(ValueError, match=r"num_rows must be in \[1, .*got 0"):
        StatePool(LAYOUT, 0)
