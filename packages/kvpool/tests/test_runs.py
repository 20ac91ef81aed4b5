import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewood.kvpool.runs import parts_of, taken

run_lists = st.lists(st.tuples(st.integers(-3, 9000), st.integers(1, 5000)), min_size=1, max_size=5)


@given(run_lists)
@settings(max_examples=50, deadline=None)
def test_parts_are_the_pages_and_their_indices(runs: list[tuple[int, int]]):
    pages = np.concatenate([np.arange(start, start + length, dtype=np.int32) for start, length in runs])
    parts = parts_of(pages, 10_000)
    assert np.concatenate([ids for ids, _ in parts]).tolist() == pages.tolist()
    is_of_pool = pages.min() >= 0 and pages.max() < 10_000 and len(np.unique(pages)) == len(pages)
    for ids, index in parts:
        if isinstance(index, slice):
            assert np.arange(10_000)[index].tolist() == ids.tolist()
            assert is_of_pool
        else:
            assert index.tolist() == ids.view(np.uint32).tolist()
    if len(pages) >= 4096 and is_of_pool:
        assert all(isinstance(index, slice) for _, index in parts)


def test_ids_at_both_ends_of_int32_are_no_run():
    high, low = np.iinfo(np.int32).max, np.iinfo(np.int32).min
    pages = np.concatenate([np.arange(5000), [high, low]]).astype(np.int32)  # the difference of the last two wraps to 1
    assert [type(index) for _, index in parts_of(pages, high)] == [np.ndarray]


@pytest.mark.parametrize("number", [10, 5000])
def test_places_are_read_in_runs_or_one_by_one(number: int):
    array = np.random.default_rng(0).permutation(20_000).astype(np.int32)
    places = np.arange(number, dtype=np.int32)
    for order in (places, np.roll(places, 7), places[::-1], np.zeros_like(places)):
        assert taken(array, order).tolist() == array[order].tolist()
