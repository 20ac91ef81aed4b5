import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewood.kvpool.tiers import ArrayPages, HostTier
from pagewood.kvpool.tiers.pages.device import ChainedPages, copy_rows


@given(
    data=st.data(),
    row_bytes=st.sampled_from([1, 7, 100_000, 300_000]),
    n=st.integers(0, 8),
    is_source_run=st.booleans(),
    is_target_run=st.booleans(),
)
def test_rows_of_any_order_and_size_are_copied(
    data: st.DataObject, row_bytes: int, n: int, is_source_run: bool, is_target_run: bool
) -> None:
    source = np.random.default_rng(0).integers(0, 256, (10, row_bytes), np.uint8)
    target = np.zeros((10, row_bytes + 5), np.uint8)[:, 2:-3]  # not contiguous, as in a page image
    rows: list[np.ndarray[tuple[int], np.dtype[np.intp]]] = []
    for is_run in (is_source_run, is_target_run):
        drawn = data.draw(st.permutations(range(10)))[:n]
        rows.append(np.arange(1, n + 1) if is_run else np.array(drawn, np.intp))
    expected = np.zeros_like(target)
    for a, b in zip(*rows, strict=True):
        expected[b] = source[a]
    copy_rows(source, rows[0], target, rows[1])
    assert np.array_equal(target, expected)


def test_pages_are_copied_out_and_back_layer_by_layer() -> None:
    rng = np.random.default_rng(0)
    layers = [[rng.integers(0, 256, (6, n), np.uint8) for n in sizes] for sizes in ((8, 4), (16,))]
    before = [[array.copy() for array in arrays] for arrays in layers]
    device = ArrayPages(layers)
    assert device.page_bytes == 28
    host = HostTier(page_bytes=28, num_pages=4)
    device.read([4, 1], host.memory, [2, 0])
    assert host.row(2).tobytes() == b"".join(array[4].tobytes() for arrays in before for array in arrays)

    def arrived(num_layers: int) -> None:
        for arrays, befores in zip(layers[:num_layers], before[:num_layers], strict=True):
            for array, were in zip(arrays, befores, strict=True):
                assert np.array_equal(array[[3, 5]], were[[4, 1]])
        if num_layers == 1:
            assert np.array_equal(layers[1][0], before[1][0])
        reports.append(num_layers)

    reports: list[int] = []
    device.write([3, 5], host.memory, [2, 0], arrived)
    assert reports == [1, 2]


def test_memories_one_behind_the_other_are_one() -> None:
    rng = np.random.default_rng(0)
    whole = [rng.integers(0, 256, (12, n), np.uint8) for n in (8, 16)]
    before = [layer.copy() for layer in whole]
    device = ChainedPages([ArrayPages([[layer[a : a + 4]] for layer in whole]) for a in (0, 4, 8)], num_pages=4)
    assert device.page_bytes == 24
    host = HostTier(page_bytes=24, num_pages=4)
    device.read([9, 1, 8], host.memory, [2, 0, 1])
    assert host.row(2).tobytes() == before[0][9].tobytes() + before[1][9].tobytes()
    reports: list[int] = []
    device.write([3, 7, 2], host.memory, [2, 0, 1], reports.append)
    assert [num for num in reports if num] == [1, 2]
    for layer, were in zip(whole, before, strict=True):
        were[[3, 7, 2]] = were[[9, 1, 8]]
        assert np.array_equal(layer, were)


def test_arrays_of_another_kind_are_errors() -> None:
    with pytest.raises(ValueError, match="layers must not be empty"):
        ArrayPages([])
    with pytest.raises(ValueError, match=r"layers must be 2-dimensional uint8, got int32 of shape \(2, 2\)"):
        ArrayPages([[np.zeros((2, 2), np.int32)]])  # pyright: ignore[reportArgumentType]
