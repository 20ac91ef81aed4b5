"""`num_common_items` agrees with a naive comparison."""

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from pagewood.radixcache.arrays import from_bytes, num_common_items

keys = st.lists(st.integers(-1, 1), max_size=12).map(lambda items: [5, *items])


@given(keys, keys, st.lists(st.integers(0, 9), max_size=3))
def test_num_common_items(left: list[int], right: list[int], before: list[int]) -> None:
    naive = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    left_bytes, right_bytes = np.array(left, np.int32).tobytes(), np.array(before + right, np.int32).tobytes()
    assert num_common_items(left_bytes, right_bytes, 4 * len(before)) == naive


@given(
    st.sampled_from([8191, 8192, 8193, 16384, 20_000]), st.sampled_from([8192, 16_383, 16_385, 30_000]), st.data(),
    st.integers(0, 3), st.booleans(),
)  # fmt: skip
def test_num_common_items_of_long_keys(
    num_left: int, num_right: int, data: st.DataObject, before: int, is_view: bool
) -> None:
    left, right = np.zeros(num_left, np.int32), np.zeros(before + num_right, np.int32)
    both = min(num_left, num_right)
    near = st.sampled_from([0, 8191, 8192, 16_383, both - 1])
    differing = data.draw(st.lists(near | st.integers(0, both - 1), max_size=3))
    for place in differing:
        if place < both:
            right[before + place] = 1
    naive = min([place for place in differing if place < both], default=both)
    key = right.tobytes()
    assert num_common_items(left.tobytes(), memoryview(key) if is_view else key, 4 * before) == naive


def test_from_bytes_of_no_parts_is_an_empty_array() -> None:
    assert from_bytes([]).tolist() == []
    assert from_bytes([]).dtype == np.int32
